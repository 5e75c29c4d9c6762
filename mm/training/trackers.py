"""Programs that show how a run goes: TensorBoard, Weights & Biases, SwanLab.  Each is an optional package.

What is shown, and when, is not known here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from mm.config.flags import Arguments
from mm.errors import UserError, writing


class Tracker(Protocol):
    """Takes numbers by name; those of one iteration may come one after another."""

    def log(self, values: Mapping[str, float], iteration: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files."""

    def __init__(self, directory: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._directory = directory
        with self._writing():
            self._writer: Any = SummaryWriter(directory)

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        with self._writing():  # also what the writer's own thread has met since
            for name, value in values.items():
                self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        with self._writing():
            self._writer.close()

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self._directory, "--tensorboard-dir")


class Online:
    """A run in Weights & Biases, with Megatron's flags, or in SwanLab, which has the same calls.

    Their own environment variables (WANDB_MODE, WANDB_API_KEY, SWANLAB_MODE and so on) count.
    """

    def __init__(self, package: str, title: str, begin: Callable[[], Any], refusal: type[Exception]) -> None:
        """Raises UserError where ``begin`` raises a ``refusal``: without a login, or without the network."""
        try:
            self._run: Any = begin()
        except refusal as error:
            raise UserError(
                f"--{package}-project: {title} cannot begin ({error}); log in with {package} login, set "
                f"{package.upper()}_MODE=offline to send it later with {package} sync, or leave it out") from error

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        self._run.log(dict(values), step=iteration)

    def close(self) -> None:
        self._run.finish()


def open_trackers(args: Arguments, facts: Mapping[str, Any]) -> list[Tracker]:
    """Those that the flags ask for; ``facts`` describe the run."""
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
    """Packages that the flags need and that are not installed."""
    flags = {"tensorboard": ("--tensorboard-dir", args.tensorboard_dir),
             "wandb": ("--wandb-project", args.wandb_project), "swanlab": ("--swanlab-project", args.swanlab_project)}
    for package, (flag, value) in flags.items():
        if value is not None and not _is_installed(package):
            yield (f"{flag} needs the package {package}, which is not installed; install it with pip install "
                   f"{package}, or leave the flag out")


def _is_installed(package: str) -> bool:
    """A folder of that name beside the program, as wandb makes one for its files, is no package."""
    found = find_spec(package)
    return found is not None and found.origin is not None
