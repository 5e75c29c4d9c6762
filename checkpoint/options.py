"""The ``--cfg`` fields of all commands: MindSpeed-MM's, and this project's additions.

Stated facts about the model must be true.  MindSpeed-MM's fields for other models are accepted only with values that
have no effect.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mm.config.flags import VitQkvOrder
from mm.config.model import EncoderPlacement
from mm.conversion.convert import HF_DIR, Options
from mm.errors import UserError, collected, naming, refuse
from mm.formats.adapter import PREFIX
from mm.formats.hf import HFDirectory, are_module_names
from mm.formats.layout import Layout
from mm.formats.mindspeed_layout import Structure
from mm.placement import PipelineLayout

LayerLists = int | list[int] | list[list[int]] | str
"""Layers per stage: 28, [12,16], 12,16, or one list for every virtual chunk, [[6,8],[6,8]]."""

_ABSENT = {
    "num_experts": (0, "experts"), "ep_size": (1, "experts"),
    "audio_num_layers": (0, "audio encoder"), "audio_pp_layers": (0, "audio encoder"),
}  # fmt: skip
"""Fields for other models: the only accepted value, and the component that this model lacks."""
_COMMON = "--cfg.common_model_config"


@dataclass
class HFConfig:
    """A Hugging Face model directory."""

    hf_dir: str
    """Holds config.json and *.safetensors."""


@dataclass
class ParallelConfig:
    """Placement of the layers."""

    llm_pp_layers: LayerLists
    """LLM layers per pipeline stage: [12,16] or 12,16; with virtual chunks one list for each, [[6,8],[6,8]]."""
    vit_pp_layers: LayerLists
    """ViT layers per pipeline stage, in the same form."""
    tp_size: int = 1
    """Tensor-parallel size."""
    vit_tp_size: int = 0
    """Tensor-parallel size of the ViT; only 0 or tp_size, also with encoder_placement tensor_ranks."""
    encoder_placement: EncoderPlacement = "cut"
    """As in the model JSON.  "tensor_ranks": the files of every tensor-parallel rank hold the whole ViT and projector.
    """
    ep_size: int = 1
    """Expert-parallel size; only 1, because the model has no experts."""
    audio_pp_layers: LayerLists | None = None
    """Layers of an audio encoder per stage; only zeros, because the model has none."""
    audio_tp_size: int = 0
    """Ignored, because the model has no audio encoder."""

    def layout(self, flag: str) -> Layout:
        """The layout; ``flag`` is the name used in messages.

        Raises UserError naming every field that is not a list of layers, or is invalid for this model.
        """
        problems, lists = _absent_problems(self, flag), []
        for name in ("vit_pp_layers", "llm_pp_layers"):
            with collected(problems):
                lists.append(read_lists(getattr(self, name), f"{flag}.{name}"))
        if self.vit_tp_size not in (0, self.tp_size):
            problems.append(
                f"{flag}.vit_tp_size is {self.vit_tp_size}; expected 0 or tp_size = {self.tp_size}, because both "
                f"towers are cut the same way; for a ViT that is not cut, give {flag}.encoder_placement tensor_ranks."
            )
        refuse(problems)
        return Layout(lists[0], lists[1], self.tp_size, self.encoder_placement)


@dataclass
class CommonModelConfig:
    """The model, and how its weights are stored.  Facts about the model must match config.json."""

    enable_canonical_hf_struct: bool | None = None
    """Whether MindSpeed-MM's layout stores q, k, v and gate, up as separate tensors (true) or fused (false).  Default:
    fused; for resplit, as in the source."""
    new_transformers_weight_key: bool | None = None
    """Whether the tensors of hf_dir are named model.language_model.* and model.visual.*.  It is read from the files; a
    wrong value is refused."""
    vit_qkv_order: VitQkvOrder | None = None
    """How a source without a manifest stores the ViT's qkv.  "whole" is [Q; K; V], as MindSpeed-MM 2.2.0 and 2.3.0
    wrote it."""
    model_prefix: str | None = None
    """Prefix of the names of adapters.  It is recognized without this field; only PEFT's base_model.model. is legal."""
    num_experts: int | None = None
    """Only 0, because the model has no experts."""
    num_key_value_heads: int | None = None
    """Read from config.json; a wrong value is refused."""
    tie_word_embeddings: bool | None = None
    """Read from config.json; a wrong value is refused."""
    llm_hf_dir: str | None = None
    """The same as llm_hf_config.hf_dir."""
    llm_num_layers: int | None = None
    """Read from config.json; a wrong value is refused."""
    vit_num_layers: int | None = None
    """Read from config.json; a wrong value is refused."""
    audio_num_layers: int | None = None
    """Only 0, because the model has no audio encoder."""

    @property
    def structure(self) -> Structure | None:
        """The requested structure; None: the default."""
        if self.enable_canonical_hf_struct is None:
            return None
        return Structure.CANONICAL if self.enable_canonical_hf_struct else Structure.FUSED

    def check(self, hf_dir: str | None, of_adapters: bool = False) -> None:
        """Check that the stated facts are true for the model in ``hf_dir``.

        Raises UserError naming each false fact, and each field for another kind of model.
        """
        problems = _absent_problems(self, _COMMON)
        if self.model_prefix and not (of_adapters and self.model_prefix == PREFIX):
            problems.append(
                f"{_COMMON}.model_prefix is {self.model_prefix!r}; only the names of adapters carry a prefix, which is "
                f"{PREFIX!r}: leave the flag out."
            )
        if of_adapters and self.enable_canonical_hf_struct is False:
            problems.append(f"{_COMMON}.enable_canonical_hf_struct is false, but adapters always have separate q, k, v "
                            f"and gate, up; leave the flag out.")
        for name, fact in _facts(hf_dir).items() if hf_dir is not None else ():
            stated = getattr(self, name)
            if stated not in (None, fact):
                problems.append(f"{_COMMON}.{name} is {stated}, but {hf_dir} has {fact}; leave the flag out, or give "
                                f"the right directory.")
        refuse(problems)


