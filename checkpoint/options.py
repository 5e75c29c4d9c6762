"""The ``--cfg`` fields of all commands: MindSpeed-MM's, and this project's additions.

MindSpeed-MM's fields for other models are accepted only with values that have no effect.
"""

import json
from typing import Annotated, Any, Literal

from annotated_types import Le
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from mm.config.args import VitQkvOrder
from mm.config.lora import ALPHAS_TEXT, Alpha
from mm.config.model import EncoderPlacement
from mm.config.parse import STRICT, Count, Group, NaturalNumber
from mm.placement import PipelineLayout


def read_lists(given: Any) -> PipelineLayout:
    """Layers per ``[chunk][stage]`` from 28, [12,16], 12,16 or [[6,8],[6,8]]; raises ValueError for anything else."""
    text = given if not isinstance(given, str) or given.strip().startswith("[") else f"[{given}]"
    counts: Any = json.loads(text) if isinstance(text, str) else text
    counts = [counts] if isinstance(counts, int) else counts
    chunks: Any = counts if all(isinstance(one, list | tuple) for one in counts) else [counts]
    if not counts or not all(type(count) is int for chunk in chunks for count in chunk):
        raise ValueError(f"{given} is no list of layers")
    return tuple(tuple(chunk) for chunk in chunks)


def _zeros(lists: PipelineLayout | None) -> PipelineLayout | None:
    if lists is not None and any(map(any, lists)):
        raise ValueError("the model has no audio encoder")
    return lists


_LISTS_TEXT = ("layers per pipeline stage such as [12,16], 12,16 or, with one list for every virtual chunk, "
               "[[6,8],[6,8]]; without spaces, at which the shell would split it")
