"""Experiment trackers, each an optional package: TensorBoard, Weights & Biases, SwanLab.

The check before a run, which precedes megatron, imports this file.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from mm.config.args import Arguments
from mm.errors import UserError, writing

_BOARD = "--tensorboard-dir"


class Tracker(Protocol):
    """Accepts numbers by name; there may be several calls per iteration."""

    def log(self, values: Mapping[str, float], iteration: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes event files."""

    def __init__(self, directory: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._directory = directory
        with writing(directory, _BOARD):
            self._writer: Any = SummaryWriter(directory)

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        with writing(self._directory, _BOARD):  # also raises errors of the writer's thread
            for name, value in values.items():
                self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        with writing(self._directory, _BOARD):
            self._writer.close()


class Online:
    """A run in Weights & Biases, with Megatron's flags, or in SwanLab, which has the same API.  Their environment
    variables (WANDB_MODE, WANDB_API_KEY, SWANLAB_MODE and so on) apply."""

    def __init__(self, package: str, title: str, begin: Callable[[], Any], refusal: type[Exception]) -> None:
        """Call ``begin``; raises UserError if it raises a ``refusal``, without a login or network."""
        try:
            self._run: Any = begin()
        except refusal as error:
            raise UserError(
                f"--{package}-project: {title} cannot start ({error}); log in with {package} login, set "
                f"{package.upper()}_MODE=offline to upload later with {package} sync, or leave the flag out") from error

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        self._run.log(dict(values), step=iteration)

    def close(self) -> None:
        self._run.finish()


def open_trackers(args: Arguments, facts: Mapping[str, Any]) -> list[Tracker]:
    """The trackers that the flags select; ``facts`` describe the run."""
    trackers: list[Tracker] = []
    if args.tensorboard_dir is not None:
        trackers.append(TensorBoard(args.tensorboard_dir))
    if args.wandb_project is not None:
        wandb: Any = import_module("wandb")
        folder = _made(args.wandb_save_dir or args.log_dir)  # without it wandb writes below the system's /tmp
        trackers.append(Online("wandb", "Weights & Biases", lambda: wandb.init(
            project=args.wandb_project, name=args.wandb_exp_name, dir=folder, config=dict(facts)), wandb.Error))
    if args.swanlab_project is not None:
        swanlab: Any = import_module("swanlab")
        logs = _made(args.swanlab_save_dir or str(Path(args.log_dir) / "swanlog"))
        trackers.append(Online("swanlab", "SwanLab", lambda: swanlab.init(
            project=args.swanlab_project, name=args.swanlab_exp_name, log_dir=logs, config=dict(facts)), RuntimeError))
    return trackers


def _made(directory: str) -> str:
    Path(directory).mkdir(parents=True, exist_ok=True)
    return directory


def tracker_problems(args: Arguments) -> Iterator[str]:
    """Problems with packages that the flags need but that are not installed."""
    flags = {"tensorboard": ("--tensorboard-dir", args.tensorboard_dir),
             "wandb": ("--wandb-project", args.wandb_project), "swanlab": ("--swanlab-project", args.swanlab_project)}
    for package, (flag, value) in flags.items():
        found = find_spec(package)  # a folder of that name, which wandb creates for its files, has no origin
        if value is not None and (found is None or found.origin is None):
            yield (f"{flag} needs the package {package}, which is not installed; install it with pip install "
                   f"{package}, or leave the flag out")
