"""The weight table: every tensor of the model once, under our name and under its Hugging Face names.

Conversion both ways, resharding, loading, the keys a stage must hold and verification all ask here: no other module
spells a weight name.  ``mm.weights.fuse`` puts weights together as this table says.

Our names and fused layouts are MindSpeed-MM's, except that layer numbers are global (``mm.checkpoint.mindspeed_layout``
has its local ones).  Hugging Face names are the published ones, from the model's family.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase, translate
from functools import cache
from itertools import groupby
from typing import TypeVar

from mm.config.layers import layers_in
from mm.config.model import LanguageConfig, ModelConfig, Tower
from mm.families import FAMILIES
from mm.families.family import LayerNames
from mm.placement import StageSpec

Value = TypeVar("Value")
Names = tuple[str, ...]
Shapes = tuple[tuple[int, ...], ...]

# Names, and patterns for them in flags and the model JSON

ALL_LINEAR = "all-linear"
"""PEFT's word for every linear layer of a model but the output layer."""

LIVE_STARTS = {live: published for family in FAMILIES for live, published in family.weights.live_starts.items()}
"""``WeightNames.live_starts`` of all families, because a weights file does not state its family."""


def published_name(name: str) -> str:
    """The published form of a Hugging Face name in either spelling; an unknown name is returned unchanged."""
    return next((published + name.removeprefix(live)
                 for live, published in LIVE_STARTS.items() if name.startswith(live)), name)


