"""Compares whole runs of the tiny model on this device and on the CPU, for ``python -m benchmarks.step train``.

The program itself, with its data workers, checkpoints and exports: a run in fp32 has the losses of the same run on the
CPU, and in fp32 and bf16 a run that stops halfway and resumes equals the uninterrupted one to the bit.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measure import versions
from benchmarks.records import LOSS, NORM
from mm.device.device import Device
from tests.files import ROOT
from tests.launch import free_port
from tests.tiny_inputs import flags_of, metrics, write_inputs

TOLERANCES = {
    # Relative, over six steps, against fp32 on the CPU.  The CPU itself in bf16: 2.8e-2 and 2.4e-2, as each step of a
    # rate of 1e-3 changes the weights of this small model much.
    "fp32": {LOSS: 1e-5, NORM: 1e-3},
    "bf16": {LOSS: 6e-2, NORM: 1e-1},
    "bf16 moments": {LOSS: 6e-2, NORM: 1e-1},
}
PRECISIONS: dict[str, tuple[str, ...]] = {
    "fp32": (), "bf16": ("--bf16",),
    "bf16 moments": ("--bf16", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"),
}  # fmt: skip
EXACT = ("loss", "lr", "grad_norm", "num_tokens", "num_patches", "consumed_samples")
STOP = ("--exit-interval", "3")


def runs_of(device: Device, precision: str | None) -> tuple[dict[str, Any], bool]:
    """The errors of one of ``PRECISIONS`` or of all, whether they resumed to the bit, and whether all passed."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        inputs = write_inputs(Path(folder))
        reference = pool.submit(_run, inputs, "reference", "cpu", "--load", str(inputs / "hf"))
        pairs = {precision: tuple(pool.submit(work, inputs, device.kind, precision) for work in (_whole, _halves))
                 for precision in ([precision] if precision else PRECISIONS)}  # fmt: skip
        expected, cases, passed = reference.result(), {}, True
        for precision, (whole, halves) in pairs.items():
            own, resumed, limits = whole.result(), halves.result(), TOLERANCES[precision]
            case = {LOSS: _error(own, expected, "loss"), NORM: _error(own, expected, "grad_norm"),
                    "resumes_to_the_bit": _exact(own) == _exact(resumed),
                    "exports_the_same_file": _exported(inputs, f"{precision}-whole") == _exported(
                        inputs, f"{precision}-halves")}  # fmt: skip
            good = all(case[key] <= limits[key] for key in (LOSS, NORM)) and case["resumes_to_the_bit"] and case[
                "exports_the_same_file"]  # fmt: skip
            passed &= good
            cases[precision] = {"passed": good, **case, "tolerances": limits}
    return {"device": device.name, "versions": versions(), "cases": cases}, passed


def _whole(inputs: Path, kind: str, precision: str) -> list[dict]:
    name = f"{precision}-whole"
    return _run(inputs, name, kind, "--load", str(inputs / "hf"), *_flags(inputs, name, precision))


def _halves(inputs: Path, kind: str, precision: str) -> list[dict]:
    """Stops after three of six steps, and resumes from its own checkpoint."""
    name = f"{precision}-halves"
    _run(inputs, name, kind, "--load", str(inputs / "hf"), *STOP, *_flags(inputs, name, precision))
    return _run(inputs, name, kind, "--load", str(inputs / name / "save"), *_flags(inputs, name, precision))


def _flags(inputs: Path, name: str, precision: str) -> list[str]:
    return ["--deterministic-mode", "--export-hf", str(inputs / name / "hf"), *PRECISIONS[precision]]


def _run(inputs: Path, name: str, kind: str, *flags: str) -> list[dict]:
    """The metrics of one run in a process of its own.  Raises SystemExit with its output if it fails."""
    flags = (*flags_of(inputs, name, 1, "--num-workers", "1"), *flags, "--device", kind)
    words = [sys.executable, "-m", "mm.train", *flags]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port())}  # fmt: skip
    done = subprocess.run(words, cwd=ROOT, env=os.environ | rank, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")
    return metrics(inputs, name)


def _error(own: list[dict], expected: list[dict], key: str) -> float:
    """The largest relative error of the six steps."""
    return max(abs(one[key] / other[key] - 1) for one, other in zip(own, expected, strict=True))


def _exact(rows: list[dict]) -> list[Mapping[str, Any]]:
    return [{key: row[key] for key in EXACT} for row in rows]


def _exported(inputs: Path, name: str) -> bytes:
    return (inputs / name / "hf" / "model.safetensors").read_bytes()
