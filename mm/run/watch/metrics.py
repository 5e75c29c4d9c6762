"""What a run reports on its last rank, as Megatron does: log lines, ``metrics.jsonl``, ``run.json``, and trackers.

The log line has MindSpeed-MM's format, because its users' scripts parse it with awk.  docs/metrics.md says what each
field of the rows means.
"""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any, TextIO

from mm.batch import StepPlan, samples_text
from mm.config.args import Arguments
from mm.config.run import Run, resolved
from mm.console import duration
from mm.cost.stage_memory import stage_peaks, stage_sizes
from mm.device.device import device_facts, sdpa_backend
from mm.errors import UserError, counted, writing
from mm.files import FACTS_FILE, METRICS_FILE, json_object, read_regular, regular, whole_lines, write_whole
from mm.model import flops
from mm.page import write_run_page
from mm.parallel.agreement import all_of
from mm.run.optim.update import clips_in_adam
from mm.run.progress import Say, StepResult
from mm.run.schedule import Schedule
from mm.run.step import Setup
from mm.run.watch.step_timing import SlowRank
from mm.run.watch.trackers import open_trackers
from mm.run.watch.watcher import Step
from mm.timeline import TIMED, label, seconds_key
from mm.weights.trained import group_facts

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


class Reporter:
    """Writes the run's file, metrics and log lines on the last rank; on the others, nothing."""

    def __init__(self, run: Run, setup: Setup, schedule: Schedule, first_iteration: int, say: Say) -> None:
        """``first_iteration``: the iteration that the run continues from; rows of later ones are dropped."""
        self._run, self._setup, self._say = run, setup, say
        self._writer = None
        mesh, placement = setup.mesh, run.model.placement()
        if mesh.rank == mesh.world_size - 1:
            facts = {**resolved(run), "schedule": schedule.to_json(), "ran_on": _ran_on(run, setup),
                     "optimizer_groups": group_facts(run.args, run.model), "started_at": _now(),
                     "predicted_peak_bytes": stage_peaks(run, placement, stage_sizes(run, placement))}
            self._writer = MetricsWriter(run.args, facts, first_iteration, say)

    def report_step(self, step: Step) -> None:
        """Report a step as the watchers have measured it."""
        progress, result, seconds = step.progress, step.result, step.seconds
        run, totals, mesh, device = self._run, step.plan.totals, self._setup.mesh, self._setup.stage.device
        if totals.num_target_tokens == 0:
            self._say(f"note: iteration {progress.iteration} has no target token: its loss is 0. Check the roles of "
                      f"the samples, and whether --seq-length {run.args.seq_length} cuts answers off")
        if totals.num_omitted_images:
            self._say(f"note: iteration {progress.iteration}: {counted(totals.num_omitted_images, 'image')} omitted, "
                      f"because --seq-length {run.args.seq_length} would have cut them")
        if self._writer is None:
            return
        peak = device.peak_flops
        rate = flops.training_flops(run.model, totals) / seconds / mesh.world_size
        self._writer.write(StepMetrics(
            iteration=progress.iteration, consumed_samples=progress.consumed_samples, epoch=step.epoch,
            loss=result.loss, lr=result.lr, grad_norm=result.grad_norm, loss_scale=result.loss_scale,
            updated=result.updated, step_seconds=seconds, global_batch_size=run.global_batch_size,
            num_tokens=totals.num_tokens, num_target_tokens=totals.num_target_tokens, num_patches=totals.num_patches,
            num_images=totals.num_images, num_omitted_images=totals.num_omitted_images,
            num_cached_images=totals.num_cached_images if run.args.vision_feature_cache else None,
            tokens_per_second_per_device=totals.num_tokens / seconds / mesh.world_size,
            model_flops_per_second_per_device=rate, mfu=rate / peak if peak else None,
            max_memory_bytes=device.runtime.max_memory_bytes(), **step.measured))
        for line in step.lines:
            self._say(line)

    def report_spike(self, iteration: int, plan: StepPlan, result: StepResult, why: str) -> None:
        """Report a step that is bad or a spike, with the samples of all replicas; nothing if ``why`` is empty."""
        if not why:
            return
        mesh, own = self._setup.mesh, tuple(number for one in plan.microbatches for number in one.samples)
        found = dict(all_of(((mesh.dp_rank, own),), mesh.control_group))
        samples = tuple(number for rank in sorted(found) for number in found[rank])
        does = "is skipped" if result.fault else "is a spike"
        self._say(f"note: iteration {iteration} {does}: {why}{samples_text(samples)}")
        if self._writer is not None:
            self._writer.write_spike(
                SpikeMetrics(iteration, why, not result.updated, result.loss, result.grad_norm, samples))

    def report_validation(self, found: ValidationMetrics) -> None:
        """Report a validation."""
        if found.validation_loss is None:
            self._say(f"note: the validation after iteration {found.iteration} has no loss: " + (
                "it is not finite" if found.num_target_tokens else "no sample can be used"))
        if self._writer is not None:
            self._writer.write_validation(found)

    def report_score(self, found: ScoreMetrics, benchmark: str) -> None:
        """Report the score of the model's answers to ``benchmark``."""
        if self._writer is not None:
            self._writer.write_score(found, benchmark)

    def close(self, iteration: int, how: str) -> None:
        """Close the files; ``how`` the run ends goes to the run's file."""
        if self._writer is not None:
            self._writer.close({"at": _now(), "iteration": iteration, "how": how})