def live_name(name: str) -> str:
    """The name in transformers' live module of a published name; an unknown name is returned unchanged."""
    return next((live + name.removeprefix(published)
                 for live, published in LIVE_STARTS.items() if name.startswith(published)), name)


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` occurs anywhere in ``name``, ignoring case: MindSpeed-MM's rule for its keywords.

    Beyond it, ``*``, ``?`` and ``[0-9]`` mean what they mean in a shell.
    """
    return fnmatchcase(name.lower(), f"*{pattern.lower()}*")


def is_target(pattern: str, names: Iterable[str]) -> bool:
    """Whether ``pattern`` names the layer with these ``names``: PEFT's rule for a list of target modules.

    A pattern is a whole name, or the words at its end: ``q_proj``, ``layers.3.mlp.up_proj``.  Beyond PEFT, ``*``, ``?``
    and ``[0-9]`` mean what they mean in a shell, and a word such as ``0-15`` matches any number in that range.
    """
    return pattern == ALL_LINEAR or any(_expression(pattern).fullmatch(name) for name in names)


def chosen(by_pattern: Iterable[tuple[str, Value]], names: Collection[str], default: Value) -> Value:
    """The value of the first pattern that names the layer with these ``names``; ``default`` if there is none."""
    return next((value for pattern, value in by_pattern if is_target(pattern, names)), default)


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    words: list[str] = []
    for word in pattern.split("."):
        span = re.fullmatch(r"(\d{1,3})-(\d{1,3})", word)  # more digits than layers have would be a huge expression
        if span is None:
            words.append(translate(word).removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z"))
        else:
            words.append(f"(?:{'|'.join(map(str, range(int(span[1]), int(span[2]) + 1)))})")
    return re.compile(rf"(?:.*\.)?{re.escape('.').join(words)}", re.DOTALL)


# What a weight is

EMBEDDING_NAME = "text_decoder.embedding.word_embeddings.weight"
OUTPUT_LAYER_NAME = "text_decoder.output_layer.weight"


class Fusion(Enum):
    """How the Hugging Face tensors of a weight become ours."""

    COPY = "one tensor, as it is"
    STACKED_QKV = "[Q; K; V] in one tensor, as it is; each of the three is cut"
    GROUPED_QKV = "q, k, v -> per key/value group [its query heads, k, v]"
    PER_HEAD_QKV = "[Q; K; V] in one tensor -> per head [q, k, v]"
    GATE_UP = "gate, up -> [gate; up]"


class Place(Enum):
    """Where in the model a weight belongs: the attribute of a ``StageSpec`` that says whether a stage owns it."""

    PATCH_EMBEDDING = "has_patch_embedding"
    VISION_LAYER = "vision_layers"
    PROJECTOR = "has_projector"
    EMBEDDING = "has_embedding"
    LANGUAGE_LAYER = "language_layers"
    HEAD = "has_head"
    """Final norm and output layer."""


VISION_PLACES = (Place.PATCH_EMBEDDING, Place.VISION_LAYER, Place.PROJECTOR)
"""Microbatches without images do not pass these."""


@dataclass(frozen=True)
class Cut:
    """How a tensor of ours is made of Hugging Face tensors, and how it is cut."""

    tp_dim: int | None = None
    """Dimension that tensor parallelism cuts; None = every rank holds the whole tensor."""
    num_units: int = 1
    """Pieces along ``tp_dim`` that are never cut: heads, key/value groups, ffn columns or vocabulary rows."""
    fusion: Fusion = Fusion.COPY
    pads: bool = False
    """Whether ``num_units`` is zero-padded to a multiple of the TP size (harmless in an ffn) instead of refused."""
    head_dim: int = 0
    """Width of one attention head; 0 outside qkv."""


@dataclass(frozen=True, kw_only=True)
class Weight(Cut):
    """One tensor of ours: its names, shapes, fusion and cut."""

    name: str
    """Ours, with the global layer number."""
    part: str
    """"vision", "projector" or "language"."""
    place: Place
    layer: int | None
    """Global layer number within its tower."""
    hf_names: Names
    hf_shapes: Shapes
    shape: tuple[int, ...]
    """Shape of the whole fused tensor, without padding."""
    scale: float | None = None
    """For a matrix A or B of an adapter: the factor on their product; None for the model's own weights."""

    is_tied_copy: bool = False
    """Whether it is a tied model's output layer on a stage without the embedding: a copy of the embedding."""
    is_whole: bool = False
    """Whether it belongs to an encoder that every TP rank holds whole (``ModelConfig.encodes_whole``), whatever its
    ``tp_dim``."""

    @property
    def is_adapter(self) -> bool:
        return self.scale is not None

    @property
    def is_cut(self) -> bool:
        """Whether TP ranks hold different shards; otherwise each holds the whole tensor."""
        return self.tp_dim is not None and not self.is_whole

    def shards(self, tp_size: int, tp_rank: int = 0) -> tuple[int, int]:
        """Number of different shards on ``tp_size`` TP ranks, and which of them this rank holds."""
        return (tp_size, tp_rank) if self.is_cut else (1, 0)


@cache
def model_weights(model: ModelConfig) -> tuple[Weight, ...]:
    """Every tensor of the model once, in model order, adapters after their weight; a tied model has no output layer."""
    weights = _own_weights(model)
    if model.lora.is_on:
        weights = tuple(one for weight in weights for one in (weight, *_adapters(weight, model)))
    return tuple(placed(weight, model) for weight in weights) if model.encodes_whole else weights


def placed(weight: Weight, model: ModelConfig) -> Weight:
    """``weight`` as tensor-parallel ranks hold it with the ``encoder_placement`` of ``model``."""
    return replace(weight, is_whole=model.encodes_whole and weight.part != "language")


def _own_weights(model: ModelConfig) -> tuple[Weight, ...]:
    vision, language, names = model.vision, model.language, model.family.weights
    weights = [*_patch_embedding(model)]
    for layer in range(vision.num_layers):
        weights += _TableSection("vision", Place.VISION_LAYER, layer).transformer(
            f"image_encoder.encoder.blocks.layers.{layer}", names.vision_layer, vision)
    weights += _projector(model)
    weights.append(vocabulary(language, Place.EMBEDDING, EMBEDDING_NAME, names.embedding_weight))
    for layer in range(language.num_layers):
        weights += _TableSection("language", Place.LANGUAGE_LAYER, layer).transformer(
            f"text_decoder.decoder.layers.{layer}", names.language_layer, language)
    weights += _head(model)
    return tuple(weights)


def stored_name(weight: Weight) -> str:
    """The name under which a checkpoint keeps the state of ``weight``: a tied output layer's is the embedding's."""
    return EMBEDDING_NAME if weight.is_tied_copy else weight.name


# Adapters

SINGLE_ADAPTER = "adapter"
"""Name of the adapter of a linear layer that is a single Hugging Face tensor; others are named after their tensor."""


def layer_names(hf_name: str, weight: Weight) -> tuple[str, ...]:
    """Names of the linear layer of ``hf_name`` for patterns: published, in transformers' live module, and ours."""
    published = hf_name.removesuffix(".weight")
    return published, live_name(published), weight.name.removesuffix(".weight")


def is_linear(weight: Weight) -> bool:
    """Whether this is the weight of a linear layer, which may have adapters."""
    return (not weight.is_adapter and weight.name.endswith(".weight") and len(weight.shape) > 1
            and weight.place not in (Place.EMBEDDING, Place.HEAD))


def _adapters(weight: Weight, model: ModelConfig) -> Iterator[Weight]:
    """A and B of each Hugging Face tensor of ``weight`` that the settings of adapters name, unless it is frozen.

    A or B is cut as the weight is: B where its outputs are, A where its inputs are.
    """
    lora = model.lora
    if not is_linear(weight) or weight.part not in lora.parts or is_held(weight, model):
        return
    for hf_name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
        names = layer_names(hf_name, weight)
        patterns = [one for one in lora.target_modules if one != ALL_LINEAR or len(shape) == 2]  # not a convolution
        if not any(is_target(pattern, names) for pattern in patterns):
            continue
        rank, alpha = chosen(lora.rank_pattern, names, lora.r), chosen(lora.alpha_pattern, names, lora.alpha)
        word = SINGLE_ADAPTER if len(weight.hf_names) == 1 else hf_name.split(".")[-2]
        section = _TableSection(weight.part, weight.place, weight.layer)
        fusion = weight.fusion if weight.fusion is Fusion.PER_HEAD_QKV else Fusion.COPY
        cut, whole = Cut(weight.tp_dim, weight.num_units, fusion, weight.pads, weight.head_dim), Cut()
        b_shape = (shape[0], rank, *(1 for _ in shape[2:]))
        for letter, matrix, one in (("A", (rank, *shape[1:]), cut if weight.tp_dim == 1 else whole),
                                    ("B", b_shape, cut if weight.tp_dim == 0 else whole)):
            name = f"{weight.name.removesuffix('weight')}{word}.lora_{letter}.weight"
            hf = f"{hf_name.removesuffix('weight')}lora_{letter}.weight"
            yield replace(section.weight(name, (hf,), (matrix,), one), scale=lora.scale(rank, alpha))


def is_held(weight: Weight, model: ModelConfig) -> bool:
    """Whether ``freeze``, ``freeze_layers`` or ``freeze_modules`` name a weight."""
    part = getattr(model, weight.part)
    by_place = part.freeze or (weight.layer is not None and weight.layer in layers_in(part.freeze_layers))
    return by_place or any(matches(pattern, stored_name(weight)) for pattern in model.freeze_modules)


# The table


@dataclass(frozen=True)
class _TableSection:
    """Where the next weights of the table live."""

    part: str
    place: Place
    layer: int | None = None

    def weight(self, name: str, hf_names: Names, hf_shapes: Shapes, cut: Cut = Cut()) -> Weight:
        shape = (sum(shape[0] for shape in hf_shapes), *hf_shapes[0][1:])
        return Weight(**vars(self), **vars(cut), name=name, hf_names=hf_names, hf_shapes=hf_shapes, shape=shape)

    def norm(self, name: str, hf_name: str, size: int) -> Iterator[Weight]:
        yield self.weight(f"{name}.weight", (f"{hf_name}.weight",), ((size,),))

    def linear(
        self, name: str, hf_names: Sequence[str], outputs: tuple[int, ...], inputs: int, cut: Cut, bias: bool = True
    ) -> Iterator[Weight]:
        """A linear layer: its outputs (rows of its weight) are cut, or its inputs; then its bias is replicated."""
        names = tuple(f"{hf_name}.weight" for hf_name in hf_names)
        yield self.weight(f"{name}.weight", names, tuple((size, inputs) for size in outputs), cut)
        if bias:
            names = tuple(f"{hf_name}.bias" for hf_name in hf_names)
            yield self.weight(f"{name}.bias", names, tuple((size,) for size in outputs), Cut() if cut.tp_dim else cut)

    def transformer(self, name: str, names: LayerNames, tower: Tower) -> Iterator[Weight]:
        """A whole layer: norm, attention, norm, MLP with a gate."""
        hf, hidden, ffn = f"{names.layers}.{self.layer}", tower.hidden_size, tower.ffn_hidden_size
        num_groups, has_bias = tower.num_query_groups, names.has_bias
        query, key = tower.num_attention_heads * tower.head_dim, num_groups * tower.head_dim
        if len(names.qkv) == 1:
            fusion, outputs = Fusion.PER_HEAD_QKV, (query + 2 * key,)
        else:
            fusion, outputs = Fusion.GROUPED_QKV, (query, key, key)
        qkv, gate_up = Cut(0, num_groups, fusion, head_dim=tower.head_dim), Cut(0, ffn, Fusion.GATE_UP, pads=True)
        qkv_names, gate_up_names = ([f"{hf}.{one}" for one in some] for some in (names.qkv, (names.gate, names.up)))
        yield from self.norm(f"{name}.input_layernorm", f"{hf}.{names.first_norm}", hidden)
        yield from self.linear(f"{name}.self_attention.linear_qkv", qkv_names, outputs, hidden, qkv)
        yield from self.linear(f"{name}.self_attention.linear_proj", [f"{hf}.{names.projection}"], (hidden,), query,
                               Cut(1, num_groups), has_bias)
        yield from self.norm(f"{name}.pre_mlp_layernorm", f"{hf}.{names.second_norm}", hidden)
        yield from self.linear(f"{name}.mlp.linear_fc1", gate_up_names, (ffn, ffn), hidden, gate_up, has_bias)
        yield from self.linear(f"{name}.mlp.linear_fc2", [f"{hf}.{names.down}"], (hidden,), ffn,
                               Cut(1, ffn, pads=True), has_bias)


def _patch_embedding(model: ModelConfig) -> Iterator[Weight]:
    vision = model.vision
    shape = (vision.hidden_size, vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield _TableSection("vision", Place.PATCH_EMBEDDING).weight(
        "image_encoder.encoder.patch_embed.proj.weight", (f"{model.family.weights.patch_embedding}.weight",), (shape,))


def _projector(model: ModelConfig) -> Iterator[Weight]:
    section, ours, names, projector = (
        _TableSection("projector", Place.PROJECTOR), "image_encoder.projector", model.family.weights, model.projector)
    merged, ffn = projector.input_size * model.vision.spatial_merge_size**2, projector.ffn_hidden_size
    first, second = ([one] for one in names.projector_linears)
    one, two = Cut(0, ffn, pads=True), Cut(1, ffn, pads=True)
    yield from section.norm(f"{ours}.layernorm", names.projector_norm, projector.input_size)
    yield from section.linear(f"{ours}.encoder.linear_fc1", first, (ffn,), merged, one)
    yield from section.linear(f"{ours}.encoder.linear_fc2", second, (projector.hidden_size,), ffn, two)


def _head(model: ModelConfig) -> Iterator[Weight]:
    language, names = model.language, model.family.weights
    yield from _TableSection("language", Place.HEAD).norm(
        "text_decoder.decoder.final_layernorm", names.final_norm, language.hidden_size)
    if not language.tied:
        yield vocabulary(language, Place.HEAD, OUTPUT_LAYER_NAME, names.output_layer_weight)


def vocabulary(language: LanguageConfig, place: Place, name: str, hf_name: str) -> Weight:
    shape = (language.vocab_size, language.hidden_size)
    return _TableSection("language", place).weight(name, (hf_name,), (shape,), Cut(0, language.vocab_size))


@cache
def weights_by_place(model: ModelConfig) -> Mapping[tuple[Place, int | None], tuple[Weight, ...]]:
    """``model_weights`` by place and layer, in model order."""
    return {place: tuple(weights)
            for place, weights in groupby(model_weights(model), key=lambda one: (one.place, one.layer))}


def stage_weights(model: ModelConfig, spec: StageSpec) -> tuple[Weight, ...]:
    """The weights that the slot ``spec`` owns, in model order.

    In a tied model whose embedding and head live in different slots, the head's slot also owns
    ``text_decoder.output_layer.weight``: a copy of the embedding, read from the embedding's Hugging Face tensor.
    """
    owned = [weight for place, weights in weights_by_place(model).items() if owns(spec, *place) for weight in weights]
    if spec.has_head and model.language.tied and not spec.has_embedding:
        copy = vocabulary(model.language, Place.HEAD, OUTPUT_LAYER_NAME, model.family.weights.embedding_weight)
        owned.append(replace(copy, is_tied_copy=True))
    return tuple(owned)


def owns(spec: StageSpec, place: Place, layer: int | None) -> bool:
    """Whether the slot ``spec`` holds a place of the model."""
    owned = getattr(spec, place.value)
    return owned if layer is None else layer in owned
