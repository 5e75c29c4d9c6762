"""What watches a run: the loop tells each watcher of every step, and a feature is one class.

Here are --log-timers, --profile-pipeline (a timeline) and --profile (torch's profiler); ``step_timing.py`` names slow
ranks.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mm.batch import BatchTotals, StepPlan
from mm.config.args import Arguments
from mm.device.device import Device
from mm.errors import writing
from mm.model.stage import Stage
from mm.parallel.activity import Activity, Journal
from mm.parallel.agreement import gather, on_first
from mm.parallel.mesh import Mesh
from mm.run.progress import Say, StepResult, TrainingProgress
from mm.timeline import (
    TIMED,
    ActivitySpan,
    Meetings,
    Moment,
    RankRecord,
    StepSettings,
    StepTimeline,
    aligned,
    flat_spans,
    held,
    seconds_key,
    seconds_of,
    write_timeline,
)

_NUM_MEETINGS = 10
"""Number of barriers to compare the ranks' clocks; the two passed fastest determine the offset."""


@dataclass
class Step:
    """A step that has ended; watchers add what they measure."""

    progress: TrainingProgress
    plan: StepPlan
    result: StepResult
    epoch: float
    seconds: float
    """Time since the step before ended, without pauses.  A step ends when the host has read its gradient norm; Adam,
    still running, counts towards the next step."""
    own_data_seconds: float
    """How long the host waited for samples that this rank reads itself."""
    measured: dict[str, Any] = field(default_factory=dict)
    """Fields of ``StepMetrics``."""
    lines: list[str] = field(default_factory=list)
    """To be printed after the log line."""


class Watcher:
    """What watches a run; every rank calls these methods together.  By default they do nothing."""

    def before(self, iteration: int) -> None:
        """The step begins."""

    def after(self, step: Step) -> None:
        """The step has ended, and the run pauses."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The body is not part of a step, such as a save or a validation."""
        yield

    def close(self, done: int) -> None:
        """The run has ended after iteration ``done``, without an error."""


class Watch:
    """Measures the time of the steps, and tells all watchers of them."""

    def __init__(self, watchers: Sequence[Watcher], journal: Journal, listeners: Sequence[Any]) -> None:
        """``listeners``: those of ``watchers`` that follow every step's activities."""
        self._watchers, self._journal, self._listeners = watchers, journal, listeners
        self._began = 0.0
        """When the step began on the host's clock, later by the time in which it was paused."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The body runs the steps."""
        self._began = time.perf_counter()
        self._journal.listeners.extend(self._listeners)
        yield
        for listener in self._listeners:
            self._journal.listeners.remove(listener)

    def before(self, iteration: int) -> None:
        for watcher in self._watchers:
            watcher.before(iteration)

    def after(
        self, progress: TrainingProgress, plan: StepPlan, result: StepResult, epoch: float, own_data_seconds: float
    ) -> Step:
        """The step, as all watchers have measured it."""
        ended = time.perf_counter()
        step = Step(progress, plan, result, epoch, ended - self._began, own_data_seconds)
        self._began = ended
        with self.paused():
            for watcher in self._watchers:
                watcher.after(step)
        return step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside from the steps."""
        started = time.perf_counter()
        with ExitStack() as stack:
            for watcher in self._watchers:
                stack.enter_context(watcher.paused())
            yield
        self._began += time.perf_counter() - started

    def close(self, done: int) -> None:
        for watcher in self._watchers:
            watcher.close(done)


class Recorder:
    """A listener that records when activities begin and end, on the device's clock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: list[tuple[Any, Activity | None]] = []

    def begin(self, activity: Activity) -> None:
        self._events.append((self._device.runtime.record_event(), activity))

    def end(self, activity: Activity) -> None:
        self._events.append((self._device.runtime.record_event(), None))

    def spans(self) -> tuple[ActivitySpan, ...]:
        """Wait for the device, return the recorded spans and clear them."""
        seconds = self._device.runtime.seconds_of([event for event, _ in self._events])
        moments = [Moment(when, activity) for when, (_, activity) in zip(seconds, self._events, strict=True)]
        self._events.clear()
        return flat_spans(moments)


