"""What is wrong with the files and directories of a run, found before any device or process group is touched.

The flags and JSON files themselves, and files that are missing, are checked before in ``mm.config.run``.  One rank, or
none, calls it.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from checkpoint.convert import check_target
from checkpoint.formats.hf import HFDirectory
from checkpoint.formats.hf_config import hf_problems
from checkpoint.formats.source import open_to_train
from checkpoint.formats.training import LATEST_FILE
from mm.config.run import Run
from mm.data.dataset import Dataset
from mm.data.encode import SampleEncoder
from mm.errors import UserError, collected


def file_problems(run: Run) -> list[str]:
    """Problems of weights, tokenizer, processor and output directories; reads headers only, so it takes seconds."""
    args, base, problems = run.args, run.data.model_name_or_path, []
    for path in dict.fromkeys((base, args.load)):
        if path is not None:
            problems += hf_problems(run.model, path, args.mm_model)
    if not problems:  # nothing fits another model
        with collected(problems):
            if args.load is not None and Path(args.load).is_dir():
                open_to_train(args.load, run.model, args.loads_optimizer)
        with collected(problems):
            if Path(base).is_dir():
                SampleEncoder.from_config(run.data, run.model, args.seq_length)
        if args.export_hf is not None and Path(base).is_dir():
            problems += _export_problems(run, Path(base), Path(args.export_hf).resolve())
    with collected(problems):
        problems.extend(_output_problems(run))
    return problems


def sample_problems(run: Run) -> list[str]:
    """Problems of the samples; reads all of every dataset file, but of images only that they are there."""
    problems: list[str] = []
    if all(Path(path).is_file() for path in run.data.dataset) and Path(run.data.dataset_dir).is_dir():
        with collected(problems):
            Dataset(run.data)
    return problems


def _export_problems(run: Run, base: Path, target: Path) -> list[str]:
    """Problems of the base of the export, unless ``--load`` gives it too, and of the target."""
    problems: list[str] = []
    if run.args.load is None or Path(run.args.load).resolve() != base.resolve():
        with collected(problems):
            HFDirectory.open(base, weights_required=False).check(run.model)
    with collected(problems, "--export-hf: "):
        if base.resolve().is_relative_to(target):
            raise UserError(
                f"The target {target} is or contains the base directory {base.resolve()}; give another target."
            )
        check_target(target, num_bytes=0)
    return problems


def _output_problems(run: Run) -> Iterator[str]:
    args = run.args
    directories = {"--save": args.save, "--log-dir": args.log_dir, "--tensorboard-dir": args.tensorboard_dir}
    for flag, path in directories.items():
        if path is None:
            continue
        folder = next(one for one in (Path(path).absolute(), *Path(path).absolute().parents) if one.exists())
        if not folder.is_dir():
            yield f"{flag} is {path!r}, but {folder} is a file; give a directory"
        elif not os.access(folder, os.W_OK | os.X_OK):
            yield f"{flag} is {path!r}, but {folder} cannot be written; give another directory, or mend its permissions"
    if args.save is not None and any(Path(args.save).glob("*/mp_rank_*")):
        yield (f"--save is {args.save!r}, which holds weights in MindSpeed-MM's layout; a checkpoint beside them would "
               f"take the place of what {LATEST_FILE} names: give another directory")
    if args.tensorboard_dir is not None and find_spec("tensorboard") is None:
        yield ("--tensorboard-dir needs the package tensorboard, which is not installed; install it, or leave the flag "
               "out")
