"""Which file in MindSpeed-MM's layout holds which weights, and in which form.  Pure: opens no file.

``<dir>/latest_checkpointed_iteration.txt`` contains ``release``, and ``<dir>/release/mp_rank_TT[_PPP]/`` holds one
rank's weights: ``model.safetensors`` (``model0.safetensors``, ``model1.safetensors``... with virtual chunks), or
``model_optim_rng.pt`` with the keys ``model`` (``model0``, ``model1``...).  Tensor names are MindSpeed-MM's, which
count layers from 0 in every slot.

MindSpeed-MM's canonical structure (``enable_canonical_hf_struct``) keeps q, k, v and gate, up separate, and the ViT's
qkv in Hugging Face's order; the rest equals the fused structure, which the trainer uses.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch

from mm.checkpoint.safetensors import safetensors_file
from mm.checkpoint.torch_file import TorchFile
from mm.config.model import EncoderPlacement, ModelConfig
from mm.errors import refuse
from mm.placement import PipelineLayout, StageSpec, layout_problems
from mm.weights.fuse import local_shape
from mm.weights.table import SINGLE_ADAPTER, Fusion, Weight, stage_weights
from mm.weights.views import TargetFile, View, shard_view


@dataclass(frozen=True)
class Layout:
    """Placement of a checkpoint's layers: ``[chunk][stage]`` lists, and how tensor-parallel ranks divide them."""

    vision: PipelineLayout
    language: PipelineLayout
    tp_size: int
    encoder: EncoderPlacement = "cut"

    @classmethod
    def of(cls, model: ModelConfig, tp_size: int) -> "Layout":
        return cls(model.vision.pipeline_num_layers, model.language.pipeline_num_layers, tp_size,
                   model.encoder_placement)

    def place(self, model: ModelConfig) -> ModelConfig:
        return replace(model, vision=replace(model.vision, pipeline_num_layers=self.vision),
                       language=replace(model.language, pipeline_num_layers=self.language),
                       encoder_placement=self.encoder)

    def __str__(self) -> str:
        vision, language = ([list(chunk) for chunk in layout] for layout in (self.vision, self.language))
        whole = f", encoder_placement {self.encoder}" if self.encoder != "cut" else ""
        return f"vit_pp_layers {vision}, llm_pp_layers {language}, tp_size {self.tp_size}{whole}"


def check_layout(layout: Layout, model: ModelConfig, flag: str) -> None:
    """Raise UserError if ``model`` cannot be placed or cut on ``layout``, which ``flag`` gave."""
    problems = layout_problems(layout.vision, layout.language, model.vision.num_layers, model.language.num_layers,
                               f"{flag}.vit_pp_layers", f"{flag}.llm_pp_layers")
    placed = replace(model, encoder_placement=layout.encoder)
    if layout.tp_size not in placed.tp_sizes:
        vision = "" if placed.encodes_whole else f", {model.vision.num_attention_heads} ViT heads"
        problems.append(f"{flag}.tp_size is {layout.tp_size}; it must divide the model's "
                        f"{model.language.num_query_groups} key/value heads, {model.language.num_attention_heads} "
                        f"attention heads{vision} and {model.language.vocab_size} vocabulary rows; legal sizes are "
                        f"{', '.join(map(str, placed.tp_sizes))}.")
    refuse(problems)


RELEASE = "release"
TORCH_FILE = "model_optim_rng.pt"
_RANK_NAME = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?")
_SEPARATE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


class Format(Enum):
    """File format: ``--cfg.save_format``."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


class Structure(Enum):
    """Whether q, k, v and gate, up are stored fused or separate (canonical)."""

    FUSED = "fused"
    CANONICAL = "canonical"


@dataclass(frozen=True)
class Storage:
    """How a directory stores the weights, besides the layout."""

    format: Format = Format.SAFETENSORS
    structure: Structure = Structure.FUSED
    vit_only: bool = False
    """Whether the LLM is omitted (``--cfg.save_vit_only``)."""
    whole_vision_qkv: bool = False
    """Whether the ViT's qkv is [Q; K; V] and cut as a whole, a mistake of MindSpeed-MM's converters 2.2.0 and 2.3.0."""
    adapters_only: bool = False
    """Whether it holds adapters, in the canonical structure, without their base model."""

    def __str__(self) -> str:
        return (f"{self.format.value} files, {self.structure.value} structure" + ", no LLM" * self.vit_only
                + ", the ViT's qkv as a whole" * self.whole_vision_qkv + ", adapters only" * self.adapters_only)


@dataclass(frozen=True)
class RankFile:
    """One slot's weights of one tensor-parallel rank."""

    file: str
    """Relative to the directory of the ranks.  The chunks of a stage share a torch file."""
    chunk_key: str
    """``model``, or ``model0``, ``model1``... with virtual chunks."""
    tp_rank: int
    weights: Mapping[str, Weight]
    """By name, as in ``mm.weights.views.Stored``."""


def stage_local_name(weight: Weight, spec: StageSpec) -> str:
    """MindSpeed-MM's own name of a weight in the slot ``spec``: its layers count from 0 in every slot."""
    if weight.layer is None:
        return weight.name
    first = getattr(spec, weight.place.value).start
    return weight.name.replace(f".layers.{weight.layer}.", f".layers.{weight.layer - first}.")


