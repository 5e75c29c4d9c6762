"""A run's log line, metrics.jsonl, experiment trackers, and resolved configuration.

The log line has MindSpeed-MM's format, because its users' scripts parse it with awk.  docs/metrics.md says what each
field of the rows means.

Experiment trackers: TensorBoard, Weights & Biases, SwanLab.  Each is an optional package.
"""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol, TextIO

from mm.config.args import Arguments
from mm.console import duration
from mm.errors import UserError, writing
from mm.files import FACTS_FILE, METRICS_FILE, json_object, read_regular, regular, whole_lines, write_whole
from mm.page import write_run_page
from mm.run.watch.step_timing import SlowRank
from mm.timeline import TIMED, label, seconds_key

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
    """A run in Weights & Biases, with Megatron's flags, or in SwanLab, which has the same API.

    Their environment variables (WANDB_MODE, WANDB_API_KEY, SWANLAB_MODE and so on) apply.
    """

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


_FLAG = "--log-dir"
_NUM_TIMED = 100
"""Number of recent steps whose median time predicts the time left, without validations and saves."""
_MAX_EXPONENT = 20.0
"""Maximum exponent of a perplexity, as in Megatron."""


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step.  Counts are for the global batch."""

    iteration: int
    consumed_samples: int
    loss: float
    lr: float
    grad_norm: float
    loss_scale: float
    step_seconds: float
    global_batch_size: int
    num_tokens: int
    num_target_tokens: int
    num_patches: int
    num_images: int
    num_omitted_images: int
    tokens_per_second_per_device: float
    model_flops_per_second_per_device: float
    mfu: float | None
    max_memory_bytes: int
    updated: bool
    timers: Mapping[str, float] | None = None
    epoch: float | None = None
    num_cached_images: int | None = None
    slowest_rank_share: float | None = None
    slowest_ranks: tuple[SlowRank, ...] = ()
    stage_memory_bytes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ValidationMetrics:
    """Metrics of one validation."""

    iteration: int
    consumed_samples: int
    validation_loss: float | None
    num_samples: int
    num_target_tokens: int
    validation_seconds: float
    best_validation_loss: float | None
    best_iteration: int


@dataclass(frozen=True)
class ScoreMetrics:
    """Metrics of the answers to one set of questions."""

    iteration: int
    consumed_samples: int
    validation_score_percent: float
    num_questions: int
    num_truncated_answers: int
    answer_seconds: float


@dataclass(frozen=True)
class SpikeMetrics:
    """A step whose loss or gradient norm is not finite, or far above that of the steps before."""

    iteration: int
    why: str
    skipped: bool
    loss: float
    grad_norm: float
    samples: tuple[int, ...]


def score_line(found: ScoreMetrics, benchmark: str) -> str:
    """The log line of a score, like ``validation_line``."""
    fields = [
        f"validation score at iteration {found.iteration}",
        f"{benchmark}: {found.validation_score_percent:.2f}%",
        f"questions: {found.num_questions}",
        f"truncated answers: {found.num_truncated_answers}",
        f"elapsed time (ms): {1000 * found.answer_seconds:.1f}",
    ]
    return f" {' | '.join(fields)} |"


def validation_line(found: ValidationMetrics) -> str:
    """The log line of a validation, in Megatron's format."""
    loss = math.nan if found.validation_loss is None else found.validation_loss
    best = "none" if found.best_validation_loss is None else (
        f"{found.best_validation_loss:.6E} at iteration {found.best_iteration}")
    fields = [
        f"validation loss at iteration {found.iteration}",
        f"loss value: {loss:.6E}",
        f"loss PPL: {math.exp(min(loss, _MAX_EXPONENT)):.6E}",
        f"best: {best}",
        f"samples: {found.num_samples}",
        f"target tokens: {found.num_target_tokens}",
        f"elapsed time (ms): {1000 * found.validation_seconds:.1f}",
    ]
    return f" {' | '.join(fields)} |"


def log_line(
    steps: Sequence[StepMetrics], train_iters: int, log_tps: bool, log_throughput: bool,
    seconds_left: float | None = None,
) -> str:
    """The log line of a step, in MindSpeed-MM's format: the last of ``steps``, with time and loss averaged over all.

    Field 5 between colons must begin with the elapsed time; the timestamp's two colons count.
    """
    step = steps[-1]
    elapsed_ms = 1000 * fmean(one.step_seconds for one in steps)
    loss = fmean([one.loss for one in steps if math.isfinite(one.loss)] or [math.nan])
    tokens_per_sample = step.num_tokens / max(step.global_batch_size, 1)
    fields = [
        f"iteration {step.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {step.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {elapsed_ms:.1f}",
        *([f"throughput per GPU (TFLOP/s/GPU): {step.model_flops_per_second_per_device / 1e12:.1f}"] * log_throughput),
        f"learning rate: {step.lr:.6E}",
        f"global batch size: {step.global_batch_size:5d}",
        *([f"tokens per sample: {tokens_per_sample:.1f}"] * log_tps),
        f"loss: {loss:.6E}",
        f"loss scale: {step.loss_scale:.1f}",
        f"grad norm: {step.grad_norm:.3f}",
        f"number of skipped iterations: {sum(not one.updated for one in steps):3d}",
        f"number of nan iterations: {sum(not math.isfinite(one.loss) for one in steps):3d}",
        *_timers(steps),
        *_cached(steps),
        *([] if step.epoch is None else [f"epoch: {step.epoch:.3f}"]),
        *([] if seconds_left is None else [f"time left: {duration(seconds_left)}"]),
    ]
    return f" [{datetime.now():%Y-%m-%d %H:%M:%S}] " + " | ".join(fields) + " |"


