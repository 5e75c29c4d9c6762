"""Compares whole runs of the tiny model on this device and on the CPU, for ``python -m benchmarks.step train``.

The program itself, with its data workers, checkpoints and exports: a run in fp32 has the losses of the same run on the
CPU, and in fp32 and bf16 a run that stops halfway and resumes equals the uninterrupted one to the bit.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import versions
from benchmarks.records import LOSS, NORM
from mm.device.device import Device
from mm.process import free_port
from tests.files import ROOT
from tests.tiny_inputs import flags_of, metrics, write_inputs

TOLERANCES = {
    # Relative, over six steps, against fp32 on the CPU.  The CPU itself in bf16 has 2.8e-2 and 2.4e-2: the learning
    # rate of 1e-3 changes the weights of this small model a lot in each step.
    "fp32": {LOSS: 1e-5, NORM: 1e-3},
    "bf16": {LOSS: 6e-2, NORM: 1e-1},
}
EXACT = ("loss", "lr", "grad_norm", "num_tokens", "num_patches", "consumed_samples")


def runs_of(device: Device, precisions: Mapping[str, Sequence[str]]) -> tuple[dict[str, Any], bool]:
    """The errors of each precision, whether it resumed to the bit, and whether all passed.

    ``precisions`` maps names to flags of the program.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        inputs = write_inputs(Path(folder))
        reference = pool.submit(_run, inputs, "reference", "cpu", _from_hf(inputs))
        pairs = {name: tuple(pool.submit(work, inputs, device.platform.name, f"{name}-{work.__name__}", flags)
                             for work in (_whole, _halves)) for name, flags in precisions.items()}  # fmt: skip
        cases, passed = {}, True
        for name, (whole, halves) in pairs.items():
            case = _compared(inputs, whole.result(), halves.result(), reference.result())
            limits = TOLERANCES["bf16" if "--bf16" in precisions[name] else "fp32"]
            good = case["resumes_to_the_bit"] and case["exports_the_same_file"] and all(
                case[key] <= limit for key, limit in limits.items())
            passed &= good
            cases[name] = {"passed": good, **case, "tolerances": limits}
    return {"device": device.name, "versions": versions(), "cases": cases}, passed


@dataclass(frozen=True)
class _Done:
    """One training that ended."""

    name: str
    rows: list[dict]
    """Its metrics, by step."""


def _compared(inputs: Path, whole: _Done, halves: _Done, reference: _Done) -> dict[str, Any]:
    exports = [(inputs / one.name / "hf" / "model.safetensors").read_bytes() for one in (whole, halves)]
    exact = [[{key: row[key] for key in EXACT} for row in one.rows] for one in (whole, halves)]
    return {LOSS: _error(whole, reference, "loss"), NORM: _error(whole, reference, "grad_norm"),
            "resumes_to_the_bit": exact[0] == exact[1], "exports_the_same_file": exports[0] == exports[1]}  # fmt: skip


def _error(own: _Done, expected: _Done, key: str) -> float:
    """The largest relative error of the six steps."""
    return max(abs(one[key] / other[key] - 1) for one, other in zip(own.rows, expected.rows, strict=True))


def _whole(inputs: Path, kind: str, name: str, flags: Sequence[str]) -> _Done:
    return _run(inputs, name, kind, [*_from_hf(inputs), *_exporting(inputs, name), *flags])


def _halves(inputs: Path, kind: str, name: str, flags: Sequence[str]) -> _Done:
    """Stops after three of six steps, and resumes from its own checkpoint.  It alone has data workers, which must not
    change a bit."""
    flags = [*_exporting(inputs, name), "--num-workers", "1", *flags]
    _run(inputs, name, kind, [*_from_hf(inputs), "--exit-interval", "3", *flags])
    return _run(inputs, name, kind, ["--load", str(inputs / name / "save"), *flags])


def _from_hf(inputs: Path) -> list[str]:
    return ["--load", str(inputs / "hf")]


def _exporting(inputs: Path, name: str) -> list[str]:
    return ["--deterministic-mode", "--export-hf", str(inputs / name / "hf")]


def _run(inputs: Path, name: str, kind: str, flags: Sequence[str]) -> _Done:
    """A training in a process of its own.  Raises SystemExit with its output if it fails."""
    words = [sys.executable, "-m", "mm.train", *flags_of(inputs, name, 1, "--num-workers", "0"), *flags, "--device",
             kind]  # fmt: skip
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port())}  # fmt: skip
    done = subprocess.run(words, cwd=ROOT, env=os.environ | rank, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")
    return _Done(name, metrics(inputs, name))
