"""``mm-convert``: the command line, with MindSpeed-MM's words.

    mm-convert Qwen2_5_VLConverter hf_to_mm --cfg.mm_dir DIR --cfg.hf_config.hf_dir DIR \\
        --cfg.parallel_config.llm_pp_layers [[12,16]] --cfg.parallel_config.vit_pp_layers [[32,0]]

Turns flags into calls of ``checkpoint.convert`` and ``checkpoint.inspect``, and mistakes into messages with
exit status 2.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from checkpoint import convert
from checkpoint.convert import Options
from checkpoint.inspect import show_directory, verify_directory
from checkpoint.lists import read_lists
from mm.errors import UserError
from mm.sharded.layout import Layout


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


@dataclass(kw_only=True)
class RunConfig:
    """What every conversion understands."""

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


@dataclass(kw_only=True)
class MMToHFConfig(RunConfig):
    """mm_to_hf."""

    mm_dir: str
    """Source."""
    save_hf_dir: str
    """Target."""
    hf_config: HFConfig
    """What the target is to be like: its shards, and the files that are copied."""
    parallel_config: ParallelConfig | None = None
    """Layout of the source; not needed where it has a manifest."""


@dataclass(kw_only=True)
class ResplitConfig(RunConfig):
    """resplit."""

    source_dir: str
    target_dir: str
    target_parallel_config: ParallelConfig
    """Layout of the target."""
    source_parallel_config: ParallelConfig | None = None
    """Layout of the source; not needed where it has a manifest."""
    hf_config: HFConfig | None = None
    """Only needed where the source has no manifest: says what model it is."""


@dataclass(kw_only=True)
class VerifyConfig:
    """verify."""

    mm_dir: str
    """A directory of MindSpeed-MM's layout."""
    hf_config: HFConfig | None = None
    """Compare with this Hugging Face directory too."""
    parallel_config: ParallelConfig | None = None
    """Layout of mm_dir; not needed where it has a manifest."""
    num_workers: int = 0
    """Threads; 0 = one for each core."""


@dataclass(kw_only=True)
class ShowConfig:
    """show."""

    dir: str
    """A directory that mm-convert wrote, or a Hugging Face directory."""


def hf_to_mm(cfg: HFToMMConfig) -> None:
    """Hugging Face -> MindSpeed-MM's directories on a layout."""
    layout = _layout(cfg.parallel_config, convert.LAYOUT)
    convert.hf_to_mm(cfg.hf_config.hf_dir, cfg.mm_dir, layout).run(_options(cfg))


def mm_to_hf(cfg: MMToHFConfig) -> None:
    """MindSpeed-MM's directories, on any layout -> Hugging Face."""
    layout = _optional_layout(cfg.parallel_config, convert.LAYOUT)
    convert.mm_to_hf(cfg.mm_dir, cfg.hf_config.hf_dir, cfg.save_hf_dir, layout).run(_options(cfg))


def resplit(cfg: ResplitConfig) -> None:
    """MindSpeed-MM's directories from one layout to another."""
    source = _optional_layout(cfg.source_parallel_config, convert.SOURCE_LAYOUT)
    target = _layout(cfg.target_parallel_config, convert.TARGET_LAYOUT)
    hf_dir = cfg.hf_config.hf_dir if cfg.hf_config else None
    convert.resplit(cfg.source_dir, cfg.target_dir, source, target, hf_dir).run(_options(cfg))


def verify(cfg: VerifyConfig) -> None:
    """Compare a directory with its manifest, and with a Hugging Face directory if one is given."""
    given = _optional_layout(cfg.parallel_config, convert.LAYOUT)
    hf_dir = cfg.hf_config.hf_dir if cfg.hf_config else None
    print("\n".join(verify_directory(Path(cfg.mm_dir), hf_dir, given, convert.LAYOUT, _num_workers(cfg.num_workers))))


def show(cfg: ShowConfig) -> None:
    """Print layout, sizes and dtypes of a directory."""
    print("\n".join(show_directory(Path(cfg.dir))))


COMMANDS: dict[str, Callable[..., None]] = {
    "hf_to_mm": hf_to_mm, "mm_to_hf": mm_to_hf, "resplit": resplit, "verify": verify, "show": show,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run and return the exit status: 0, or 2 after telling every mistake that the user can mend."""
    components: Any = {"Qwen2_5_VLConverter": {"_help": "Qwen2.5-VL, all sizes.", **COMMANDS}}
    try:
        auto_cli(components, as_positional=False, args=list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        sys.stderr.write("".join(f"error: {problem}\n" for problem in error.problems))
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; the same command goes on from what was finished.\n")
        return 130
    return 0


def _options(cfg: RunConfig) -> Options:
    return Options(cfg.dry_run, cfg.overwrite, _num_workers(cfg.num_workers))


def _num_workers(given: int) -> int:
    if given < 0:
        raise UserError(f"--cfg.num_workers is {given}; expected 0 (one thread for each core) or more.")
    return given


def _optional_layout(given: ParallelConfig | None, flag: str) -> Layout | None:
    return None if given is None else _layout(given, flag)


def _layout(given: ParallelConfig, flag: str) -> Layout:
    problems, lists = [], []
    for name in ("vit_pp_layers", "llm_pp_layers"):
        try:
            lists.append(read_lists(getattr(given, name), f"{flag}.{name}"))
        except UserError as error:
            problems += error.problems
    if given.vit_tp_size not in (0, given.tp_size):
        problems.append(
            f"{flag}.vit_tp_size is {given.vit_tp_size}; expected 0 or tp_size = {given.tp_size}, because both towers "
            f"are cut alike."
        )
    if given.ep_size != 1:
        problems.append(f"{flag}.ep_size is {given.ep_size}; expected 1: the model has no experts.")
    if problems:
        raise UserError(problems)
    return Layout(lists[0], lists[1], given.tp_size)


if __name__ == "__main__":
    sys.exit(main())
