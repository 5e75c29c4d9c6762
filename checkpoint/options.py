"""Every ``--cfg`` field of every command: those of MindSpeed-MM, and ours.

What is stated of the model must be true of it.  Fields of MindSpeed-MM that concern other models are accepted at the
values that change nothing.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mm.config.flags import VitQkvOrder
from mm.conversion.convert import HF_DIR, Options
from mm.errors import UserError, collected, naming, refuse
from mm.formats.adapter import PREFIX
from mm.formats.hf import HFDirectory, are_module_names
from mm.formats.layout import Layout
from mm.formats.storage import Structure
from mm.placement import PipelineLayout

Layers = int | list[int] | list[list[int]] | str
"""Layers per stage: 28, [12,16], 12,16, or one list for every virtual chunk, [[6,8],[6,8]]."""

_ABSENT = {
    "num_experts": (0, "experts"), "ep_size": (1, "experts"),
    "audio_num_layers": (0, "audio encoder"), "audio_pp_layers": (0, "audio encoder"),
}  # fmt: skip
"""Fields of other models: the only value that is accepted, and what this model has none of."""
_COMMON = "--cfg.common_model_config"


@dataclass
class HFConfig:
    """A Hugging Face model directory."""

    hf_dir: str
    """Holds config.json and *.safetensors."""


@dataclass
class ParallelConfig:
    """Where the layers live."""

    llm_pp_layers: Layers
    """LLM layers per stage: [12,16], 12,16, or one list for every virtual chunk, [[6,8],[6,8]]."""
    vit_pp_layers: Layers
    """ViT layers per stage, likewise."""
    tp_size: int = 1
    """Tensor parallel size."""
    vit_tp_size: int = 0
    """0 or tp_size: both towers are cut the same way."""
    ep_size: int = 1
    """1: the model has no experts."""
    audio_pp_layers: Layers | None = None
    """Without effect; zeros only: the model has no audio encoder."""
    audio_tp_size: int = 0
    """Without effect: the model has no audio encoder."""

    def layout(self, flag: str) -> Layout:
        """The layout; ``flag`` is what messages call this.

        Raises UserError naming every field that is no list of layers, or not possible for this model.
        """
        problems, lists = _absent_problems(self, flag), []
        for name in ("vit_pp_layers", "llm_pp_layers"):
            with collected(problems):
                lists.append(read_lists(getattr(self, name), f"{flag}.{name}"))
        if self.vit_tp_size not in (0, self.tp_size):
            problems.append(
                f"{flag}.vit_tp_size is {self.vit_tp_size}; expected 0 or tp_size = {self.tp_size}, because both "
                f"towers are cut the same way."
            )
        refuse(problems)
        return Layout(lists[0], lists[1], self.tp_size)


@dataclass
class CommonModelConfig:
    """The model, and how its weights are kept.  What is stated of the model must agree with config.json."""

    enable_canonical_hf_struct: bool | None = None
    """true: q, k, v and gate, up apart in the target; false: fused.  Default: fused, or for resplit as the source."""
    new_transformers_weight_key: bool | None = None
    """true: names are model.language_model.* and model.visual.*.  Default: as the files have them."""
    vit_qkv_order: VitQkvOrder | None = None
    """How a source without manifest keeps the ViT's qkv; whole: [Q; K; V], of MindSpeed-MM 2.2.0 and 2.3.0."""
    model_prefix: str | None = None
    """How names of adapters begin; PEFT's base_model.model. is the only one, and found without it."""
    num_experts: int | None = None
    num_key_value_heads: int | None = None
    tie_word_embeddings: bool | None = None
    llm_hf_dir: str | None = None
    """The same as llm_hf_config.hf_dir."""
    llm_num_layers: int | None = None
    vit_num_layers: int | None = None
    audio_num_layers: int | None = None

    @property
    def structure(self) -> Structure | None:
        """The structure that is asked for; None: the default."""
        if self.enable_canonical_hf_struct is None:
            return None
        return Structure.CANONICAL if self.enable_canonical_hf_struct else Structure.FUSED

    def check(self, hf_dir: str | None, of_adapters: bool = False) -> None:
        """Make sure that what is stated is true of the model in ``hf_dir``.

        Raises UserError naming each statement that is not, and each that concerns another kind of model.
        """
        problems = _absent_problems(self, _COMMON)
        if self.model_prefix and not (of_adapters and self.model_prefix == PREFIX):
            problems.append(
                f"{_COMMON}.model_prefix is {self.model_prefix!r}; only the names of adapters carry a prefix, which is "
                f"{PREFIX!r}: leave the flag out."
            )
        if of_adapters and self.enable_canonical_hf_struct is False:
            problems.append(f"{_COMMON}.enable_canonical_hf_struct is false, but adapters stand beside q, k, v and "
                            f"gate, up apart; leave the flag out.")
        for name, fact in _facts(hf_dir).items() if hf_dir is not None else ():
            stated = getattr(self, name)
            if stated not in (None, fact):
                problems.append(f"{_COMMON}.{name} is {stated}, but {hf_dir} has {fact}; leave the flag out, or give "
                                f"the right directory.")
        refuse(problems)


