"""Whether the memory of a run's processes grows over its steps."""

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.job import Job
from mm.files import whole_lines

NUM_STEPS = 3000
WARM_UP_STEPS = 1000
"""torch records the latest 2000 collectives of a process (TORCH_FR_BUFFER_SIZE), which takes some 500 steps; allocators
keep what the largest steps needed."""
MAX_MIB = 0.1
"""Per 100 steps, after the warm-up."""
WINDOW_STEPS = 100
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}
"""One heap per process.  By default glibc has eight per processor and gives a thread any of them, so each in turn
grows to what one thread needs at most; that hides growth, or looks like it, for thousands of steps."""
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class _Sample:
    iteration: int
    mib: float
    """Anonymous and shared memory: not the pages of files, which the kernel maps when they are first used."""
    num_files: int


class MemoryWatch:
    """Samples the processes of a launch."""

    def __init__(self, job: Job, metrics: Path) -> None:
        self._job, self._metrics = job, metrics
        self._samples: dict[tuple[str, int], list[_Sample]] = defaultdict(list)

    def wait(self, interval_seconds: float = 1.0) -> int:
        """Sample until the launch ends; returns its status."""
        while self._job.launcher.poll() is None:
            time.sleep(interval_seconds)
            iteration = self._iteration()
            for process in self._job.processes():
                try:
                    found = _Sample(iteration, _mib(process.pid), process.num_fds())
                    self._samples[_role(process), process.pid].append(found)
                except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                    continue
        return self._job.wait()

    def to_json(self) -> dict[str, Any]:
        """By process: MiB, how much it grows per 100 steps after the warm-up, and open files at its beginning and end.

        The growth is the median over windows of 100 steps: a leak is in each of them, while a new largest coincidence
        (a validation during a save) is in one.  ``first_mib`` to ``mib`` is everything.  A process that has ended or
        begun meanwhile is left out.
        """
        found = {}
        last = max((of_one[-1].iteration for of_one in self._samples.values()), default=0)
        for (role, pid), samples in sorted(self._samples.items()):
            steady = [one for one in samples if WARM_UP_STEPS <= one.iteration < last]
            num_windows = len({one.iteration // WINDOW_STEPS for one in steady})
            if num_windows < 3 or samples[0].iteration > WARM_UP_STEPS or steady[-1].iteration < last - 50:
                continue
            found[f"{role}, process {pid}"] = {
                "first_mib": round(steady[0].mib, 2), "mib": round(steady[-1].mib, 2),
                "mib_per_100_steps": round(_growth(steady), 3),
                "mib_by_window": [round(one, 2) for one in _window_medians(samples)],
                "open_files": [steady[0].num_files, steady[-1].num_files],
            }  # fmt: skip
        return found

    def _iteration(self) -> int:
        if not self._metrics.exists():
            return 0
        with self._metrics.open("rb") as file:
            file.seek(max(0, self._metrics.stat().st_size - _TAIL_BYTES))
            lines = whole_lines(file.read())
        return json.loads(lines[-1])["iteration"] if lines else 0


def problems_of(found: dict[str, Any]) -> list[str]:
    """Processes that grow, or keep files open."""
    if not found:
        return ["no process was watched after the warm-up"]
    grows = [f"{name}: its memory grows by {one['mib_per_100_steps']} MiB per 100 steps" for name, one in found.items()
             if one["mib_per_100_steps"] > MAX_MIB]
    return grows + [f"{name}: its open files grow from {first} to {last}" for name, one in found.items()
                    for first, last in [one["open_files"]] if last > first + 10]


def _mib(pid: int) -> float:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    if "RssAnon" not in fields:
        raise ProcessLookupError(pid)  # it has just ended
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024


def _role(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    for part, role in (("mm.launch", "launcher"), ("mm.train", f"rank {process.environ().get('RANK')}"),
                       ("resource_tracker", "tracker"),
                       ("forkserver", "data process")):  # fmt: skip
        if part in words:
            return role
    return words or "other"


def _window_medians(samples: list[_Sample]) -> list[float]:
    """MiB in each window, in their order: the median of its samples."""
    windows: dict[int, list[float]] = defaultdict(list)
    for one in samples:
        windows[one.iteration // WINDOW_STEPS].append(one.mib)
    return [median(mib) for _, mib in sorted(windows.items())]


def _growth(samples: list[_Sample]) -> float:
    """MiB per window."""
    return median(later - earlier for earlier, later in pairwise(_window_medians(samples)))
