"""Measures steps: how each rank spends them, and what --log-timers, --profile-pipeline (a timeline) and --profile
(torch's profiler) request.

Steps that none of these flags selects are measured only for ``PaceMeter``, and with one rank not at all.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mm.batch import BatchTotals, StepPlan
from mm.config.flags import Arguments
from mm.device.device import Device
from mm.errors import writing
from mm.model.stage import Stage
from mm.parallel.activity import Activity
from mm.parallel.agreement import gather, on_first
from mm.parallel.mesh import Mesh
from mm.timeline.files import write_timeline
from mm.timeline.spans import (
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
)
from mm.training.pace import PaceMeter
from mm.training.slow_ranks import ComparedRanks, SlowRankNotes, compare, most_of_stages

_NUM_MEETINGS = 10
"""Number of barriers to compare the ranks' clocks; the two passed fastest determine the offset."""


class Recorder:
    """A listener that records when activities begin and end, on the device's clock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marks: list[tuple[Any, Activity | None]] = []

    def begin(self, activity: Activity) -> None:
        self._marks.append((self._device.runtime.mark(), activity))

    def end(self, activity: Activity) -> None:
        self._marks.append((self._device.runtime.mark(), None))

    def spans(self) -> tuple[ActivitySpan, ...]:
        """Wait for the device, return the recorded spans and clear them."""
        seconds = self._device.runtime.seconds_of([mark for mark, _ in self._marks])
        moments = [Moment(when, activity) for when, (_, activity) in zip(seconds, self._marks, strict=True)]
        self._marks.clear()
        return flat_spans(moments)


class StepObserver:
    """Measures the steps ``first`` to ``last`` of a run: their time, and what the profiling flags request."""

    def __init__(
        self, args: Arguments, stage: Stage, mesh: Mesh, first: int, last: int, say: Callable[[str], None]
    ) -> None:
        """``say`` reports the files that are written, and those that were requested but will not be."""
        self._args, self._stage, self._mesh, self._say = args, stage, mesh, say
        self._began = 0.0
        """Start of the step on the host's clock, shifted by the time it was paused."""
        self._meter = PaceMeter(mesh, stage.device) if mesh.world_size > 1 else None
        self._slow_notes = self._meter and SlowRankNotes(self._meter.places, args.slow_rank_share)
        self._recorder = Recorder(stage.device)
        self._spans: tuple[ActivitySpan, ...] = ()
        self._profiler: Any = None
        self._last, self._done = last, first - 1
        """The last step to measure, and the latest that has ended."""
        window = range(max(first, args.profile_step_start), min(last + 1, args.profile_step_end))
        self._window = window if args.profile else range(0)
        if args.profile_pipeline is not None and not first <= args.profile_pipeline <= last:
            say(f"note: --profile-pipeline {args.profile_pipeline} is not an iteration of this run ({first} to "
                f"{last}): no timeline is written")
        if args.profile and not self._window:
            say(f"note: --profile is for iterations {args.profile_step_start} to {args.profile_step_end - 1}, but this "
                f"run has {first} to {last}: nothing is profiled")

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Start the clock; the body runs the steps.  If it ends before the last, finish what that cuts short."""
        self._began = time.perf_counter()
        meters = [] if self._meter is None else [self._meter]
        self._stage.journal.listeners.extend(meters)
        yield
        for meter in meters:
            self._stage.journal.listeners.remove(meter)
        self._finish()

    def _finish(self) -> None:
        """Write a profile that has begun and not ended; note what was requested for steps that the run has not
        reached."""
        done, timeline = self._done, self._args.profile_pipeline
        if self._window and self._window[0] <= done < self._window[-1]:
            self._write_profile(done)
        if self._window and done < self._window[0]:
            self._say(f"note: the run ended after iteration {done}, before {self._window[0]}, the first that "
                      f"--profile selects: nothing is profiled")
        if timeline is not None and done < timeline <= self._last:
            self._say(f"note: the run ended after iteration {done}, before --profile-pipeline {timeline}: no timeline "
                      f"is written")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside from the steps."""
        started = time.perf_counter()
        with self._paused_meter():
            yield
        self._began += time.perf_counter() - started

    def begin(self, iteration: int) -> None:
        """Start recording or profiling if a flag selects this step; call it before the step."""
        args = self._args
        if args.log_timers or iteration == args.profile_pipeline:
            self._stage.journal.listeners.append(self._recorder)
        if self._window and iteration == self._window[0] and self._mesh.rank in args.profile_ranks:
            self._profiler = self._stage.device.platform.profiler(self._profile_path, f"rank{self._mesh.rank}")
            self._profiler.start()

    def end(self, own_data_seconds: float) -> tuple[float, Mapping[str, float] | None]:
        """Call after a step, on every rank; return its seconds, and with --log-timers the seconds by kind of work.

        ``own_data_seconds``: how long this rank waited for samples that it reads itself.
        The seconds of a kind of work are the maximum over ranks.  A step ends when the host has read its gradient norm;
        Adam, still running, counts towards the next step.
        """
        ended = time.perf_counter()
        seconds, self._began = ended - self._began, ended
        if self._meter is not None:
            self._meter.end_step(own_data_seconds)
        with self._paused_meter():
            return seconds, self._timers()

    def compared(self, iteration: int) -> ComparedRanks:
        """Compare the ranks after a step with a log line; empty after other steps, and if there is nothing to compare.

        Every rank calls it between steps.
        """
        if iteration % self._args.log_interval:
            return ComparedRanks()
        if self._meter is None or self._slow_notes is None:
            return ComparedRanks(stage_memory_bytes=(self._stage.device.runtime.max_memory_bytes(),))
        pace = self._meter.gather()
        if pace is None:
            return ComparedRanks()
        places = self._meter.places
        return ComparedRanks(compare(places, pace.own_seconds), pace.num_steps, self._slow_notes.after(pace),
                             most_of_stages(places, self._meter.peak_bytes))

    def _paused_meter(self) -> AbstractContextManager[None]:
        return nullcontext() if self._meter is None else self._meter.paused()

    def _timers(self) -> Mapping[str, float] | None:
        if self._recorder not in self._stage.journal.listeners:
            return None
        self._stage.journal.listeners.remove(self._recorder)
        self._spans = self._recorder.spans()
        if not self._args.log_timers:
            return None
        seconds = torch.tensor([seconds_of(self._spans, {work}) for work in TIMED], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self._mesh.control_group)
        return {seconds_key(work): most for work, most in zip(TIMED, seconds.tolist(), strict=True)}

    def write(self, iteration: int, plan: StepPlan) -> None:
        """On every rank: write the timeline or profile that ends with this step of ``plan``."""
        if iteration == self._args.profile_pipeline:
            self._say(f"wrote {self._write_timeline(iteration, plan)}, .json and .svg")
        if self._window and iteration == self._window[-1]:
            self._write_profile(iteration)
        self._done = iteration

    def _write_profile(self, iteration: int) -> None:
        if self._profiler is not None:
            flag = "--profile-save-path" if self._args.profile_save_path else "--log-dir"
            with writing(self._profile_path, flag):
                self._profiler.stop()
        self._say(f"wrote profiles of iterations {self._window[0]} to {iteration} to {self._profile_path}")

    @property
    def _profile_path(self) -> str:
        return self._args.profile_save_path or str(Path(self._args.log_dir) / "profile")

    def _write_timeline(self, iteration: int, plan: StepPlan) -> Path:
        mesh, model, args = self._mesh, self._stage.model, self._args
        counts = tuple(BatchTotals.of([one], model.vision) for one in plan.microbatches)
        record = RankRecord(
            mesh.rank, mesh.pp_rank, mesh.dp_rank, mesh.tp_rank, held(chunk.spec for chunk in self._stage.chunks),
            _meet(mesh.control_group), self._spans, counts)
        records = gather(mesh, record)
        settings = StepSettings.of(args, model, mesh.world_size)
        return on_first(mesh, lambda: write_timeline(
            args.log_dir, "--log-dir", [StepTimeline(iteration, tuple(aligned(records)), settings)]))


def _meet(group: dist.ProcessGroup, clock: Callable[[], float] = time.perf_counter) -> Meetings:
    """Pass barriers with the ranks of ``group``; returns when this rank came to each and when it left."""
    meetings: list[tuple[float, float]] = []
    for _ in range(_NUM_MEETINGS):
        came = clock()
        dist.barrier(group=group)
        meetings.append((came, clock()))
    return tuple(meetings)