def _facts(hf_dir: str) -> dict[str, object]:
    """What is true of the fields of ``CommonModelConfig`` that describe the model."""
    with naming(HF_DIR):
        directory = HFDirectory.open(hf_dir, weights_required=False)
        model = directory.model_config()
    names = (stored.name for stored in directory.tensors.values())
    return {"num_key_value_heads": model.language.num_query_groups, "tie_word_embeddings": model.language.tied,
            "llm_num_layers": model.language.num_layers, "vit_num_layers": model.vision.num_layers,
            "new_transformers_weight_key": are_module_names(names)}


@dataclass(kw_only=True)
class RunConfig(Options):
    """What every conversion understands."""

    common_model_config: CommonModelConfig = field(default_factory=CommonModelConfig)
    trust_remote_code: bool = False
    """Without effect: no code of a model directory is ever run."""


@dataclass(kw_only=True)
class ToMMConfig(RunConfig):
    """What every conversion to MindSpeed-MM's layout understands."""

    mm_dir: str
    """Target."""
    parallel_config: ParallelConfig
    """Layout of the target."""
    save_format: Literal["safetensors", "torch"] = "safetensors"
    """The target's files: model.safetensors, or MindSpeed-MM's model_optim_rng.pt."""


@dataclass(kw_only=True)
class HFToMMConfig(ToMMConfig):
    """hf_to_mm."""

    hf_config: HFConfig
    """Source."""
    llm_hf_config: HFConfig | None = None
    """Take the LLM from this directory, ViT and projector from hf_config."""
    save_vit_only: bool = False
    """Write ViT and projector only."""

    def language_dir(self) -> str | None:
        """The directory that the LLM is taken from, if one is given.

        Raises UserError when two different ones are given.
        """
        one, other = self.llm_hf_config and self.llm_hf_config.hf_dir, self.common_model_config.llm_hf_dir
        if one and other and Path(one).resolve() != Path(other).resolve():
            raise UserError(
                f"--cfg.llm_hf_config.hf_dir is {one}, but {_COMMON}.llm_hf_dir is {other}; give one of them."
            )
        return one or other


@dataclass(kw_only=True)
class MMToHFConfig(RunConfig):
    """mm_to_hf."""

    mm_dir: str
    """Source: a directory of MindSpeed-MM's layout, or a training checkpoint."""
    save_hf_dir: str
    """Target."""
    hf_config: HFConfig
    """What the target is to be like: its shards, and the files that are copied."""
    parallel_config: ParallelConfig | None = None
    """Layout of the source; may be left out."""


@dataclass(kw_only=True)
class ResplitConfig(RunConfig):
    """resplit."""

    source_dir: str
    """A directory of MindSpeed-MM's layout, or a training checkpoint."""
    target_dir: str
    target_parallel_config: ParallelConfig
    """Layout of the target."""
    source_parallel_config: ParallelConfig | None = None
    """Layout of the source; may be left out."""
    hf_config: HFConfig | None = None
    """Says what model it is where the source has no manifest and is none of the published sizes."""
    save_format: Literal["safetensors", "torch"] | None = None
    """The target's files.  Default: as the source."""


