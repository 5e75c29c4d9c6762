"""What ``--cfg`` of every command consists of: MindSpeed-MM's fields, and ours.

Fields that MindSpeed-MM has and this model has no use for are accepted at the values that change nothing.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class HFConfig:
    """A Hugging Face model directory."""

    hf_dir: str
    """Holds config.json and *.safetensors."""


@dataclass
class ParallelConfig:
    """Where the layers live."""

    llm_pp_layers: Any
    """LLM layers per stage: [12,16], 12,16, or one list for every virtual chunk, [[6,8],[6,8]]."""
    vit_pp_layers: Any
    """ViT layers per stage, likewise."""
    tp_size: int = 1
    """Tensor parallel size."""
    vit_tp_size: int = 0
    """0 or tp_size: both towers are cut alike."""
    ep_size: int = 1
    """1: the model has no experts."""
    audio_pp_layers: Any = None
    """Without effect; zeros only: the model has no audio encoder."""
    audio_tp_size: int = 0
    """Without effect: the model has no audio encoder."""


@dataclass
class CommonModelConfig:
    """The model, and how its weights are kept.  What is given of the model must agree with config.json."""

    enable_canonical_hf_struct: bool | None = None
    """true: q, k, v and gate, up apart in the target; false: fused.  Default: fused, or for resplit as the source."""
    new_transformers_weight_key: bool | None = None
    """true: names are model.language_model.* and model.visual.*.  Default: as the files have them."""
    model_prefix: str | None = None
    """Of adapters only, which are not converted; leave it out."""
    num_experts: int | None = None
    num_key_value_heads: int | None = None
    tie_word_embeddings: bool | None = None
    llm_hf_dir: str | None = None
    """The same as llm_hf_config.hf_dir."""
    llm_num_layers: int | None = None
    vit_num_layers: int | None = None
    audio_num_layers: int | None = None


@dataclass(kw_only=True)
class RunConfig:
    """What every conversion understands."""

    common_model_config: CommonModelConfig = field(default_factory=CommonModelConfig)
    dry_run: bool = False
    """Print the plan with sizes, and write nothing."""
    overwrite: bool = False
    """Replace a target that is not empty."""
    num_workers: int = 0
    """Threads; 0 = one for each core."""
    trust_remote_code: bool = False
    """Without effect: no code of a model directory is ever run."""


@dataclass(kw_only=True)
class HFToMMConfig(RunConfig):
    """hf_to_mm."""

    mm_dir: str
    """Target."""
    hf_config: HFConfig
    """Source."""
    parallel_config: ParallelConfig
    """Layout of the target."""
    llm_hf_config: HFConfig | None = None
    """Take the LLM from this directory, ViT and projector from hf_config."""
    save_vit_only: bool = False
    """Write ViT and projector only."""
    save_format: Literal["safetensors", "torch"] = "safetensors"
    """Of the target's files: model.safetensors, or MindSpeed-MM's model_optim_rng.pt."""


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
    """Of the target's files.  Default: as the source."""


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