LayerLists = Annotated[PipelineLayout, BeforeValidator(read_lists), Field(title=_LISTS_TEXT)]
_NO_EXPERTS, _NO_AUDIO = ("0, because the model has no experts", "0, because the model has no audio encoder")
_Zero = Annotated[NaturalNumber, Le(0)]
_STATED = "read from config.json; a wrong value is refused"
Files = Literal["safetensors", "torch"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HFConfig:
    """A Hugging Face directory."""

    hf_dir: str


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ParallelConfig:
    """Placement of the layers."""

    llm_pp_layers: LayerLists = Field(title=_LISTS_TEXT, description=(
        "LLM layers per pipeline stage: [12,16] or 12,16; with virtual chunks one list for each, [[6,8],[6,8]]"))
    vit_pp_layers: LayerLists = Field(title=_LISTS_TEXT, description="ViT layers per pipeline stage, in the same form")
    tp_size: Count = Field(1, description="tensor-parallel size")
    vit_tp_size: NaturalNumber = Field(0, description="tensor-parallel size of the ViT: 0 or tp_size")
    encoder_placement: EncoderPlacement = Field("cut", description=(
        "as in the model JSON; with tensor_ranks, the files of every tensor-parallel rank hold the whole ViT and "
        "projector"))
    ep_size: Annotated[Count, Le(1)] = Field(
        1, title="1, because the model has no experts", description="expert-parallel size")
    audio_pp_layers: Annotated[LayerLists | None, AfterValidator(_zeros)] = Field(
        None, title="zeros, because the model has no audio encoder", description="layers of an audio encoder: zeros")
    audio_tp_size: NaturalNumber = Field(0, description="ignored, because the model has no audio encoder")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CommonModelConfig:
    """Facts about the model, which must match config.json, and how its weights are stored."""

    enable_canonical_hf_struct: bool | None = Field(None, description=(
        "whether MindSpeed-MM's layout stores q, k, v and gate, up as separate tensors (true) or fused (false); absent "
        "= fused; for resplit, as in the source"))
    new_transformers_weight_key: bool | None = Field(None, description=(
        "whether the tensors of hf_dir have the names of transformers 4.52 and later; a wrong value is refused"))
    vit_qkv_order: VitQkvOrder | None = Field(None, description=(
        "how a source without a manifest stores the ViT's qkv; whole is [Q; K; V], as MindSpeed-MM 2.2.0 and 2.3.0 "
        "wrote it"))
    model_prefix: str | None = Field(None, description="prefix of the names of adapters: PEFT's base_model.model.")
    num_experts: _Zero | None = Field(None, title=_NO_EXPERTS, description="0")
    num_key_value_heads: int | None = Field(None, description=_STATED)
    tie_word_embeddings: bool | None = Field(None, description=_STATED)
    llm_hf_dir: str | None = Field(None, description="the same as llm_hf_config.hf_dir")
    llm_num_layers: int | None = Field(None, description=_STATED)
    vit_num_layers: int | None = Field(None, description=_STATED)
    audio_num_layers: _Zero | None = Field(None, title=_NO_AUDIO, description="0")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ConversionConfig:
    """Fields of every conversion."""

    dry_run: bool = Field(default=False, description="print the plan with sizes, and write nothing")
    overwrite: bool = Field(default=False, description="replace a target that is not empty")
    num_workers: NaturalNumber = Field(default=0, description="threads; 0 = one per core")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig(ConversionConfig):
    """Fields of every conversion except merge_lora."""

    trust_remote_code: bool = Field(False, description="ignored: code in a model directory is never run")
    common_model_config: Annotated[CommonModelConfig, Group("Facts about the model, seldom needed")] = Field(
        default_factory=lambda: CommonModelConfig())  # pyright: ignore[reportCallIssue]  (all fields have defaults)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ToMMConfig(RunConfig):
    """Fields of every conversion to MindSpeed-MM's layout."""

    mm_dir: str = Field(description="directory to write")
    parallel_config: Annotated[ParallelConfig, Group("Layout to write")]
    save_format: Annotated[Files, Group("Options")] = Field("safetensors", description=(
        "files to write: model.safetensors, or MindSpeed-MM's model_optim_rng.pt"))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HFToMMConfig(ToMMConfig):
    """Hugging Face -> MindSpeed-MM's directories on a layout."""

    hf_config: HFConfig = Field(description="directory to convert, with config.json and *.safetensors")
    llm_hf_config: HFConfig | None = Field(None, description=(
        "directory from which the LLM is taken; ViT and projector come from hf_config"))
    save_vit_only: bool = Field(False, description="write ViT and projector only")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MMToHFConfig(RunConfig):
    """MindSpeed-MM's directories, on any layout, or a training checkpoint -> Hugging Face."""

    mm_dir: str = Field(description="directory to convert: in MindSpeed-MM's layout, or a training checkpoint")
    save_hf_dir: str = Field(description="directory to write")
    hf_config: HFConfig = Field(description=(
        "template: save_hf_dir gets the same shards, and copies of the files besides the weights"))
    parallel_config: Annotated[ParallelConfig | None, Group("Layout of mm_dir, which is recognized without it")] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ResplitConfig(RunConfig):
    """MindSpeed-MM's directories, or a training checkpoint, from one layout to another."""

    source_dir: str = Field(description="directory to convert: in MindSpeed-MM's layout, or a training checkpoint")
    target_dir: str = Field(description="directory to write")
    hf_config: Annotated[HFConfig | None, Group("Options")] = Field(None, description=(
        "describes the model; required if source_dir has no manifest and is not one of the published sizes"))
    save_format: Files | None = Field(None, description="files to write; absent = the format of source_dir")
    target_parallel_config: Annotated[ParallelConfig, Group("Layout to write")]
    source_parallel_config: Annotated[
        ParallelConfig | None, Group("Layout of source_dir, which is recognized without it")] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraHFToMMConfig(ToMMConfig):
    """A PEFT directory of adapters -> MindSpeed-MM's directories on a layout."""

    hf_config: HFConfig = Field(description=(
        "PEFT directory to convert, with adapter_config.json and adapter_model.safetensors"))
    base_dir: str | None = Field(None, description=(
        "Hugging Face directory of the base model; absent = base_model_name_or_path in adapter_config.json"))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraMMToHFConfig(RunConfig):
    """Adapters in MindSpeed-MM's directories, or a training checkpoint of adapters -> PEFT."""

    mm_dir: str = Field(description=(
        "adapters to convert: in MindSpeed-MM's layout, or a training checkpoint of adapters"))
    save_hf_dir: str = Field(description="PEFT directory to write")
    hf_config: Annotated[HFConfig | None, Group("Options")] = Field(None, description=(
        "the base model, which adapter_config.json will name; required if mm_dir has no manifest"))
    lora_alpha: Alpha | None = Field(None, title=ALPHAS_TEXT, description=(
        "--lora-alpha of the training; required if mm_dir has no manifest, because its files do not contain it"))
    parallel_config: Annotated[ParallelConfig | None, Group("Layout of mm_dir; required if it has no manifest")] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MergeLoraConfig(ConversionConfig):
    """Adapters added to the weights of their model -> Hugging Face."""

    lora_dir: str = Field(description=(
        "adapters: a PEFT directory, a training checkpoint, or MindSpeed-MM's layout with a manifest"))
    hf_config: HFConfig = Field(description="their base model, which is also the template for save_hf_dir")
    save_hf_dir: str = Field(description="directory to write: a whole model")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class VerifyConfig:
    """Compare a directory with its manifest, and with a Hugging Face directory if one is given."""

    mm_dir: str = Field(description="directory to check: in MindSpeed-MM's layout, or a training checkpoint")
    hf_config: HFConfig | None = Field(None, description="Hugging Face directory to compare with as well")
    num_workers: NaturalNumber = Field(0, description="threads; 0 = one per core")
    parallel_config: Annotated[ParallelConfig | None, Group("Layout of mm_dir, which is recognized without it")] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DiffConfig:
    """Compare two directories of any kind and layout: exit status 0 if they are equal, 1 if not."""

    source_dir: str = Field(description=(
        "directory that is assumed to be right: a Hugging Face directory, one in MindSpeed-MM's layout, or a training "
        "checkpoint"))
    target_dir: str = Field(description="directory that is compared with it, of any kind and layout")
    hf_config: HFConfig | None = Field(None, description=(
        "describes the model; required if neither directory does and it is not one of the published sizes"))
    num_workers: NaturalNumber = Field(0, description="threads; 0 = one per core")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ShowConfig:
    """Print layout, sizes and dtypes of a directory."""

    dir: str = Field(description=(
        "directory to show: a Hugging Face directory, one in MindSpeed-MM's layout, or a training checkpoint"))