@dataclass(kw_only=True)
class LoraHFToMMConfig(ToMMConfig):
    """lora_hf_to_mm."""

    hf_config: HFConfig
    """Source: the PEFT directory, with adapter_config.json and adapter_model.safetensors."""
    base_dir: str | None = None
    """Hugging Face directory of the adapters' model.  Default: base_model_name_or_path of adapter_config.json."""


@dataclass(kw_only=True)
class LoraMMToHFConfig(RunConfig):
    """lora_mm_to_hf."""

    mm_dir: str
    """Source: adapters in MindSpeed-MM's layout, or a training checkpoint of adapters."""
    save_hf_dir: str
    """Target, a PEFT directory."""
    hf_config: HFConfig | None = None
    """The adapters' model, which the target names; needed where the source has no manifest."""
    parallel_config: ParallelConfig | None = None
    """Layout of the source; needed where it has no manifest."""
    lora_alpha: float | None = None
    """--lora-alpha of the training; needed where the source has no manifest, because nothing else says it."""


@dataclass(kw_only=True)
class MergeLoraConfig(Options):
    """merge_lora."""

    lora_dir: str
    """The adapters: a PEFT directory, a training checkpoint, or MindSpeed-MM's layout with a manifest."""
    hf_config: HFConfig
    """Their model; the target is like it."""
    save_hf_dir: str
    """Target, a whole model."""


@dataclass(kw_only=True)
class VerifyConfig:
    """verify."""

    mm_dir: str
    """A directory of MindSpeed-MM's layout, or a training checkpoint."""
    hf_config: HFConfig | None = None
    """Compare with this Hugging Face directory too."""
    parallel_config: ParallelConfig | None = None
    """Layout of mm_dir; may be left out."""
    num_workers: int = 0
    """Threads; 0 = one for each core."""


@dataclass(kw_only=True)
class DiffConfig:
    """diff."""

    source_dir: str
    """What is taken to be right: a Hugging Face directory, one of MindSpeed-MM's layout, or a training checkpoint."""
    target_dir: str
    """What is compared with it: any of these, on any layout."""
    hf_config: HFConfig | None = None
    """Says what model it is where there is no manifest and it is none of the published sizes."""
    num_workers: int = 0
    """Threads; 0 = one for each core."""


@dataclass(kw_only=True)
class ShowConfig:
    """show."""

    dir: str
    """A Hugging Face directory, one of MindSpeed-MM's layout, or a training checkpoint."""


def read_lists(given: Layers, key: str) -> PipelineLayout:
    """Layers per ``[chunk][stage]``; ``key`` is what messages call them.

    Raises UserError when they are not as ``Layers`` says.
    """
    try:
        # jsonargparse has parsed lists; what is still text is 12,16 or a mistake.
        counts: Any = [int(part) for part in given.split(",")] if isinstance(given, str) else given
        counts = [counts] if isinstance(counts, int) else counts
        chunks = counts if all(isinstance(part, list) for part in counts) else [counts]
        if counts and all(type(count) is int for chunk in chunks for count in chunk):
            return tuple(tuple(chunk) for chunk in chunks)
    except ValueError:
        pass
    raise UserError(
        f"{key} is {given!r}; expected layers per pipeline stage such as [12,16], 12,16 or, with one list for every "
        f"virtual chunk, [[6,8],[6,8]]. A missing bracket, or a space that the shell split at, is the usual cause."
    )


def _absent_problems(given: ParallelConfig | CommonModelConfig, flag: str) -> list[str]:
    """Fields of ``given``, the section ``flag``, that ask for what this model has none of."""
    problems = []
    for name, (expected, what) in _ABSENT.items():
        value = getattr(given, name, None)
        if value is not None and any(n != expected for chunk in read_lists(value, f"{flag}.{name}") for n in chunk):
            problems.append(f"{flag}.{name} is {value}; expected {expected}: the model has no {what}.")
    return problems
