"""The benchmarks run, and both of their sides train the same model.  How fast is not judged here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(output: Path, *arguments: str) -> dict | list:
    """What ``python -m arguments --output FILE`` writes."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments, "--output", str(output)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(output.read_text())


def test_device_step_parity(tmp_path: Path) -> None:
    result = run(tmp_path / "parity.json", "benchmarks.device_step", "parity", "--device", "cpu")
    assert {name.rpartition(", ")[2] for name in result["cases"]} == {"fp32", "bf16"} and len(result["cases"]) == 4
    assert all(case["passed"] for case in result["cases"].values())
    # a comparison that cannot fail would show the same error in both precisions
    for name, case in result["cases"].items():
        worst = case["ours"]["gradient_error_max"]
        assert worst > 1e-3 if name.endswith("bf16") else 0 < worst < 1e-4


def test_device_step_speed(tmp_path: Path) -> None:
    result = run(
        tmp_path / "speed.json", "benchmarks.device_step", "speed", "--device", "cpu", "--size", "tiny", "--tokens",
        "1400", "--num-microbatches", "2", "--warmup", "1", "--steps", "1", "--recompute", "--freeze", "vision",
    )  # fmt: skip
    assert result["loss_error"] < 1e-5 and result["grad_norm_error"] < 1e-5
    for side in (result["ours"], result["transformers"]):
        assert side["tokens"] == 4 * 689 and side["patches"] == 4 * 1260
        assert side["tokens_per_second"] * side["step_seconds"]["median"] == pytest.approx(side["tokens"])
        assert side["last_loss"] < side["first_loss"]


def test_cpu_step(tmp_path: Path) -> None:
    results = run(tmp_path / "cpu.json", "benchmarks.cpu_step", "--quick", "--rounds", "1", "--num-microbatches", "2")
    assert [result["processes"] for result in results] == [1, 2]
    assert all(result["our_speed_over_peer"] > 0 and result["tokens_per_step"] > 0 for result in results)


def test_convert(tmp_path: Path) -> None:
    """Every command at its smallest; the exit status says whether the times of a real size would be good enough."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.convert", "--size", "tiny", "--rounds", "1", "--folder", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    result = json.loads(done.stdout[done.stdout.index("{") :])
    for kind in ("warm", "cold"):
        commands = {name: one for name, one in result[kind].items() if name != "copy"}
        assert {name.split()[0] for name in commands} == {"hf_to_mm", "mm_to_hf", "resplit"} and len(commands) == 6
        assert all(one["ratio"] > 0 and 10 < one["memory_mib"] < 512 for one in commands.values())
    assert list(tmp_path.iterdir()) == []
