"""``mm-convert``: the command line, with MindSpeed-MM's words.

    mm-convert Qwen2_5_VLConverter hf_to_mm --cfg.mm_dir DIR --cfg.hf_config.hf_dir DIR \\
        --cfg.parallel_config.llm_pp_layers [[12,16]] --cfg.parallel_config.vit_pp_layers [[32,0]]

Turns flags into calls of ``checkpoint.convert`` and ``checkpoint.verify``, and mistakes into messages with
exit status 2.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from checkpoint import convert
from checkpoint.convert import Options
from checkpoint.diff import diff_directories
from checkpoint.formats.layout import Layout
from checkpoint.formats.storage import Format, Storage, Structure
from checkpoint.lists import read_lists
from checkpoint.options import (
    CommonModelConfig,
    DiffConfig,
    HFToMMConfig,
    MMToHFConfig,
    ParallelConfig,
    ResplitConfig,
    RunConfig,
    ShowConfig,
    VerifyConfig,
)
from checkpoint.stated import check_common, language_dir, parallel_problems
from checkpoint.verify import show_directory, verify_directory
from mm.errors import UserError


def hf_to_mm(cfg: HFToMMConfig) -> None:
    """Hugging Face -> MindSpeed-MM's directories on a layout."""
    layout = _layout(cfg.parallel_config, convert.LAYOUT)
    common, hf_dir = cfg.common_model_config, cfg.hf_config.hf_dir
    check_common(common, hf_dir)
    storage = Storage(Format(cfg.save_format), _structure(common) or Structure.FUSED, cfg.save_vit_only)
    convert.hf_to_mm(hf_dir, cfg.mm_dir, layout, storage, language_dir(cfg)).run(_options(cfg))


def mm_to_hf(cfg: MMToHFConfig) -> None:
    """MindSpeed-MM's directories, on any layout, or a training checkpoint -> Hugging Face."""
    layout = _optional_layout(cfg.parallel_config, convert.LAYOUT)
    common, hf_dir = cfg.common_model_config, cfg.hf_config.hf_dir
    check_common(common, hf_dir)
    convert.mm_to_hf(cfg.mm_dir, hf_dir, cfg.save_hf_dir, layout, _structure(common)).run(_options(cfg))


def resplit(cfg: ResplitConfig) -> None:
    """MindSpeed-MM's directories, or a training checkpoint, from one layout to another."""
    source = _optional_layout(cfg.source_parallel_config, convert.SOURCE_LAYOUT)
    target = _layout(cfg.target_parallel_config, convert.TARGET_LAYOUT)
    common, hf_dir = cfg.common_model_config, cfg.hf_config.hf_dir if cfg.hf_config else None
    check_common(common, hf_dir)
    format = None if cfg.save_format is None else Format(cfg.save_format)
    structure = _structure(common)
    convert.resplit(cfg.source_dir, cfg.target_dir, source, target, hf_dir, format, structure).run(_options(cfg))


def verify(cfg: VerifyConfig) -> None:
    """Compare a directory with its manifest, and with a Hugging Face directory if one is given."""
    given = _optional_layout(cfg.parallel_config, convert.LAYOUT)
    hf_dir = cfg.hf_config.hf_dir if cfg.hf_config else None
    print("\n".join(verify_directory(Path(cfg.mm_dir), hf_dir, given, convert.LAYOUT, _num_workers(cfg.num_workers))))


def diff(cfg: DiffConfig) -> int:
    """Compare two directories of any kind and layout: the first differing tensors and a guess at the cause.

    Exit status 0: equal; 1: different.
    """
    hf_dir = cfg.hf_config.hf_dir if cfg.hf_config else None
    found = diff_directories(cfg.source_dir, cfg.target_dir, hf_dir, _num_workers(cfg.num_workers))
    print("\n".join(found.lines))
    return 0 if found.is_equal else 1


def show(cfg: ShowConfig) -> None:
    """Print layout, sizes and dtypes of a directory."""
    print("\n".join(show_directory(Path(cfg.dir))))


COMMANDS: dict[str, Callable[..., int | None]] = {
    "hf_to_mm": hf_to_mm, "mm_to_hf": mm_to_hf, "resplit": resplit, "verify": verify, "diff": diff,
    "show": show,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run and return the exit status: 0, 1 where ``diff`` found differences, or 2 after telling the user's mistakes."""
    components: Any = {"Qwen2_5_VLConverter": {"_help": "Qwen2.5-VL, all sizes.", **COMMANDS}}
    try:
        status = auto_cli(components, as_positional=False, args=list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        sys.stderr.write("".join(f"error: {problem}\n" for problem in error.problems))
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; the same command goes on from what was finished.\n")
        return 130
    return status or 0


def _options(cfg: RunConfig) -> Options:
    return Options(cfg.dry_run, cfg.overwrite, _num_workers(cfg.num_workers))


def _num_workers(given: int) -> int:
    if given < 0:
        raise UserError(f"--cfg.num_workers is {given}; expected 0 (one thread for each core) or more.")
    return given


def _structure(common: CommonModelConfig) -> Structure | None:
    if common.enable_canonical_hf_struct is None:
        return None
    return Structure.CANONICAL if common.enable_canonical_hf_struct else Structure.FUSED


def _optional_layout(given: ParallelConfig | None, flag: str) -> Layout | None:
    return None if given is None else _layout(given, flag)


def _layout(given: ParallelConfig, flag: str) -> Layout:
    problems, lists = [], []
    for name in ("vit_pp_layers", "llm_pp_layers"):
        try:
            lists.append(read_lists(getattr(given, name), f"{flag}.{name}"))
        except UserError as error:
            problems += error.problems
    problems += parallel_problems(given, flag)
    if problems:
        raise UserError(problems)
    return Layout(lists[0], lists[1], given.tp_size)


if __name__ == "__main__":
    sys.exit(main())
