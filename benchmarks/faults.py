"""Kills, stops and signals real runs at random moments, and compares every loss and weight with an undisturbed run.

    python -m benchmarks.faults [--minutes 10] [--seed 0] [--only EVENT ...] [--layouts LAYOUT ...] [--output FILE.json]

The same command is started again and again: real ranks under ``mm.launch``, with data workers, background saves,
validation, a video and two samples that cannot be used.  Each launch but the last of a run is disturbed by one event at
a random moment, from the start of Python to the export.  A complete run must equal one that nothing disturbed, to the
bit: metrics, weights, optimizer state, export, and the samples that were left out.  No process and no temporary file
may be left.  With ``--steps``, a long run without faults first shows whether the memory of its processes grows.

Reported for each event: how often, the seconds until the last process has ended, and the statuses of the launcher.
The exit status is 1 if anything is wrong; the file is written after each launch.
"""

import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import command, report, versions
from mm.process import free_port
from tests.data.clips import even, write_clip
from tests.files import ROOT, json_lines
from tests.tiny_inputs import flags_of, write_inputs

NUM_STEPS = 60
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "PP 2": (2, ()),
    "DP 2": (1, ("--use-distributed-optimizer",)),
    "TP 2": (1, ("--tensor-model-parallel-size", "2")),
}
"""Stages and flags; each has two ranks."""
EVENTS = {
    "SIGKILL to a rank": (signal.SIGKILL, "rank"),
    "SIGKILL to the launcher": (signal.SIGKILL, "launcher"),
    "SIGKILL to a data worker": (signal.SIGKILL, "worker"),
    "SIGSTOP to a rank": (signal.SIGSTOP, "rank"),
    "SIGTERM to the launcher": (signal.SIGTERM, "launcher"),
    "SIGTERM to a rank": (signal.SIGTERM, "rank"),
    "SIGUSR1 to the launcher": (signal.SIGUSR1, "launcher"),
}
COMPARED = ("iteration", "loss", "grad_norm", "lr", "consumed_samples", "num_tokens", "num_images", "validation_loss")
LEFT_SECONDS = 5.0
"""A process that is alive this long after the launcher has ended is left."""
WINDOW_STEPS = 100
MOST_MIB_PER_WINDOW = 0.1
"""Growth of a process in the median window of a long run, after the first ten windows."""
_MARK = "MM_FAULTS_LAUNCH"
"""Environment variable that all processes of a launch inherit."""
_PHASES = ("check", "start", "load", "data", "save", "export", "between")


class Launch:
    """One launch of a training as a user makes it, with all its processes."""

    def __init__(self, words: Sequence[str], output: Path) -> None:
        self.mark, self.output = f"{os.getpid()}-{time.monotonic_ns()}", output
        environment = os.environ | {_MARK: self.mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                                    "MALLOC_ARENA_MAX": "1"}  # with one heap, growth is not hidden by the others
        launcher = [sys.executable, "-m", "mm.launch", "--nproc_per_node", "2", "--master_addr", "localhost",
                    "--master_port", str(free_port()), "-m", "mm.train"]
        with output.open("w") as file:
            self.launcher = psutil.Popen([*launcher, *words], cwd=ROOT, env=environment, stdout=file, stderr=file)

    def processes(self, kind: str = "") -> list[psutil.Process]:
        """Living processes of this launch, or those of one kind: launcher, rank, worker."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    words = " ".join(process.cmdline())
                    own = "launcher" if "mm.launch" in words else "rank" if "-m mm.train" in words else "worker"
                    found += [process] if kind in ("", own) else []
        return found

    def send(self, number: int, kind: str, rng: random.Random) -> None:
        """Send a signal to one process of a kind; to the launcher where there is none yet."""
        chosen = sorted(self.processes(kind), key=lambda one: one.pid)
        while number == signal.SIGSTOP and not chosen and self.launcher.poll() is None:  # nothing ends its launcher
            time.sleep(0.01)
            chosen = sorted(self.processes(kind), key=lambda one: one.pid)
        with suppress(psutil.NoSuchProcess):  # it has just ended
            (rng.choice(chosen) if chosen else self.launcher).send_signal(number)

    def end(self) -> tuple[int, float, list[str]]:
        """Wait for the end: the launcher's status, seconds until the last process, and what had to be killed."""
        began = time.monotonic()
        try:
            status = self.launcher.wait(300)
        except psutil.TimeoutExpired:
            status = 1
        until = time.monotonic() + LEFT_SECONDS
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        seconds, names = time.monotonic() - began, [" ".join(one.cmdline())[:200] for one in left]
        for process in left:
            process.kill()
        return status, seconds, names