def _timers(steps: Sequence[StepMetrics]) -> Iterator[str]:
    """With --log-timers: means over ``steps``, such as "most of any rank (ms): ViT forward 12.0, backward 30.1"."""
    timed = [one.timers for one in steps if one.timers is not None]
    if timed:
        means = (f"{label(work)} {1000 * fmean(one[seconds_key(work)] for one in timed):.1f}" for work in TIMED)
        yield f"most of any rank (ms): {', '.join(means)}"


def _cached(steps: Sequence[StepMetrics]) -> Iterator[str]:
    """With --vision-feature-cache: sums over ``steps``, such as "images from the cache: 30 of 40"."""
    counts = [(one.num_cached_images, one.num_images) for one in steps if one.num_cached_images is not None]
    if counts:
        yield "images from the cache: {} of {}".format(*map(sum, zip(*counts, strict=True)))



class MetricsWriter:
    """Prints and stores the metrics of a run; only one rank has a writer."""

    def __init__(self, args: Arguments, resolved: Mapping[str, Any], first_iteration: int,
                 say: Callable[[str], None] = print) -> None:
        """Open the files in ``args.log_dir``; ``say`` reports that the page cannot be written.

        A resumed run drops the rows of iterations that it will repeat; a new run moves an earlier run's file aside.
        This and the other methods raise UserError naming a file that cannot be written.
        """
        self._args, self._say = args, say
        self._since_line: list[StepMetrics] = []
        self._step_seconds: deque[float] = deque(maxlen=_NUM_TIMED)
        directory = Path(args.log_dir)
        self._facts, self._facts_path, self._path = resolved, directory / FACTS_FILE, directory / METRICS_FILE
        with writing(self._facts_path, _FLAG):
            write_whole(self._facts_path, _facts_text(resolved).encode())
        with writing(self._path, _FLAG):
            _keep_before(self._path, first_iteration)
            opened = regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._file: TextIO = os.fdopen(opened, "a", encoding="utf-8")
        self._trackers = open_trackers(args, resolved)

    def write(self, step: StepMetrics) -> None:
        """Store one step, and print the log line if due."""
        self._since_line.append(step)
        self._step_seconds.append(step.step_seconds)
        self._store("step", {**asdict(step), "num_skipped": sum(not one.updated for one in self._since_line)},
                    "loss", "lr", "grad_norm", "tokens_per_second_per_device", "mfu", "epoch",
                    "slowest_rank_share")
        args = self._args
        if step.iteration % args.log_interval == 0:
            left = (args.train_iters - step.iteration) * median(self._step_seconds)
            print(log_line(self._since_line, args.train_iters, args.log_tps, args.log_throughput, left), flush=True)
            self._since_line.clear()

    def write_validation(self, found: ValidationMetrics) -> None:
        """Store one validation as a separate row after its step, and print it."""
        self._store("validation", asdict(found), "validation_loss")
        print(validation_line(found), flush=True)

    def write_score(self, found: ScoreMetrics, benchmark: str) -> None:
        """Store and print the score of the answers to ``benchmark``."""
        self._store("score", asdict(found), "validation_score_percent")
        print(score_line(found, benchmark), flush=True)

    def write_spike(self, found: SpikeMetrics) -> None:
        """Store a bad step or spike as a separate row before its step."""
        self._store("spike", asdict(found))

    def _store(self, kind: str, row: Mapping[str, Any], *shown: str) -> None:
        """Store a row, and send its fields ``shown`` that are not None to the trackers."""
        with writing(self._path, _FLAG):
            finite: dict[str, Any] = {name: None if isinstance(value, float) and not math.isfinite(value) else value
                                      for name, value in {"kind": kind, **row}.items()}  # JSON has no other numbers
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        values = {name: finite[name] for name in shown if finite[name] is not None}
        for tracker in self._trackers if values else ():
            tracker.log(values, row["iteration"])

    def close(self, ended: Mapping[str, Any] | None = None) -> None:
        """Close everything; ``ended`` says when and how the run ends."""
        with writing(self._path, _FLAG):
            self._file.close()
        if ended is not None:
            with writing(self._facts_path, _FLAG):
                write_whole(self._facts_path, _facts_text({**self._facts, "ended": ended}).encode())
        if self._args.page:
            try:
                write_run_page(self._path.parent)
            except (OSError, UserError) as error:  # a page is not worth a run
                self._say(f"note: the page of the run cannot be written ({error}); python -m mm.page "
                          f"{self._path.parent} writes it later")
        for tracker in self._trackers:
            tracker.close()


def step_rows(log_dir: Path) -> list[dict[str, Any]]:
    """The rows of the steps of a run that has ended, in order; raises OSError naming a file that cannot be read."""
    rows = map(json_object, whole_lines((log_dir / METRICS_FILE).read_bytes()))
    return [row for row in rows if row["kind"] == "step"]


def _facts_text(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, indent=2) + "\n"


def _keep_before(path: Path, iteration: int) -> None:
    """Keep the rows up to ``iteration`` in a resumed run's file; a new run (iteration 0) moves the file aside.

    The file is replaced atomically.
    """
    if not path.exists():
        return
    content = read_regular(path)
    if iteration == 0:
        written = datetime.fromtimestamp(path.stat().st_mtime)
        path.rename(path.with_name(f"metrics_{written:%Y%m%d_%H%M%S_%f}.jsonl"))
        return
    try:
        kept = b"".join(row for row in whole_lines(content) if json_object(row)["iteration"] <= iteration)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); move it away, then the run writes a new one") from error
    if kept != content:
        write_whole(path, kept, syncs=True)
