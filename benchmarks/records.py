"""The records of benchmarks on a device: a file of JSON lines, of which only the latest run of each command counts."""

import argparse
import json
import statistics
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.measure import versions
from mm.device.device import peak_flops

OURS, PEER = "ours", "transformers"
LOSS, NORM = "loss_error", "grad_norm_error"
"""Keys of relative errors against transformers."""


def add_record_flags(parser: argparse.ArgumentParser, label: str) -> None:
    """``--records`` and ``--label``, by default ``label``."""
    parser.add_argument("--records", type=Path, help="file of JSON lines, to which each result is appended at once")
    parser.add_argument("--label", default=label, help="name of this command in the records (default: %(default)s)")


class Records:
    """Prints each result, and at once appends it to a file as one JSON line, so that a time-out loses none."""

    def __init__(self, path: Path | None, label: str, device: str, size: str) -> None:
        """Writes a first line that describes the machine."""
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
    """The lines of a file of results, in order, without a last line that a time-out cut off."""
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


@dataclass(frozen=True)
class Results:
    """Records in the order in which they were written, without those of commands that ran again later."""

    records: tuple[dict, ...]

    @classmethod
    def read(cls, path: Path) -> "Results":
        return cls.latest(read_records(path))

    @classmethod
    def latest(cls, records: list[dict]) -> "Results":
        """A "begin" drops what its command recorded before, under the same label."""
        kept: list[dict] = []
        for record in records:
            if record["kind"] == "begin":
                kept = [one for one in kept if one["label"] != record["label"]]
            kept.append(record)
        return cls(tuple(kept))

    def of(self, kind: str, **values: Any) -> list[dict]:
        """Records of ``kind`` with these ``values``."""
        wanted = {"kind": kind, **values}
        return [one for one in self.records if all(one.get(key) == value for key, value in wanted.items())]

    def kernel(self, group: str, case: str, name: str, **values: Any) -> dict | None:
        """The latest timing of one form; None when there is none."""
        found = [one for one in self.of("kernel", group=group, case=case, name=name, **values) if "ms" in one]
        return found[-1] if found else None

    @property
    def gemm_tflops(self) -> float | None:
        """TFLOP/s of the large matrix product."""
        found = self.kernel("ceilings", "matrix product", "matrix product")
        return found["tflops"] if found else None

    @property
    def copy_gbps(self) -> float | None:
        """GB/s of the large copy: bytes read and bytes written."""
        found = self.kernel("ceilings", "copy", "copy")
        return found["gbps"] if found else None

    def step(self, label: str, side: str) -> dict | None:
        """One side's step of the command ``label``, over all its rounds, with its rates; None when there is none."""
        runs = self.of("side", label=label, side=side)
        return together(runs, self.gemm_tflops) if runs else None


def together(runs: list[dict], ceiling_tflops: float | None) -> dict:
    """All rounds of one side: the median step, and its rates as shares of published peak and measured ceiling."""
    timed = [second for run in runs for second in run["steps_seconds"]]
    median, peak = statistics.median(timed), peak_flops(runs[0]["device"])
    rate = runs[0]["model_flops"] / median
    return runs[0] | {
        "steps_seconds": timed,
        "step_seconds": {"median": median, "min": min(timed), "max": max(timed)},
        "tokens_per_second": runs[0]["tokens"] / median,
        "model_flops_per_second": rate,
        "mfu": rate / peak if peak else None,
        "share_of_measured_ceiling": rate / ceiling_tflops / 1e12 if ceiling_tflops else None,
    }