def _facts(hf_dir: str) -> dict[str, object]:
    """The true values of the fields of ``CommonModelConfig`` that describe the model."""
    with naming(HF_DIR):
        directory = HFDirectory.open(hf_dir, weights_required=False)
        model = directory.model_config()
    names = (stored.name for stored in directory.tensors.values())
    return {"num_key_value_heads": model.language.num_query_groups, "tie_word_embeddings": model.language.tied,
            "llm_num_layers": model.language.num_layers, "vit_num_layers": model.vision.num_layers,
            "new_transformers_weight_key": are_module_names(names)}


@dataclass(kw_only=True)
class RunConfig(Options):
    """Fields of every conversion except merge_lora."""

    common_model_config: CommonModelConfig = field(default_factory=CommonModelConfig)
    trust_remote_code: bool = False
    """Ignored: code in a model directory is never run."""


@dataclass(kw_only=True)
class ToMMConfig(RunConfig):
    """Fields of every conversion to MindSpeed-MM's layout."""

    mm_dir: str
    """Directory to write."""
    parallel_config: ParallelConfig
    """Layout to write."""
    save_format: Literal["safetensors", "torch"] = "safetensors"
    """Files to write: model.safetensors, or MindSpeed-MM's model_optim_rng.pt."""


@dataclass(kw_only=True)
class HFToMMConfig(ToMMConfig):
    """hf_to_mm."""

    hf_config: HFConfig
    """Directory to convert."""
    llm_hf_config: HFConfig | None = None
    """Directory from which the LLM is taken; ViT and projector come from hf_config."""
    save_vit_only: bool = False
    """Write ViT and projector only."""

    def language_dir(self) -> str | None:
        """The directory of the LLM, if given.

        Raises UserError if two different ones are given.
        """
        directory, same = self.llm_hf_config and self.llm_hf_config.hf_dir, self.common_model_config.llm_hf_dir
        if directory and same and Path(directory).resolve() != Path(same).resolve():
            raise UserError(
                f"--cfg.llm_hf_config.hf_dir is {directory}, but {_COMMON}.llm_hf_dir is {same}; give one of them."
            )
        return directory or same


@dataclass(kw_only=True)
class MMToHFConfig(RunConfig):
    """mm_to_hf."""

    mm_dir: str
    """Directory to convert: in MindSpeed-MM's layout, or a training checkpoint."""
    save_hf_dir: str
    """Directory to write."""
    hf_config: HFConfig
    """Template: save_hf_dir gets the same shards, and copies of the files besides the weights."""
    parallel_config: ParallelConfig | None = None
    """Layout of mm_dir.  It is recognized without this field; another one is refused."""