class Timers(Watcher):
    """``--log-timers``: the seconds of each kind of work, of the slowest rank; ``--profile-pipeline``: a timeline."""

    def __init__(self, args: Arguments, stage: Stage, mesh: Mesh, say: Say) -> None:
        self._args, self._stage, self._mesh, self._say = args, stage, mesh, say
        self._recorder = Recorder(stage.device)

    def before(self, iteration: int) -> None:
        if self._args.log_timers or iteration == self._args.profile_pipeline:
            self._stage.journal.listeners.append(self._recorder)

    def after(self, step: Step) -> None:
        if self._recorder not in self._stage.journal.listeners:
            return
        self._stage.journal.listeners.remove(self._recorder)
        spans = self._recorder.spans()
        if self._args.log_timers:
            seconds = torch.tensor([seconds_of(spans, {work}) for work in TIMED], dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self._mesh.control_group)
            step.measured["timers"] = {
                seconds_key(work): most for work, most in zip(TIMED, seconds.tolist(), strict=True)}
        if step.progress.iteration == self._args.profile_pipeline:
            self._say(f"wrote {self._write_timeline(step, spans)}, .json and .svg")

    def close(self, done: int) -> None:
        wanted = self._args.profile_pipeline
        if wanted is not None and done < wanted:
            self._say(f"note: the run ended after iteration {done}, before --profile-pipeline {wanted}: no timeline is "
                      f"written")

    def _write_timeline(self, step: Step, spans: tuple[ActivitySpan, ...]) -> Path:
        mesh, model, args = self._mesh, self._stage.model, self._args
        counts = tuple(BatchTotals.of([one], model.vision) for one in step.plan.microbatches)
        record = RankRecord(
            mesh.rank, mesh.pp_rank, mesh.dp_rank, mesh.tp_rank, held(chunk.spec for chunk in self._stage.chunks),
            _meet(mesh.control_group), spans, counts)
        records = gather(mesh, record)
        settings = StepSettings.of(args, model, mesh.world_size)
        return on_first(mesh, lambda: write_timeline(
            args.log_dir, "--log-dir", [StepTimeline(step.progress.iteration, tuple(aligned(records)), settings)]))


class Profile(Watcher):
    """``--profile``: torch's profiler, for some steps on some ranks."""

    def __init__(self, args: Arguments, device: Device, rank: int, first: int, last: int, say: Say) -> None:
        """``first`` and ``last``: the steps of this launch."""
        self._device, self._rank, self._is_chosen, self._say = device, rank, rank in args.profile_ranks, say
        self._window = range(max(first, args.profile_step_start), min(last + 1, args.profile_step_end))
        self._path = args.profile_save_path or str(Path(args.log_dir) / "profile")
        self._flag = "--profile-save-path" if args.profile_save_path else "--log-dir"
        self._profiler: Any = None
        self._is_running = False

    def before(self, iteration: int) -> None:
        if self._window and iteration == self._window[0]:
            self._is_running = True
            if self._is_chosen:
                self._profiler = self._device.platform.profiler(self._path, f"rank{self._rank}")
                self._profiler.start()

    def after(self, step: Step) -> None:
        if self._window and step.progress.iteration == self._window[-1]:
            self._write(step.progress.iteration)

    def close(self, done: int) -> None:
        if self._is_running:
            self._write(done)
        elif not self._window or done < self._window[0]:
            self._say(f"note: the run ended after iteration {done}, before the steps that --profile selects: nothing "
                      f"is profiled")

    def _write(self, iteration: int) -> None:
        self._is_running = False
        if self._profiler is not None:
            with writing(self._path, self._flag):
                self._profiler.stop()
        self._say(f"wrote profiles of iterations {self._window[0]} to {iteration} to {self._path}")


def _meet(group: dist.ProcessGroup) -> Meetings:
    """Pass barriers with the ranks of ``group``; returns when this rank came to each and when it left."""
    meetings: list[tuple[float, float]] = []
    for _ in range(_NUM_MEETINGS):
        came = time.perf_counter()
        dist.barrier(group=group)
        meetings.append((came, time.perf_counter()))
    return tuple(meetings)