class Faults:
    """Launches, one after the other, and what they showed."""

    def __init__(self, folder: Path, seed: int, limit: int, output: Path | None) -> None:
        """``limit``: seconds for each step and phase."""
        self._folder, self._limit, self._output, self._rng = folder, limit, output, random.Random(seed)
        self._seconds: dict[str, float] = {}
        self._events: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self.found: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"), "versions": versions(), "seed": seed, "limit_seconds": limit,
            "launches": 0, "complete_runs": 0, "problems": [],
        }  # fmt: skip

    def launch(self, name: str, layout: str, num_steps: int = NUM_STEPS) -> Launch:
        num_stages, flags = LAYOUTS[layout]
        words = flags_of(
            self._folder, name, num_stages, "--num-workers", "1", "--train-iters", str(num_steps), "--load",
            str(self._folder / "hf"), "--deterministic-mode", "--async-save", "--save-interval", "10",
            "--keep-last-checkpoints", "2", "--export-hf", str(self._folder / name / "hf"), "--eval-interval", "20",
            "--bad-sample", "skip", "--max-bad-fraction", "0.3", "--check-weights-interval", "20", "--step-timeout",
            str(self._limit), "--distributed-timeout-minutes", "1", "--phase-timeouts",
            *(f"{phase}={self._limit}" for phase in _PHASES), *flags,
        )  # fmt: skip
        self.found["launches"] += 1
        return Launch(words, self._folder / f"launch_{self.found['launches']}.log")

    def run_undisturbed(self, layout: str) -> None:
        """The run that the others are compared with."""
        began = time.monotonic()
        self._complete(self.launch(f"{layout} whole", layout))
        self._seconds[layout] = time.monotonic() - began

    def disturb(self, name: str, layout: str, event: str) -> None:
        """One launch with one event at a random moment."""
        launch = self.launch(name, layout)
        with suppress(psutil.TimeoutExpired):
            launch.launcher.wait(self._rng.uniform(0, self._seconds[layout]))
            self._complete(launch)
            return
        number, kind = EVENTS[event]
        launch.send(number, kind, self._rng)
        status, seconds, left = launch.end()
        self._events[event].append((status, seconds))
        if left:
            self.found["problems"].append(f"{name}: {event}: processes left: {left}")
        stops = number in (signal.SIGTERM, signal.SIGUSR1)
        if stops and status not in (0, 128 + number, -number):  # the last: before the launcher handles signals
            self.found["problems"].append(f"{name}: {event}: status {status}\n{launch.output.read_text()[-3000:]}")
        self.note()

    def complete(self, name: str, layout: str) -> None:
        """The last launch of a run, and its comparison."""
        if self._complete(self.launch(name, layout)):
            self.found["problems"] += differences(self._folder / name, self._folder / f"{layout} whole")
            self.found["complete_runs"] += 1
        shutil.rmtree(self._folder / name)
        self.note()

    def watch_memory(self, layout: str, num_steps: int) -> None:
        """One long launch: MiB that each process grows per 100 steps."""
        name, samples = f"{layout} memory", defaultdict[str, list[tuple[int, float]]](list)
        launch = self.launch(name, layout, num_steps)
        while launch.launcher.poll() is None:
            time.sleep(1.0)
            rows = json_lines(path) if (path := self._folder / name / "logs" / "metrics.jsonl").exists() else []
            for process in launch.processes() if rows else ():
                with suppress(psutil.NoSuchProcess, FileNotFoundError, KeyError):
                    samples[f"{process.pid} {process.cmdline()[-1][-40:]}"].append(
                        (rows[-1]["iteration"] // WINDOW_STEPS, _anonymous_mib(process.pid)))
        self._complete(launch)
        growth = {one: round(found, 3) for one, values in samples.items() if (found := _growth(values)) is not None}
        self.found.setdefault("mib_per_100_steps", {})[layout] = growth
        self.found["problems"] += [f"{layout}: process {one} grows by {mib} MiB per {WINDOW_STEPS} steps"
                                   for one, mib in growth.items() if mib > MOST_MIB_PER_WINDOW]
        shutil.rmtree(self._folder / name)
        self.note()

    def note(self) -> None:
        self.found["events"] = {
            event: {"count": len(ends), "statuses": sorted({status for status, _ in ends}),
                    "median_seconds": round(statistics.median(seconds for _, seconds in ends), 1),
                    "most_seconds": round(max(seconds for _, seconds in ends), 1)}
            for event, ends in self._events.items()}  # fmt: skip
        report(self.found, self._output, prints=False)

    def _complete(self, launch: Launch) -> bool:
        """Whether a launch that nothing has disturbed succeeds and leaves no process."""
        status, _, left = launch.end()
        if status or left:
            self.found["problems"].append(f"an undisturbed launch ended with {status} and left {left}:\n"
                                          f"{launch.output.read_text()[-3000:]}")
        self.note()
        return not status


def differences(run: Path, whole: Path) -> list[str]:
    """Where a complete run differs from the undisturbed one, and what it has left."""
    found = []
    rows = [[[row.get(key) for key in ("kind", *COMPARED)] for row in json_lines(one / "logs" / "metrics.jsonl")
             if row["kind"] in ("step", "validation")] for one in (run, whole)]
    if rows[0] != rows[1]:
        found.append(f"{run.name}: other metrics")
    ledgers = [sorted(map(json.dumps, json_lines(one / "logs" / "quarantine.jsonl"))) for one in (run, whole)]
    if ledgers[0] != ledgers[1] or len(ledgers[0]) != 2:
        found.append(f"{run.name}: other samples are left out")
    for folder in (f"save/iter_{NUM_STEPS:07d}", "hf"):
        for file in sorted(path.name for path in (whole / folder).glob("*.safetensors")):
            ours = run / folder / file
            if not ours.exists() or ours.read_bytes() != (whole / folder / file).read_bytes():
                found.append(f"{run.name}: another {folder}/{file}")
    left = sorted(path.name for path in run.rglob("*") if re.search(r"\.tmp-|\.old-|\.lock", path.name))
    return [*found, *([f"{run.name}: files left: {left}"] if left else [])]


def write_all_inputs(folder: Path) -> None:
    """The tiny model's, with a video, samples for validation, an image that is cut off, and one that is missing."""
    write_inputs(folder)
    write_clip(folder / "clip.mp4", even(75))
    records = json.loads((folder / "samples.json").read_text())
    image = (folder / "1_0.png").read_bytes()
    (folder / "damaged.png").write_bytes(image[: len(image) // 2])
    for place, key, file in ((4, "images", "damaged.png"), (7, "images", "missing.png"), (12, "videos", "clip.mp4")):
        records.insert(place, {key: [file], "messages": [
            {"role": "user", "content": f"<{key.removesuffix('s')}>What is it?"},
            {"role": "assistant", "content": "A bar."}]})  # fmt: skip
    (folder / "samples.json").write_text(json.dumps(records))
    data = json.loads((folder / "data.json").read_text())
    data["dataset_param"]["attr"]["videos"] = "videos"
    data["dataset_param"]["preprocess_parameters"] |= {"video_max_pixels": 96 * 96}
    data["dataset_param"]["basic_parameters"] |= {"val_rate": 0.1}
    (folder / "data.json").write_text(json.dumps(data))


def _anonymous_mib(pid: int) -> float:
    """Memory without the pages of files, which the kernel maps when they are first used."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024


def _growth(samples: list[tuple[int, float]]) -> float | None:
    """MiB per window, in the median of the windows after the first ten; None for a process with fewer than three."""
    windows: dict[int, list[float]] = defaultdict(list)
    for window, mib in samples:
        windows[window].append(mib)
    medians = [statistics.median(mib) for window, mib in sorted(windows.items()) if window >= 10]
    return statistics.median(later - earlier for earlier, later in pairwise(medians)) if len(medians) > 2 else None


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=EVENTS, default=list(EVENTS), metavar="EVENT",
                        help=f"of {', '.join(EVENTS)}")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=0, help="of a long run whose memory is watched; 3000 shows growth")
    parser.add_argument("--limit", type=int, default=20, help="seconds for each step and phase")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        faults = Faults(Path(temporary), flags.seed, flags.limit, flags.output)
        write_all_inputs(Path(temporary))
        for layout in flags.layouts if flags.steps else ():
            faults.watch_memory(layout, flags.steps)
        for layout in flags.layouts if flags.minutes else ():
            faults.run_undisturbed(layout)
        rng, began, events, number = random.Random(flags.seed), time.monotonic(), list[str](), 0
        while not faults.found["problems"] and time.monotonic() < began + 60 * flags.minutes:
            layout, name, number = flags.layouts[number % len(flags.layouts)], f"run {number}", number + 1
            for _ in range(3):
                events = events or rng.sample(flags.only, len(flags.only))
                faults.disturb(name, layout, event := events.pop())
                print(f"{time.strftime('%H:%M:%S')} {name}, {layout}: {event}", file=sys.stderr, flush=True)
            faults.complete(name, layout)
    report(faults.found, flags.output)
    return int(bool(faults.found["problems"]))


if __name__ == "__main__":
    sys.exit(main())
