"""Programs that show how a run goes: TensorBoard, Weights & Biases, SwanLab.  Each is an optional package.

What is shown, and when, is not known here.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from mm.config.flags import Arguments
from mm.errors import UserError


class Tracker(Protocol):
    """Takes numbers by name; those of one iteration may come one after another."""

    def log(self, values: Mapping[str, float], iteration: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files."""

    def __init__(self, directory: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(directory)

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases, with Megatron's flags; its own environment variables (WANDB_MODE, WANDB_API_KEY) count."""

    def __init__(self, project: str, name: str | None, directory: str, facts: Mapping[str, Any]) -> None:
        """Raises UserError where it cannot begin: without a login, or without the network."""
        wandb: Any = import_module("wandb")
        Path(directory).mkdir(parents=True, exist_ok=True)  # without it wandb writes below the system's /tmp
        try:
            self._run: Any = wandb.init(project=project, name=name, dir=directory, config=dict(facts))
        except wandb.Error as error:
            raise UserError(f"--wandb-project: Weights & Biases cannot begin ({error}); log in with wandb login, set "
                            f"WANDB_MODE=offline to send it later with wandb sync, or leave it out") from error

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        self._run.log(dict(values), step=iteration)

    def close(self) -> None:
        self._run.finish()


class SwanLab:
    """The same for SwanLab (SWANLAB_MODE, SWANLAB_API_KEY)."""

    def __init__(self, project: str, name: str | None, directory: str, facts: Mapping[str, Any]) -> None:
        """Raises UserError as ``Wandb`` does."""
        swanlab: Any = import_module("swanlab")
        Path(directory).mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = swanlab.init(project=project, name=name, log_dir=directory, config=dict(facts))
        except RuntimeError as error:
            raise UserError(f"--swanlab-project: SwanLab cannot begin ({error}); log in with swanlab login, set "
                            f"SWANLAB_MODE=offline to send it later with swanlab sync, or leave it out") from error

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
        trackers.append(Wandb(args.wandb_project, args.wandb_exp_name, args.wandb_save_dir or args.log_dir, facts))
    if args.swanlab_project is not None:
        directory = args.swanlab_save_dir or str(Path(args.log_dir) / "swanlog")
        trackers.append(SwanLab(args.swanlab_project, args.swanlab_exp_name, directory, facts))
    return trackers


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