def _now() -> str:
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"


def _ran_on(run: Run, setup: Setup) -> dict[str, Any]:
    """Device, versions and kernels of this rank, for the run's file."""
    vision, language, tp_size = run.model.vision, run.model.language, run.tp_size
    towers = {"vision": (vision.num_attention_heads, vision.num_attention_heads, vision.head_dim, False),
              "language": (language.num_attention_heads, language.num_query_groups, language.kv_channels, True)}
    device, dtype = setup.stage.device, setup.stage.config.params_dtype
    sdpa = {name: sdpa_backend(device, dtype, heads // tp_size, kv_heads // tp_size, head_dim, causal)
            for name, (heads, kv_heads, head_dim, causal) in towers.items()}
    adam = next((one.optimizer for one in setup.optimizer.chained_optimizers), None)
    return {**device_facts(device, adam), "sdpa": sdpa, "clips_in_adam": clips_in_adam(setup.optimizer, device)}


class MetricsWriter:
    """Prints and stores the metrics of a run; only one rank has a writer."""

    def __init__(self, args: Arguments, resolved: Mapping[str, Any], first_iteration: int,
                 say: Callable[[str], None] = print) -> None:
        """Open the files in ``args.log_dir``; a resumed run drops the rows of iterations that it will repeat, and a new
        run moves an earlier run's file aside.

        This and the other methods raise UserError naming a file that cannot be written.
        """
        self._args, self._say = args, say
        self._since_line: list[StepMetrics] = []
        self._step_seconds: deque[float] = deque(maxlen=_NUM_TIMED)
        directory = Path(args.log_dir)
        self._facts, self._facts_path, self._path = resolved, directory / FACTS_FILE, directory / METRICS_FILE
        self._lines_path = directory / "train.log"
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
            line = log_line(self._since_line, args.train_iters, args.log_tps, args.log_throughput, left)
            if args.log_style == "short":
                with writing(self._lines_path, _FLAG), open(self._lines_path, "a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
                line = short_line(self._since_line, args.train_iters, left)
            print(line, flush=True)
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


def _facts_text(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, indent=2) + "\n"


def _keep_before(path: Path, iteration: int) -> None:
    """Keep the rows up to ``iteration`` in a resumed run's file; a new run (iteration 0) moves the file aside.  The
    file is replaced atomically."""
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


# The lines of the log


def score_line(found: ScoreMetrics, benchmark: str) -> str:
    """The log line of a score, like ``validation_line``."""
    return (f" validation score at iteration {found.iteration} | {benchmark}: {found.validation_score_percent:.2f}% | "
            f"questions: {found.num_questions} | truncated answers: {found.num_truncated_answers} | "
            f"elapsed time (ms): {1000 * found.answer_seconds:.1f} |")


def validation_line(found: ValidationMetrics) -> str:
    """The log line of a validation, in Megatron's format."""
    loss = math.nan if found.validation_loss is None else found.validation_loss
    best = "none" if found.best_validation_loss is None else (
        f"{found.best_validation_loss:.6E} at iteration {found.best_iteration}")
    return (f" validation loss at iteration {found.iteration} | loss value: {loss:.6E} | "
            f"loss PPL: {math.exp(min(loss, _MAX_EXPONENT)):.6E} | best: {best} | samples: {found.num_samples} | "
            f"target tokens: {found.num_target_tokens} | elapsed time (ms): {1000 * found.validation_seconds:.1f} |")


def log_line(
    steps: Sequence[StepMetrics], train_iters: int, log_tps: bool, log_throughput: bool,
    seconds_left: float | None = None,
) -> str:
    """The log line of a step, in MindSpeed-MM's format: the last of ``steps``, with time and loss averaged over all.
    Field 5 between colons must begin with the elapsed time; the timestamp's two colons count."""
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


def short_line(steps: Sequence[StepMetrics], train_iters: int, seconds_left: float) -> str:
    """The line of ``--log-style short``: at most 120 columns; loss and speed are means over ``steps``."""
    step, loss = steps[-1], fmean([one.loss for one in steps if math.isfinite(one.loss)] or [math.nan])
    skipped = sum(not one.updated for one in steps)
    fields = [
        f"step {step.iteration}/{train_iters}", f"loss {loss:.4f}", f"grad norm {step.grad_norm:.3g}",
        f"lr {step.lr:.3g}", f"{fmean(one.tokens_per_second_per_device for one in steps):,.0f} tokens/s/device",
        *([f"{step.max_memory_bytes / 2**30:.1f} GiB"] if step.max_memory_bytes else []),
        *([] if step.epoch is None else [f"epoch {step.epoch:.2f}"]), f"{duration(seconds_left)} left",
        *([f"{skipped} skipped"] if skipped else []),
    ]  # fmt: skip
    return " | ".join(fields)


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
