"""Trains under faults, and compares every loss and weight with an undisturbed run.

    python -m benchmarks.soak [--minutes 10] [--seed 0] [--only EVENT ...] [--output FILE.json]

The same command is started again and again: real ranks under ``mm.launch``, with real data workers, background saves,
validation, a video, and two samples that cannot be used.  Each launch but the last of a run is disturbed by one event
at a random moment, from the start of Python to the export: signals, kills, a stopped process, a full or a slow disk, a
clock that jumps by a day.  Runs have one layout, or another one in each launch.

Reported for each kind of event: how often, the seconds from the event to the end of the last process (median and most;
after "then", from the signal), the statuses of the launcher, and what was left: processes, files.  A complete run of
one layout must equal one that nothing disturbed, to the bit: its metrics, weights, optimizer state and samples left
out.  Under changing layouts, losses must be equal to rounding.  Before, long launches without faults (``--steps``) show
whether the memory of their processes grows.  The exit status is 1 if anything is wrong.

The file is written after each launch, so an interrupted soak leaves what it has found.  The disk needs root and
``unshare``, its speed control groups of version 1, the clock gcc; events that the machine cannot have are left out,
with a note.
"""

import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.job import Job
from benchmarks.measure import command, report, versions
from benchmarks.soak import memory
from benchmarks.soak.events import EVENTS, Counted, Launch, left_out
from benchmarks.soak.machine import ShiftedClock, SmallDisk, has_own_mounts, with_own_mounts
from benchmarks.soak.runs import CHANGING, LAYOUTS, Run, differences, left, loss_error, write_all_inputs

LEFT_SECONDS = 5.0
"""A process that is alive this long after the launcher has ended is left."""
_SHARED = Path("/dev/shm")
_OTHERS = ("wandb-media", "wandb-artifacts")
"""Temporary folders that wandb makes when megatron imports it, and removes at a usual exit only."""