@dataclass(kw_only=True)
class ResplitConfig(RunConfig):
    """resplit."""

    source_dir: str
    """Directory to convert: in MindSpeed-MM's layout, or a training checkpoint."""
    target_dir: str
    """Directory to write."""
    target_parallel_config: ParallelConfig
    """Layout to write."""
    source_parallel_config: ParallelConfig | None = None
    """Layout of source_dir.  It is recognized without this field; another one is refused."""
    hf_config: HFConfig | None = None
    """Describes the model; required if source_dir has no manifest and is not one of the published sizes."""
    save_format: Literal["safetensors", "torch"] | None = None
    """Files to write.  Default: the format of source_dir."""


@dataclass(kw_only=True)
class LoraHFToMMConfig(ToMMConfig):
    """lora_hf_to_mm."""

    hf_config: HFConfig
    """PEFT directory to convert, with adapter_config.json and adapter_model.safetensors."""
    base_dir: str | None = None
    """Hugging Face directory of the base model.  Default: base_model_name_or_path in adapter_config.json."""


@dataclass(kw_only=True)
class LoraMMToHFConfig(RunConfig):
    """lora_mm_to_hf."""

    mm_dir: str
    """Adapters to convert: in MindSpeed-MM's layout, or a training checkpoint of adapters."""
    save_hf_dir: str
    """PEFT directory to write."""
    hf_config: HFConfig | None = None
    """The base model, which adapter_config.json will name; required if mm_dir has no manifest."""
    parallel_config: ParallelConfig | None = None
    """Layout of mm_dir; required if it has no manifest."""
    lora_alpha: float | None = None
    """--lora-alpha of the training; required if mm_dir has no manifest, because its files do not contain it."""


@dataclass(kw_only=True)
class MergeLoraConfig(Options):
    """merge_lora."""

    lora_dir: str
    """Adapters: a PEFT directory, a training checkpoint, or MindSpeed-MM's layout with a manifest."""
    hf_config: HFConfig
    """Their base model, which is also the template for save_hf_dir."""
    save_hf_dir: str
    """Directory to write: a whole model."""


@dataclass(kw_only=True)
class VerifyConfig:
    """verify."""

    mm_dir: str
    """Directory to check: in MindSpeed-MM's layout, or a training checkpoint."""
    hf_config: HFConfig | None = None
    """Hugging Face directory to compare with as well."""
    parallel_config: ParallelConfig | None = None
    """Layout of mm_dir.  It is recognized without this field; another one is refused."""
    num_workers: int = 0
    """Threads; 0 = one per core."""


@dataclass(kw_only=True)
class DiffConfig:
    """diff."""

    source_dir: str
    """Directory that is assumed to be right: a Hugging Face directory, one in MindSpeed-MM's layout, or a training
    checkpoint."""
    target_dir: str
    """Directory that is compared with source_dir; it may be of another kind, and on another layout."""
    hf_config: HFConfig | None = None
    """Describes the model; required if neither directory does and it is not one of the published sizes."""
    num_workers: int = 0
    """Threads; 0 = one per core."""


@dataclass(kw_only=True)
class ShowConfig:
    """show."""

    dir: str
    """Directory to show: a Hugging Face directory, one in MindSpeed-MM's layout, or a training checkpoint."""


def read_lists(given: LayerLists, key: str) -> PipelineLayout:
    """Layers per ``[chunk][stage]``; ``key`` is the name used in messages.

    Raises UserError if they do not have one of these forms.
    """
    try:
        # jsonargparse has already parsed lists; remaining text is 12,16 or a mistake.
        counts: Any = [int(one) for one in given.split(",")] if isinstance(given, str) else given
        counts = [counts] if isinstance(counts, int) else counts
        chunks = counts if all(isinstance(one, list) for one in counts) else [counts]
        if counts and all(type(count) is int for chunk in chunks for count in chunk):
            return tuple(tuple(chunk) for chunk in chunks)
    except ValueError:
        pass
    raise UserError(
        f"{key} is {given!r}; expected layers per pipeline stage such as [12,16], 12,16 or, with one list for every "
        f"virtual chunk, [[6,8],[6,8]]. The usual cause is a missing bracket, or a space at which the shell split it."
    )


def _absent_problems(given: ParallelConfig | CommonModelConfig, flag: str) -> list[str]:
    """Problems with fields of ``given`` (the section ``flag``) for components that this model lacks."""
    problems = []
    for name, (expected, what) in _ABSENT.items():
        value = getattr(given, name, None)
        if value is not None and any(n != expected for chunk in read_lists(value, f"{flag}.{name}") for n in chunk):
            problems.append(f"{flag}.{name} is {value}; expected {expected}: the model has no {what}.")
    return problems
