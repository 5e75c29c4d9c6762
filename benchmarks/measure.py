"""How the benchmarks of one device measure and keep what they found: a clock, and a file of JSON lines."""

import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from mm.device.device import Device

MIN_REPEATS, MAX_REPEATS = 3, 50
CACHE_BYTES = 256 << 20
"""Written between two repeats on an accelerator: more than any device's last cache, so that inputs come from memory."""


def versions() -> dict[str, str]:
    """Of Python and of the packages that a figure depends on."""
    names = ("torch", "megatron-core", "transformers", "torch_npu", "flash_attn")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the last two are optional
    return found


class Records:
    """Results, each printed and appended to a file as one JSON line at once: a time-out loses none."""

    def __init__(self, path: Path | None, label: str, device: str, size: str) -> None:
        """The first line says where all others come from."""
        self._path, self._label = path, label
        date = datetime.now().astimezone().isoformat(timespec="seconds")
        self.write("machine", device=device, size=size, date=date, versions=versions())

    def write(self, kind: str, **values: Any) -> None:
        record = {"kind": kind, "label": self._label, **values}
        print(json.dumps(record), flush=True)
        if self._path is not None:
            append(self._path, record)


def append(path: Path, record: dict) -> None:
    """Add one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> list[dict]:
    """The lines of a file of results, in order; a last line that was cut off by a time-out is left out."""
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


@dataclass(frozen=True)
class Timing:
    """Times of one piece of work in milliseconds."""

    ms: float
    """The median."""
    ms_min: float
    ms_max: float
    repeats: int

    @classmethod
    def of(cls, times: list[float]) -> "Timing":
        return cls(statistics.median(times), min(times), max(times), len(times))


class Clock:
    """Times work by events on the device's own queue, or by the host's clock on a CPU."""

    def __init__(self, device: Device, num_warmup: int = 3, seconds: float = 0.3) -> None:
        """``seconds``: about how long one piece of work is repeated."""
        self.device, self._num_warmup, self._seconds = device, num_warmup, seconds
        self._module = None if device.kind == "cpu" else getattr(torch, device.kind)

    def mark(self) -> Any:
        """A point in time, in the order of the work that was given to the device."""
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, begin: Any, end: Any) -> float:
        """Between two marks, once the device has reached them (``Device.synchronize``)."""
        return 1000 * (end - begin) if self._module is None else begin.elapsed_time(end)

    def time(self, work: Callable[[], object]) -> Timing:
        """Warm up, then repeat ``work`` without waiting in between."""
        for _ in range(self._num_warmup):
            work()
        self.device.synchronize()
        start = time.perf_counter()
        work()
        self.device.synchronize()
        once = time.perf_counter() - start
        marks, cache = [], None if self._module is None else torch.empty(CACHE_BYTES // 4, device=self.device.kind)
        for _ in range(max(MIN_REPEATS, min(MAX_REPEATS, int(self._seconds / once)))):
            if cache is not None:
                cache.zero_()
            begin = self.mark()
            work()
            marks.append((begin, self.mark()))
        self.device.synchronize()
        return Timing.of([self.milliseconds(*pair) for pair in marks])


class Phases:
    """Splits steps into named parts: ``begin`` ends one and starts the next."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[tuple[str, Any]] = []

    def begin(self, name: str) -> None:
        self._marks.append((name, self._clock.mark()))

    def milliseconds(self) -> dict[str, float]:
        """By name, summed over all that began since the last call; the last one ends now.  Waits for the device."""
        self.begin("")
        self._clock.device.synchronize()
        found: dict[str, float] = {}
        for (name, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            found[name] = found.get(name, 0.0) + self._clock.milliseconds(begin, end)
        self._marks.clear()
        return found


@dataclass(frozen=True)
class Memory:
    """Peak memory of this process in bytes."""

    allocated_bytes: int
    """Of tensors; on a CPU all that the process holds."""
    reserved_bytes: int | None
    """What the allocator took from the device, gaps included; None on a CPU."""

    @classmethod
    def peak(cls, device: Device) -> "Memory":
        reserved = None if device.kind == "cpu" else getattr(torch, device.kind).max_memory_reserved()
        return cls(device.max_memory_bytes(), reserved)


def reset_peak_memory(device: Device) -> None:
    """So that the peak reported is that of what follows (on a CPU it is the process's)."""
    if device.kind != "cpu":
        getattr(torch, device.kind).reset_peak_memory_stats()


@contextmanager
def profiled(path: Path) -> Iterator[dict]:
    """Profile one piece of work: its operators by time into ``path``, the number of device operations into the dict."""
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
        found: dict[str, int] = {}
        yield found
    rows = profile.key_averages()
    on_device = [row for row in rows if row.device_type != torch.autograd.DeviceType.CPU]
    found["num_device_operations"] = sum(row.count for row in on_device)
    order = "self_device_time_total" if on_device else "self_cpu_time_total"
    path.write_text(rows.table(sort_by=order, row_limit=80, max_name_column_width=100), encoding="utf-8")
