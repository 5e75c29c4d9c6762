"""The benchmarks run, and both of their sides train the same model.  How fast is not judged here."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


COMMANDS = {
    "parity": ("benchmarks.device_step", "parity", "--device", "cpu"),
    "speed": ("benchmarks.device_step", "speed", "--device", "cpu", "--size", "tiny", "--tokens", "1400",
              "--num-microbatches", "2", "--warmup", "1", "--steps", "1", "--recompute", "--freeze", "vision"),
    "cpu": ("benchmarks.cpu_step", "--quick", "--rounds", "1", "--num-microbatches", "2"),
    "convert": ("benchmarks.convert", "--size", "tiny", "--rounds", "1"),
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """Every benchmark, two at a time: most of their time is Python's imports, and no speed is judged."""
    folder = tmp_path_factory.mktemp("benchmarks")
    (folder / "files").mkdir()

    def run(name: str) -> subprocess.CompletedProcess[str]:
        where = ("--folder", str(folder / "files")) if name == "convert" else ("--output", str(folder / name))
        return subprocess.run(
            [sys.executable, "-m", *COMMANDS[name], *where], cwd=ROOT, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=600, check=False,
        )  # fmt: skip

    def result(name: str) -> dict | list:
        done = run(name)
        if name == "convert":
            assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
            assert list((folder / "files").iterdir()) == []
            return json.loads(done.stdout[done.stdout.index("{") :])
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return json.loads((folder / name).read_text())

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(result, name) for name in COMMANDS}


def test_device_step_parity(started: dict[str, Future]) -> None:
    result = started["parity"].result()
    assert {name.rpartition(", ")[2] for name in result["cases"]} == {"fp32", "bf16"} and len(result["cases"]) == 4
    assert all(case["passed"] for case in result["cases"].values())
    # a comparison that cannot fail would show the same error in both precisions
    for name, case in result["cases"].items():
        worst = case["ours"]["gradient_error_max"]
        assert worst > 1e-3 if name.endswith("bf16") else 0 < worst < 1e-4


def test_device_step_speed(started: dict[str, Future]) -> None:
    result = started["speed"].result()
    assert result["loss_error"] < 1e-5 and result["grad_norm_error"] < 1e-5
    for side in (result["ours"], result["transformers"]):
        assert side["tokens"] == 4 * 689 and side["patches"] == 4 * 1260
        assert side["tokens_per_second"] * side["step_seconds"]["median"] == pytest.approx(side["tokens"])
        assert side["last_loss"] < side["first_loss"]


def test_cpu_step(started: dict[str, Future]) -> None:
    results = started["cpu"].result()
    assert [result["processes"] for result in results] == [1, 2]
    assert all(result["our_speed_over_peer"] > 0 and result["tokens_per_step"] > 0 for result in results)


def test_convert(started: dict[str, Future]) -> None:
    """Every command at its smallest; the exit status says whether the times of a real size would be good enough."""
    result = started["convert"].result()
    for kind in ("warm", "cold"):
        commands = {name: one for name, one in result[kind].items() if name != "copy"}
        assert {name.split()[0] for name in commands} == {"hf_to_mm", "mm_to_hf", "resplit"} and len(commands) == 6
        assert all(one["ratio"] > 0 and 10 < one["memory_mib"] < 512 for one in commands.values())
