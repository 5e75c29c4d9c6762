"""The model JSON as frozen dataclasses, with every rule between its fields.

Keys of the file without a field are in ``mm.config.mindspeed``.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from mm.config.layers import (
    Ints,
    Layers,
    LayerSpans,
    NumLayers,
    OffloadConfig,
    RecomputeConfig,
    activation_notes,
    activation_problems,
    layers_in,
)
from mm.config.lora import LoraConfig
from mm.config.mindspeed import MODEL_KEYS
from mm.config.parse import (
    STRICT,
    Count,
    Key,
    NaturalNumber,
    NotNegative,
    OrDefault,
    Patterns,
    Positive,
    ReadSettings,
    read_settings,
)
from mm.errors import NoEffect
from mm.families.family import Family
from mm.families.qwen2_5_vl import QWEN2_5_VL
from mm.placement import Placement, layout_problems

EncoderPlacement = Literal["cut", "tensor_ranks"]


@dataclass(frozen=True, config=STRICT)
class Rates:
    """One part's optimizer settings, if they differ from those of the command line."""

    lr: Positive | None = None
    """The highest learning rate; None = --lr."""
    weight_decay: NotNegative | None = None
    """None = --weight-decay."""


@dataclass(frozen=True, config=STRICT)
class VisionConfig:
    """The ViT."""

    num_layers: NumLayers
    pipeline_num_layers: Layers
    hidden_size: Count
    ffn_hidden_size: Count
    num_attention_heads: Count
    window_attn_size: Count
    """Side of an attention window in pixels (112 in all published sizes)."""
    fullatt_block_indexes: Ints
    """Global numbers of the layers that attend over the whole image."""
    in_channels: Count = 3
    patch_size: Count = 14
    temporal_patch_size: Count = 2
    spatial_merge_size: Count = 2
    layernorm_epsilon: NotNegative = QWEN2_5_VL.vision_epsilon
    tokens_per_second: Count = 2
    freeze: bool = True
    freeze_layers: Annotated[LayerSpans, OrDefault] = ""
    """Global layers that are not trained although ``freeze`` is false."""
    rates: Annotated[Rates, Key("vision_")] = Rates()
    recompute: Annotated[RecomputeConfig, Key("recompute_")] = RecomputeConfig()
    offload: Annotated[OffloadConfig, Key("cpu_offloading_")] = OffloadConfig()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def num_query_groups(self) -> int:
        """Every head has its own keys and values."""
        return self.num_attention_heads

    @property
    def patch_elements(self) -> int:
        """Numbers in one flattened patch: channels x frames x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, config=STRICT)
class ProjectorConfig:
    """RMSNorm, merge of 2x2 patches, two linear layers."""

    input_size: Count
    ffn_hidden_size: Count
    hidden_size: Count
    layernorm_epsilon: NotNegative = QWEN2_5_VL.vision_epsilon
    freeze: bool = False
    rates: Annotated[Rates, Key("projector_")] = Rates()


@dataclass(frozen=True, config=STRICT)
class LanguageConfig:
    """The LLM."""

    num_layers: NumLayers
    pipeline_num_layers: Layers
    hidden_size: Count
    ffn_hidden_size: Count
    num_attention_heads: Count
    num_query_groups: Count
    """Key/value heads."""
    vocab_size: Count
    max_position_embeddings: Count
    mrope_section: Ints
    kv_channels: Annotated[Count, OrDefault] = Field(
        # some releases of pydantic call this even if one of the two is invalid, which is reported separately
        default_factory=lambda fields: fields.get("hidden_size", 1) // fields.get("num_attention_heads", 1))
    """Width of one head."""
    rope_theta: Annotated[Positive, Key("rope_theta", alias="rotary_base")] = 1_000_000.0
    untie_embeddings_and_output_weights: bool = True
    layernorm_epsilon: NotNegative = 1e-6
    init_method_std: NotNegative = 0.02
    freeze: bool = False
    freeze_layers: Annotated[LayerSpans, OrDefault] = ""
    """See ``VisionConfig``."""
    rates: Annotated[Rates, Key("language_")] = Rates()
    recompute: Annotated[RecomputeConfig, Key("recompute_")] = RecomputeConfig()
    offload: Annotated[OffloadConfig, Key("cpu_offloading_")] = OffloadConfig()

    @property
    def head_dim(self) -> int:
        return self.kv_channels

    @property
    def tied(self) -> bool:
        """Whether the output layer is the word embedding itself."""
        return not self.untie_embeddings_and_output_weights


Tower = VisionConfig | LanguageConfig
"""Both have the settings of a layer under the same names."""


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The whole of ``--mm-model``."""

    vision: Annotated[VisionConfig, Key("image_encoder.vision_encoder.")]
    projector: Annotated[ProjectorConfig, Key("image_encoder.vision_projector.")]
    language: Annotated[LanguageConfig, Key("text_decoder.")]
    image_token_id: Annotated[NaturalNumber, Key("img_context_token_id", "image_token_id")] = QWEN2_5_VL.tokens.image_id
    video_token_id: NaturalNumber = QWEN2_5_VL.tokens.video_id
    vision_start_token_id: NaturalNumber = QWEN2_5_VL.tokens.vision_start_id
    encoder_placement: Annotated[EncoderPlacement, OrDefault] = "cut"
    """How tensor-parallel ranks share the ViT and the projector.  "cut": as in the LLM, each has part of every matrix.
    "tensor_ranks": each has every whole matrix, and tensor- and context-parallel ranks divide the images."""
    encoder_batch_microbatches: Annotated[Count, OrDefault] = 1
    """Consecutive microbatches whose images pass the ViT together.  No effect if the ViT is divided over slots."""
    freeze_modules: Annotated[Patterns, OrDefault] = ()
    """Weights that are not trained, in addition to the frozen parts and layers."""
    trainable_modules: Annotated[Patterns, OrDefault] = ()
    """Weights that are trained regardless of what freezes them; ``mm.weights.trained`` has the whole rule."""
    lora: Annotated[LoraConfig, Key("lora_")] = LoraConfig()
    """Adapters, which are weights of the model too; off by default."""

    @property
    def family(self) -> Family:
        """The family of the model: Qwen2.5-VL, the only one yet, so ``model_id`` of the model JSON is not a field."""
        return QWEN2_5_VL

    @property
    def base(self) -> "ModelConfig":
        """The model without adapters, as in files of published and converted weights."""
        return replace(self, lora=LoraConfig())

    @property
    def unfrozen(self) -> "ModelConfig":
        """The model with no part, layer or weight frozen."""
        vision, language = (replace(tower, freeze=False, freeze_layers="") for tower in (self.vision, self.language))
        return replace(self, vision=vision, projector=replace(self.projector, freeze=False), language=language,
                       freeze_modules=())

    @property
    def on_one_stage(self) -> "ModelConfig":
        """The model with all layers on one stage: each list is summed."""
        vision, language = (replace(tower, pipeline_num_layers=((tower.num_layers,),))
                            for tower in (self.vision, self.language))
        return replace(self, vision=vision, language=language)

    @property
    def visual_token_ids(self) -> tuple[int, int]:
        """The tokens of images and of videos, whose embeddings the projector's output replaces."""
        return self.image_token_id, self.video_token_id

    @property
    def num_stages(self) -> int:
        """Pipeline stages: the length of the pipeline lists."""
        return len(self.language.pipeline_num_layers[0])

    @property
    def num_chunks(self) -> int:
        """Virtual chunks per stage; 1 without virtual pipeline stages."""
        return len(self.language.pipeline_num_layers)

    @property
    def encodes_whole(self) -> bool:
        """Whether every tensor-parallel rank holds the whole ViT and projector, and encodes images of its own."""
        return self.encoder_placement == "tensor_ranks"

    @property
    def encoder_batch_size(self) -> int:
        """``encoder_batch_microbatches`` if one slot has the whole ViT, else 1: the others get one at a time."""
        return self.encoder_batch_microbatches if self.placement().has_whole_vit else 1

    @property
    def offloads_activations(self) -> bool:
        """Whether any layer keeps its activations in host memory."""
        return self.vision.offload.is_on or self.language.offload.is_on

    @property
    def counts_to_divide(self) -> dict[str, int]:
        """What the tensor-parallel size must divide: numbers of heads and vocabulary rows, by key of the model JSON."""
        language = {f"text_decoder.{name}": getattr(self.language, name)
                    for name in ("num_attention_heads", "num_query_groups", "vocab_size")}
        vision = {"image_encoder.vision_encoder.num_attention_heads": self.vision.num_attention_heads}
        return language if self.encodes_whole else language | vision

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """Every legal tensor-parallel size."""
        common = math.gcd(*self.counts_to_divide.values())
        small = [size for size in range(1, math.isqrt(common) + 1) if common % size == 0]
        return tuple(sorted({*small, *(common // size for size in small)}))

    def placement(self) -> Placement:
        """Which stage holds what.  The pipeline lists must be legal, as they are after ``read_model``."""
        return Placement.of(self.vision.pipeline_num_layers, self.language.pipeline_num_layers)


def read_model(path: str | Path) -> ReadSettings[ModelConfig]:
    """Read ``--mm-model``; raises UserError with every problem in the file."""
    read = read_settings(path, ModelConfig, MODEL_KEYS, model_problems)
    model, notes = with_image_token(read.value, path)
    for key, tower in _towers(model):
        notes += (*activation_notes(tower.recompute, tower.offload, f"{key}.{{}}".format, path),)
    return replace(read, value=model, notes=(*read.notes, *notes))


def with_image_token(model: ModelConfig, path: str | Path) -> tuple[ModelConfig, tuple[str, ...]]:
    """``model``, read from ``path``, with an image token that differs from the video token; and the notes on that.

    MindSpeed-MM's files for video state the video token as ``img_context_token_id``, because only one kind is replaced
    there.
    """
    if model.image_token_id != model.video_token_id:
        return model, ()
    note = (f"{path}: img_context_token_id is {model.video_token_id}, which is the video token; videos use "
            f"video_token_id, and images use {model.family.tokens.image_id}")
    return replace(model, image_token_id=model.family.tokens.image_id), (note,)


def placement_notes(model: ModelConfig, tp_size: int, path: str | Path) -> Iterator[str]:
    """Notes on ``encoder_placement`` and ``encoder_batch_microbatches`` where they have no effect."""
    if model.encodes_whole and tp_size == 1:
        yield NoEffect(["encoder_placement"], "there is one tensor-parallel rank", path)
    if model.encoder_batch_microbatches != model.encoder_batch_size:
        key = "image_encoder.vision_encoder.pipeline_num_layers"
        yield NoEffect(["encoder_batch_microbatches"], f"{key} divides the ViT over several positions; put all of its "
                                                       f"layers on one", path)


def _towers(model: ModelConfig) -> tuple[tuple[str, Tower], ...]:
    """The towers, with their keys in the model JSON."""
    return ("image_encoder.vision_encoder", model.vision), ("text_decoder", model.language)


def model_problems(model: ModelConfig) -> Iterator[str]:
    """Rules between the fields of one model JSON."""
    family = model.family
    for key, tower in _towers(model):
        yield from activation_problems(tower.recompute, tower.offload, f"{key}.{{}}".format)
        if outside := sorted(layer for layer in layers_in(tower.freeze_layers) if layer >= tower.num_layers):
            yield (f"{key}.freeze_layers is {tower.freeze_layers!r}, which contains layer {outside[0]}; expected 0 "
                   f"to {tower.num_layers - 1}")
    yield from _vision_problems(model.vision)
    for name, part in (("encoder", model.vision), ("projector", model.projector)):
        if not math.isclose(part.layernorm_epsilon, family.vision_epsilon):
            yield (f"image_encoder.vision_{name}.layernorm_epsilon is {part.layernorm_epsilon:g}; expected "
                   f"{family.vision_epsilon:g}, which transformers uses for every {family.title} ViT regardless of "
                   f"config.json")
    projector_sizes = (
        ("input_size", "the ViT's hidden_size", model.vision.hidden_size),
        ("ffn_hidden_size", "input_size x spatial_merge_size^2",
         model.projector.input_size * model.vision.spatial_merge_size**2),
        ("hidden_size", "text_decoder.hidden_size", model.language.hidden_size),
    )
    for name, rule, size in projector_sizes:
        if (found := getattr(model.projector, name)) != size:
            yield f"image_encoder.vision_projector.{name} is {found}; expected {rule} = {size}"
    yield from _language_problems(model.language)
    yield from layout_problems(model.vision.pipeline_num_layers, model.language.pipeline_num_layers,
                               model.vision.num_layers, model.language.num_layers)
    if model.image_token_id == model.video_token_id != family.tokens.video_id:
        yield (f"img_context_token_id and video_token_id are both {model.image_token_id}; expected the image and video "
               f"tokens, which are {family.tokens.image_id} and {family.tokens.video_id} in every {family.title}")
    if max(*model.visual_token_ids, model.vision_start_token_id) >= model.language.vocab_size:
        yield (f"img_context_token_id is {model.image_token_id}, video_token_id is {model.video_token_id} and "
               f"vision_start_token_id is {model.vision_start_token_id}; expected all below vocab_size = "
               f"{model.language.vocab_size}")


def _vision_problems(vision: VisionConfig) -> Iterator[str]:
    key = "image_encoder.vision_encoder"
    head_unit, window_unit = 4 * vision.num_attention_heads, vision.patch_size * vision.spatial_merge_size
    layers = vision.fullatt_block_indexes
    outside = [layer for layer in layers if not 0 <= layer < vision.num_layers]
    if vision.hidden_size % head_unit:
        yield (f"{key}.hidden_size is {vision.hidden_size}; expected a multiple of 4 x num_attention_heads = "
               f"{head_unit} (rotary embedding halves a head twice)")
    if outside:
        yield f"{key}.fullatt_block_indexes has {outside}; expected layers 0 to {vision.num_layers - 1}"
    if len(set(layers)) < len(layers):
        yield f"{key}.fullatt_block_indexes is {list(layers)}, which contains a layer twice"
    if vision.window_attn_size % window_unit:
        yield (f"{key}.window_attn_size is {vision.window_attn_size} pixels; expected a multiple of patch_size x "
               f"spatial_merge_size = {window_unit}")


def _language_problems(language: LanguageConfig) -> Iterator[str]:
    heads, width, section = language.num_attention_heads, language.kv_channels, language.mrope_section
    if len(section) != 3 or min(section) < 0:
        yield (f"text_decoder.mrope_section is {list(section)}; expected three numbers of at least 0 (time, height, "
               f"width) whose sum is half of a head's width")
    elif not language.hidden_size == heads * width == heads * 2 * sum(section):
        yield (f"text_decoder.hidden_size is {language.hidden_size}, num_attention_heads {heads}, kv_channels {width} "
               f"(by default their quotient) and mrope_section {list(section)}; expected hidden_size = "
               f"num_attention_heads x kv_channels, and kv_channels = twice the sum of mrope_section, such as "
               f"{heads * 2 * sum(section)} = {heads} x {2 * sum(section)}")
    if heads % language.num_query_groups:
        yield (f"text_decoder.num_query_groups is {language.num_query_groups}; expected a divisor of "
               f"num_attention_heads = {heads}")