class Soak:
    """Launches, one after the other, and what they showed."""

    def __init__(
        self, inputs: Path, disk: SmallDisk, clock: ShiftedClock, seed: int, limit: int, output: Path | None
    ) -> None:
        """``limit``: seconds, of each step and phase."""
        self._inputs, self._disk, self._clock, self._limit, self._output = inputs, disk, clock, limit, output
        self._rng = random.Random(seed)
        self._events: dict[str, Counted] = defaultdict(Counted)
        self._job: Job | None = None
        self._seconds: dict[str, float] = {}
        """Seconds of an undisturbed launch, by layout."""
        self.found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "versions": versions(), "seed": seed,
                                      "limit_seconds": limit, "is_complete": False, "launches": 0, "complete_runs": 0,
                                      "problems": []}

    def watch_memory(self, num_steps: int) -> None:
        """One long launch of each of two layouts."""
        self.found["memory"] = {}
        for layout in ("PP 2", "DP 2"):
            run = self._run(f"{layout} memory", layout)
            launch = self._launch(run, 0, run.words(0, num_steps, "--log-interval", "10"), memory.ENVIRONMENT)
            watch = memory.MemoryWatch(launch.job, run.logs / "metrics.jsonl")
            self._check_end(launch, watch.wait())
            self.found["memory"][layout] = found = watch.to_json()
            self.found["problems"] += [f"{layout}, {problem}" for problem in memory.problems_of(found)]
            self._finish(run)

    def run_undisturbed(self) -> None:
        for layout in LAYOUTS:
            run, began = self._run(f"{layout} whole", layout), time.monotonic()
            launch = self._launch(run, 0)
            self._check_end(launch, launch.job.wait())
            if self.found["problems"]:
                raise SystemExit("\n".join(self.found["problems"]))
            self._seconds[layout] = time.monotonic() - began
        runs = [self._run(f"{layout} whole", layout) for layout in LAYOUTS]
        self.found["loss_error_between_layouts"] = max(loss_error(run, runs[0]) for run in runs[1:])

    def run_disturbed(self, seconds: float, events: Sequence[str]) -> None:
        """Runs, each disturbed three times, as long as ``seconds`` have not passed."""
        began, waiting, number = time.monotonic(), list[str](), 0
        while time.monotonic() < began + seconds:
            run, number = self._run(f"run {number}", [*LAYOUTS, CHANGING][number % (len(LAYOUTS) + 1)]), number + 1
            for count in range(3):
                waiting = waiting or self._rng.sample(list(events), len(events))
                event = waiting.pop()
                self._disturb(self._launch(run, count), event)
                self.found["minutes"] = round((time.monotonic() - began) / 60, 1)
                print(f"{time.strftime('%H:%M:%S')} {run.name} ({run.layout_of(count)}): {event}, "
                      f"{self._events[event].statuses[-1:]}", file=sys.stderr, flush=True)
            launch = self._launch(run, 3)
            if self._check_end(launch, launch.job.wait()):
                whole = self._run(f"{run.layout_of(3)} whole", run.layout_of(3))
                self.found["problems"] += differences(run, whole)
                if run.layout == CHANGING:
                    error = loss_error(run, whole)
                    self.found["loss_error_changing"] = max(error, self.found.get("loss_error_changing", 0.0))
                self.found["complete_runs"] += 1
            self._finish(run)

    def close(self) -> None:
        """End what is running, and write what was found."""
        for process in self._job.processes() if self._job is not None else ():
            with suppress(ProcessLookupError):
                process.kill()
        self._write()

    def _run(self, name: str, layout: str) -> Run:
        return Run(self._inputs, self._disk.folder, name, layout, self._limit)

    def _launch(
        self, run: Run, number: int, words: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
    ) -> Launch:
        layout, count = run.layout_of(number), self.found["launches"]
        temporary, output = self._inputs / f"tmp{count}", self._inputs / f"launch_{count}.log"
        temporary.mkdir()
        words, num_ranks = words or run.words(number), LAYOUTS[layout][1]
        self._job = job = Job(words, num_ranks, output, environment={
            "TMPDIR": str(temporary), **self._clock.environment, **(environment or {})})
        self._disk.serve(job.launcher.pid)
        self.found["launches"] += 1
        return Launch(run, layout, job, output, temporary, self._disk, self._clock, self._rng, run.latest())

    def _disturb(self, launch: Launch, name: str) -> None:
        """Send the event at a random moment, and wait for the end of all processes."""
        event, counted, job = EVENTS[name], self._events[name], launch.job
        until = time.monotonic() + self._rng.uniform(0, self._seconds[launch.layout])
        while job.launcher.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        if job.launcher.poll() is not None:
            self._check_end(launch, job.wait())
            return
        event.begin(launch)
        sent = time.monotonic()
        try:
            status = job.wait()
        except psutil.TimeoutExpired:
            self.found["problems"].append(f"{launch.run.name} ({launch.layout}): {name}: does not end\n"
                                          f"{described(job)}\n{launch.output.read_text()[-4000:]}")
            self._write()
            raise
        num_left = self._num_left(launch, event.is_kill, counted)
        counted.seconds.append(time.monotonic() - sent)
        counted.statuses.append(status)
        counted.num_left += num_left
        if num_left:
            self.found["problems"].append(f"{launch.run.name}: {name}: {num_left} processes left")
        self.found["problems"] += event.after(launch, status)
        self._write()

    def _check_end(self, launch: Launch, status: int) -> bool:
        """For a launch that nothing has disturbed: whether it has succeeded."""
        if status:
            self.found["problems"].append(
                f"{launch.run.name} ({launch.layout}): an undisturbed launch ended with {status}:\n"
                f"{launch.output.read_text()[-3000:]}")
        self._num_left(launch, False, Counted())
        if not status and (files := left(launch.run)):
            self.found["problems"].append(f"{launch.run.name}: files left: {files}")
        self._write()
        return not status

    def _num_left(self, launch: Launch, is_kill: bool, counted: Counted) -> int:
        """Wait for the end of all processes, kill those that are left, and look for temporary files."""
        until = time.monotonic() + LEFT_SECONDS
        while (processes := launch.job.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        for process in processes:
            process.kill()
        files = [path.name for path in launch.temporary.iterdir()]
        shared = [path.name for path in _SHARED.iterdir()] if has_own_mounts() else []
        counted.files_left |= {re.sub(r"[0-9a-z_]{8}(?=wandb|$)", "*", name) for name in (*files, *shared)}
        files = [name for name in files if not name.endswith(_OTHERS)]
        if (files or shared) and not is_kill:
            self.found["problems"].append(f"{launch.run.name}: temporary files left: {files + shared}")
        for path in shared:
            (_SHARED / path).unlink()
        shutil.rmtree(launch.temporary)
        return len(processes)

    def _finish(self, run: Run) -> None:
        """Remove what it saved: the disk is small."""
        if run.save.parent.exists():  # else no launch got that far
            shutil.rmtree(run.save.parent)

    def _write(self) -> None:
        self.found["events"] = {event: counted.to_json() for event, counted in sorted(self._events.items())
                                if counted.seconds}
        report(self.found, self._output, prints=False)


def described(job: Job) -> str:
    """What the processes of a launch are doing: their parents, states, kernel functions, and command lines."""
    lines = []
    for process in job.processes():
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            waits = [f"{thread.name}: {(thread / 'wchan').read_text()}" for thread in
                     Path(f"/proc/{process.pid}/task").iterdir()]  # fmt: skip
            lines.append(f"{process.pid} of {process.ppid()}, {process.status()}: {' '.join(process.cmdline())[:150]}\n"
                         f"  {', '.join(waits)}")
    return "\n".join(lines)


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=EVENTS, default=list(EVENTS), metavar="EVENT",
                        help=f"of {', '.join(EVENTS)}")
    parser.add_argument("--steps", type=int, default=memory.NUM_STEPS, help=(
        f"of each launch whose memory is watched; its first {memory.WARM_UP_STEPS} are the warm-up; 0 = none"))
    parser.add_argument("--limit", type=int, default=20, help=(
        "seconds for each step and phase; a busy machine needs more than %(default)s"))
    parser.add_argument("--keep", type=Path, help="directory for all files, which are then kept")
    flags = parser.parse_args()
    with_own_mounts()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        inputs = flags.keep or Path(folder)
        inputs.mkdir(parents=True, exist_ok=True)
        with SmallDisk(inputs / "disk") as disk:
            clock = ShiftedClock(inputs)
            missing = left_out(disk, clock)
            for event, why in missing.items():
                print(f"note: {event} is left out: {why}", file=sys.stderr)
            soak = Soak(write_all_inputs(inputs), disk, clock, flags.seed, flags.limit, flags.output)
            try:
                if flags.steps:
                    soak.watch_memory(flags.steps)
                soak.run_undisturbed()
                soak.run_disturbed(60 * flags.minutes, [event for event in flags.only if event not in missing])
                soak.found["is_complete"] = True
            finally:
                soak.close()
    report(soak.found, None)
    return int(bool(soak.found["problems"]))


if __name__ == "__main__":
    sys.exit(main())
