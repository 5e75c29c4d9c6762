"""What is wrong with the files and directories of a run, found before any device or process group is touched.

The flags and JSON files themselves, and files that are missing, are checked before in ``mm.config.run``.  One rank, or
none, calls it.
"""

import os
from collections.abc import Callable
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
from mm.errors import UserError


def file_problems(run: Run) -> list[str]:
    """Problems of weights, tokenizer, processor and output directories; reads headers only, so it takes seconds."""
    another_model = _problems_of(_check_model, run)
    if another_model:
        return another_model + _problems_of(_check_outputs, run)
    checks = (_check_load, _check_processor, _check_export, _check_outputs)
    return [problem for check in checks for problem in _problems_of(check, run)]


def sample_problems(run: Run) -> list[str]:
    """Problems of the samples; reads all of every dataset file, but of images only that they are there."""
    if not all(Path(path).is_file() for path in run.data.dataset) or not Path(run.data.dataset_dir).is_dir():
        return []
    return _problems_of(lambda run: Dataset(run.data), run)


def _problems_of(check: Callable[[Run], object], run: Run) -> list[str]:
    try:
        check(run)
    except UserError as error:
        return list(error.problems)
    except OSError as error:
        return [f"{error.filename}: cannot be read: {error.strerror}"]
    return []


def _check_model(run: Run) -> None:
    """The model JSON describes the model of the processor's directory and, where it is one, of ``--load``."""
    directories = dict.fromkeys(path for path in (run.data.model_name_or_path, run.args.load) if path is not None)
    problems = [problem for path in directories for problem in hf_problems(run.model, path, run.args.mm_model)]
    if problems:
        raise UserError(problems)


def _check_load(run: Run) -> None:
    if run.args.load is not None and Path(run.args.load).is_dir():
        open_to_train(run.args.load, run.model, run.args.finetune)


def _check_processor(run: Run) -> None:
    if Path(run.data.model_name_or_path).is_dir():
        SampleEncoder.from_config(run.data, run.model, run.args.seq_length)


def _check_export(run: Run) -> None:
    """The base of the export, unless ``--load`` gives it too, and the target."""
    path = Path(run.data.model_name_or_path)
    if run.args.export_hf is None or not path.is_dir():
        return
    base, target, problems = path.resolve(), Path(run.args.export_hf).resolve(), []
    if run.args.load is None or Path(run.args.load).resolve() != base:
        problems += _problems_of(lambda run: HFDirectory.open(path, weights_required=False).check(run.model), run)
    if base.is_relative_to(target):
        problems.append(
            f"--export-hf: The target {target} is or contains the base directory {base}; give another target."
        )
    else:
        found = _problems_of(lambda run: check_target(target, num_bytes=0), run)
        problems += [f"--export-hf: {problem}" for problem in found]
    if problems:
        raise UserError(problems)


def _check_outputs(run: Run) -> None:
    args = run.args
    directories = {"--save": args.save, "--log-dir": args.log_dir, "--tensorboard-dir": args.tensorboard_dir}
    found = (_directory_problem(flag, path) for flag, path in directories.items() if path is not None)
    problems = [problem for problem in found if problem is not None]
    if args.save is not None and any(Path(args.save).glob("*/mp_rank_*")):
        problems.append(f"--save is {args.save!r}, which holds weights in MindSpeed-MM's layout; a checkpoint beside "
                        f"them would take the place of what {LATEST_FILE} names: give another directory")
    if args.tensorboard_dir is not None and find_spec("tensorboard") is None:
        problems.append("--tensorboard-dir needs the package tensorboard, which is not installed; install it, or leave "
                        "the flag out")
    if problems:
        raise UserError(problems)


def _directory_problem(flag: str, path: str) -> str | None:
    existing = next(folder for folder in (Path(path).absolute(), *Path(path).absolute().parents) if folder.exists())
    if not existing.is_dir():
        return f"{flag} is {path!r}, but {existing} is a file; give a directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{flag} is {path!r}, but {existing} cannot be written; give another directory, or mend its permissions"
    return None