def rank_files(model: ModelConfig, tp_size: int, storage: Storage) -> Iterator[RankFile]:
    """The files of ``model`` on its layout, ordered by stage, rank and chunk."""
    placement = model.placement()
    for stage in range(placement.num_stages):
        for tp_rank in range(tp_size):
            for chunk in range(placement.num_chunks):
                spec, key = placement[stage, chunk], f"model{chunk if placement.num_chunks > 1 else ''}"
                prefix = f"{key}/" if storage.format is Format.TORCH else ""
                owned = {prefix + mindspeed_name(stage_local_name(stored, spec)): stored
                         for weight in stage_weights(model, spec)
                         if not (storage.vit_only and weight.part == "language")
                         and weight.is_adapter == storage.adapters_only for stored in _kept(weight, storage)}
                rank = f"mp_rank_{tp_rank:02d}" + (f"_{stage:03d}" if placement.num_stages > 1 else "")
                file = TORCH_FILE if storage.format is Format.TORCH else f"{key}.safetensors"
                yield RankFile(f"{rank}/{file}", key, tp_rank, owned)


def mindspeed_name(name: str) -> str:
    """MindSpeed-MM's name of a tensor.  Adapters have PEFT's names, with the layers of the canonical structure."""
    if ".lora_" not in name:
        return name
    linear, word, matrix, kind = name.rsplit(".", 3)
    layer = linear if word == SINGLE_ADAPTER else f"{linear.rpartition('.')[0]}.{word}"
    return f"{layer}.{matrix}.default.{kind}"


def _kept(weight: Weight, storage: Storage) -> tuple[Weight, ...]:
    """``stored_weights``, but the ViT's qkv is cut like one matrix if stored as a whole."""
    if storage.whole_vision_qkv and weight.fusion is Fusion.PER_HEAD_QKV:
        return (replace(weight, fusion=Fusion.COPY, num_units=3 * weight.num_units),)
    return stored_weights(weight, storage.structure)


def mindspeed_targets(
    model: ModelConfig, tp_size: int, storage: Storage, dtypes: Mapping[str, torch.dtype]
) -> tuple[list[View], list[TargetFile]]:
    """Views and files of ``model`` on its layout; ``dtypes`` are the source's, by published name."""
    by_file: dict[str, list[RankFile]] = {}
    for rank_file in rank_files(model, tp_size, storage):
        by_file.setdefault(f"{RELEASE}/{rank_file.file}", []).append(rank_file)
    views, files = [], []
    for name, members in by_file.items():
        owned = {key: (weight, member.tp_rank) for member in members for key, weight in member.weights.items()}
        described = {key: (dtypes[weight.hf_names[0]], local_shape(weight, tp_size))
                     for key, (weight, _) in owned.items()}
        if storage.format is Format.TORCH:
            file = TorchFile.new(name, {
                one.chunk_key: {key.removeprefix(f"{one.chunk_key}/"): described[key] for key in one.weights}
                for one in members})
        else:
            file = safetensors_file(name, [(key, *spec) for key, spec in described.items()])
        files.append(file)
        views += [shard_view(stored, owned[stored.name][0], tp_size, owned[stored.name][1]) for stored in file.tensors]
    return views, files


def rank_of(directory_name: str) -> tuple[int, int] | None:
    """(tensor-parallel rank, stage) of a rank's directory; None for other names, for example with an expert rank."""
    match = _RANK_NAME.fullmatch(directory_name)
    return match and (int(match[1]), int(match[2] or 0))


def stored_weights(weight: Weight, structure: Structure) -> tuple[Weight, ...]:
    """The tensors that store ``weight``, each a ``Weight``, in the order of its Hugging Face tensors.

    In the canonical structure, the ViT's qkv is cut within each of its three parts: a shard is [Q; K; V] of its heads.
    """
    if structure is Structure.FUSED or weight.fusion is Fusion.COPY:
        return (weight,)
    if weight.fusion is Fusion.PER_HEAD_QKV:
        return (replace(weight, fusion=Fusion.STACKED_QKV),)
    place, _, kind = weight.name.rsplit(".", 2)
    separate = []
    for hf_name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
        name = f"{place}.{hf_name.split('.')[-2]}.{kind}"
        separate.append(replace(weight, name=name, hf_names=(hf_name,), hf_shapes=(shape,), fusion=Fusion.COPY,
                             shape=shape, head_dim=0))
    return tuple(separate)


# Inferring the layout from tensor names

_LAYER = re.compile(r"(?:model\d*/)?(image_encoder\.encoder\.blocks|text_decoder\.decoder)\.layers\.(\d+)\.")


def num_layers(names: Iterable[str]) -> tuple[int, int]:
    """(ViT layers, LLM layers) of a slot with these tensor names."""
    counts = {"image_encoder.encoder.blocks": 0, "text_decoder.decoder": 0}
    for name in names:
        if match := _LAYER.match(name):
            counts[match[1]] = max(counts[match[1]], int(match[2]) + 1)
    return counts["image_encoder.encoder.blocks"], counts["text_decoder.decoder"]


_VISION_QKV = re.compile(r"(?:model\d*/)?image_encoder\..*\.linear_qkv\.weight")


def encoder_of(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> EncoderPlacement:
    """The placement of the encoder, from names and shapes of tensors on several tensor-parallel ranks.

    The uncut weight of q, k and v has three times as many rows as columns.
    """
    found = [shape for name, shape in shapes if _VISION_QKV.fullmatch(name) and len(shape) == 2]
    return "tensor_ranks" if found and all(rows == 3 * columns for rows, columns in found) else "cut"


def is_canonical_name(name: str) -> bool:
    """Whether only the canonical structure has a tensor of this name."""
    return name.rpartition(".")[0].rpartition(".")[2] in _SEPARATE
