"""Shared by all benchmarks: clocks, ratios, memory, ranks, and tables and JSON of the results."""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from mm.config.args import Arguments, DeviceName, parse
from mm.config.layers import OffloadConfig, RecomputeConfig
from mm.config.model import ModelConfig, read_model
from mm.process import free_port
from tests.files import EXAMPLES

if TYPE_CHECKING:
    from mm.device.device import Device

SIZES = ("tiny", "3b", "7b", "32b", "72b")
DEVICES = get_args(DeviceName)
MIN_REPEATS, MAX_REPEATS = 3, 50
CACHE_BYTES = 256 << 20
"""Bytes written between two repeats on an accelerator: more than its last cache holds, so inputs come from memory."""


# The command line and its result


def command(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of the module."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser


def step_arguments(*flags: str) -> Arguments:
    """The flags of a step whose model and data do not come from files."""
    return parse(["--lr", "1e-5", "--train-iters", "1", "--seq-length", "1", "--micro-batch-size", "1", "--mm-model",
                  "-", "--mm-data", "-", *flags])  # fmt: skip


def report(found: Any, output: Path | None, *, prints: bool = True) -> None:
    """Print ``found`` as JSON, and write it to ``output`` if that is given."""
    text = json.dumps(found, indent=1)
    if prints:
        print(text, flush=True)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")


def shipped_model(size: str) -> ModelConfig:
    """The model JSON of the example of that size."""
    return read_model(EXAMPLES / f"model_{size}.json").value


def model_config(
    size: str, frozen: Iterable[str] = (), recompute: bool = False, offload: bool = False
) -> ModelConfig:
    """The shipped model JSON of ``size`` on one stage, with exactly the parts ``frozen`` frozen."""
    model = shipped_model(size)
    recomputed = RecomputeConfig("full", "uniform", 1) if recompute else RecomputeConfig()
    towers = {
        part: replace(
            tower, pipeline_num_layers=((tower.num_layers,),), freeze=part in frozen, recompute=recomputed,
            offload=OffloadConfig(offload),
        )
        for part, tower in (("vision", model.vision), ("language", model.language))
    }
    return replace(
        model, **towers, projector=replace(model.projector, freeze="projector" in frozen)
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a figure depends on."""
    names = ("torch", "megatron-core", "transformers", "numpy", "torch_npu", "flash_attn")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the last two are optional
    return found


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_ranks(num_ranks: int, module: str, arguments: Sequence[str], num_threads: int = 1) -> None:
    """Run ``-m module arguments`` on ``num_ranks`` ranks of ``num_threads`` threads each, under torchrun.

    If one of them fails, this process ends with their output.
    """
    words = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_ranks), "--master_addr", "localhost",
        "--master_port", str(free_port()), "-m", module, *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")


# Times on the host


def seconds_of(work: Callable[[], object], count: int = 1) -> float:
    """Mean seconds of one call of ``work``, over ``count`` calls."""
    began = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - began) / count


def median_ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Median, least and largest of the rounds' ratios."""
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    return {"median": statistics.median(ratios), "least": min(ratios), "largest": max(ratios)}


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


# Times and memory on a device


def _torch_module(device: "Device") -> Any | None:
    """``torch.cuda`` or ``torch.npu``; None on a CPU."""
    return None if device.platform.name == "cpu" else getattr(torch, device.platform.name)


class Clock:
    """Times work by ``Runtime.record_event``: on the device's own queue, or by the host's clock on a CPU."""

    def __init__(self, device: "Device", num_warmup: int = 3, seconds: float = 0.3) -> None:
        """``seconds``: about how long one piece of work is repeated."""
        self._device, self._num_warmup, self._seconds = device, num_warmup, seconds

    def time(self, work: Callable[[], object]) -> Timing:
        """Warm up, then repeat ``work`` without waiting in between."""
        device = self._device
        for _ in range(self._num_warmup):
            work()
        device.runtime.synchronize()
        start = time.perf_counter()
        work()
        device.runtime.synchronize()
        once = time.perf_counter() - start
        events: list[Any] = []
        cache = None if device.platform.name == "cpu" else torch.empty(CACHE_BYTES // 4, device=device.torch_device)
        for _ in range(max(MIN_REPEATS, min(MAX_REPEATS, int(self._seconds / once)))):
            if cache is not None:
                cache.zero_()
            events.append(device.runtime.record_event())
            work()
            events.append(device.runtime.record_event())
        times = device.runtime.seconds_of(events)
        return Timing.of([1000 * (end - begin) for begin, end in zip(times[::2], times[1::2], strict=True)])


class Phases:
    """Splits steps into named parts: ``begin`` ends one and starts the next."""

    def __init__(self, device: "Device") -> None:
        self._device = device
        self._names: list[str] = []
        self._events: list[Any] = []

    def begin(self, name: str) -> None:
        self._names.append(name)
        self._events.append(self._device.runtime.record_event())

    def milliseconds(self) -> dict[str, float]:
        """The time of each part since the last call, by name; ends the current part, and waits for the device."""
        times = self._device.runtime.seconds_of([*self._events, self._device.runtime.record_event()])
        found = dict.fromkeys(self._names, 0.0)
        for name, begin, end in zip(self._names, times, times[1:], strict=False):
            found[name] += 1000 * (end - begin)
        self._names.clear()
        self._events.clear()
        return found


@dataclass(frozen=True)
class Memory:
    """Peak memory of this process in bytes."""

    allocated_bytes: int
    """Memory of tensors; on a CPU, of the whole process."""
    reserved_bytes: int | None
    """Memory that the allocator reserved on the device, including gaps; None on a CPU."""

    @classmethod
    def peak(cls, device: "Device") -> "Memory":
        module = _torch_module(device)
        return cls(device.runtime.max_memory_bytes(), None if module is None else module.max_memory_reserved())


def reset_peak_memory(device: "Device") -> None:
    """Reset the peak; without effect on a CPU, whose peak is that of the whole process."""
    if (module := _torch_module(device)) is not None:
        module.reset_peak_memory_stats()


@contextmanager
def profiled(path: Path) -> Iterator[dict]:
    """Profile the block: writes its operators by time to ``path``, and adds the number of device operations to the dict
    that it yields."""
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
        found: dict[str, int] = {}
        yield found
    rows = profile.key_averages()
    cpu = torch.autograd.DeviceType.CPU  # pyright: ignore[reportPrivateImportUsage]  (it has no public name)
    on_device = [row for row in rows if row.device_type != cpu]
    found["num_device_operations"] = sum(row.count for row in on_device)
    order = "self_device_time_total" if on_device else "self_cpu_time_total"
    path.write_text(rows.table(sort_by=order, row_limit=80, max_name_column_width=100), encoding="utf-8")
