"""``mm-doctor`` finds what is wrong with an environment that was broken on purpose, and its cure mends it."""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mm.cost.stage_memory import num_model_params
from mm.doctor import machine, trial
from mm.doctor.cli import run
from mm.doctor.device_checks import GOLDEN
from mm.doctor.machine import (
    Diagnosis,
    Level,
    directory_findings,
    file_findings,
    memory_findings,
    name_findings,
    read_lines,
    temporary_findings,
    variable_findings,
)
from mm.doctor.trial import FOUND, TrialNode, _different, begun_file, cause, environment, trial_findings
from mm.environment import VERSION
from tests.files import ROOT
from tests.launch import run_ranks, warm_python
from tests.plan.test_dry_run import run_of

PACKAGES = """
import json, sys
sys.path.remove("")  # as in a command, the current folder is not on the path
from dataclasses import asdict
from mm.doctor.machine import package_findings
print(json.dumps([asdict(one) for one in package_findings()]))
"""


def bad(found: Iterator[Diagnosis]) -> dict[str, str]:
    """Names of warnings and faults, with their levels; each has a cure."""
    some = [one for one in found if one.level is not Level.OK]
    assert all(one.cure for one in some)
    return {one.name: one.level for one in some}


def of_packages(
    environment: Mapping[str, str], python: str = sys.executable, folder: str | Path = "/", code: str = PACKAGES
) -> dict[str, tuple[str, str]]:
    """Warnings and faults of packages in another process: level and text by name."""
    done = subprocess.run([python, "-c", code], cwd=folder, env={**os.environ, **environment}, text=True,
                          capture_output=True, check=True)
    return {one["name"]: (one["level"], f"{one['what']} {one['cure']}")
            for one in json.loads(done.stdout.splitlines()[-1]) if one["level"] != "ok"}


def path_of(*folders: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT])),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_this_environment_is_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [one for one in os.environ if one.startswith(("GLOO_", "NCCL_", "HCCL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.0.0.4")
    assert run(["--device", "cpu", "--directory", str(tmp_path), "--report", str(tmp_path / "report.txt")]) == 0
    printed = capfd.readouterr().out
    assert " 0 fault" in printed and f"mm-doctor {VERSION}" in printed
    for precision in ("fp32", "bf16"):
        assert f"ok       training step in {precision}: loss {GOLDEN['loss']:.2f}"[:-1] in printed
    assert "links: all-reduce over 2 ranks: " in printed and f"directory {tmp_path}" in printed
    assert printed.startswith((tmp_path / "report.txt").read_text())


def test_packages_in_the_place_of_others(tmp_path: Path) -> None:
    peer = tmp_path / "peer"  # MindSpeed-MM's folder, with the adaptor in every Python
    for name in ("checkpoint/__init__.py", "mindspeed/__init__.py", "mindspeed/megatron_adaptor.py"):
        (peer / name).parent.mkdir(parents=True, exist_ok=True)
        (peer / name).touch()
    (peer / "sitecustomize.py").write_text("import mindspeed.megatron_adaptor\n")
    old = tmp_path / "old/transformers-4.57.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.0\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mm-convert").write_text("#!/bin/sh\n")
    (tmp_path / "bin/mm-convert").chmod(0o755)
    found = of_packages({**path_of(peer, tmp_path / "old"), "PYTHONOPTIMIZE": "1",
                         "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"})
    assert {name: level for name, (level, _) in found.items()} == {
        "python": "warning", "transformers": "warning", "package checkpoint": "fault", "PATH": "warning",
        "mindspeed": "fault"}
    assert str(peer / "checkpoint") in found["package checkpoint"][1]


def test_a_clone_beside_its_installed_copy_is_no_fault(tmp_path: Path) -> None:
    """As after ``pip install .``: commands run the copy, ``python -m`` in the clone runs the clone."""
    for name in ("mm", "checkpoint"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for code in (PACKAGES, PACKAGES.replace('sys.path.remove("")', "")):
        assert of_packages(path_of(), folder=tmp_path, code=code) == {}


def test_a_package_is_missing(tmp_path: Path) -> None:
    """In an environment with nothing but the source."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    (tmp_path / "source").mkdir()
    for name in ("mm", "checkpoint"):  # without what an installation may have left beside them
        (tmp_path / "source" / name).symlink_to(ROOT / name)
    found = of_packages({**path_of(), "PYTHONPATH": str(tmp_path / "source")}, str(tmp_path / "bin/python"))
    assert found["package"][0] == "fault" and "pip install --editable" in found["package"][1]


@pytest.mark.parametrize(("variables", "expected"), [
    ({}, {}),
    ({"GLOO_SOCKET_IFNAME": "eth0,lo", "NCCL_SOCKET_IFNAME": "=eth0,lo", "HCCL_SOCKET_IFNAME": "^docker"}, {}),
    ({"GLOO_SOCKET_IFNAME": "=eth0"}, {"GLOO_SOCKET_IFNAME": "fault"}),
    ({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, {"GLOO_SOCKET_IFNAME": "fault"}),
    ({"NCCL_SOCKET_IFNAME": "=eth"}, {"NCCL_SOCKET_IFNAME": "fault"}),
    ({"HCCL_CONNECT_TIMEOUT": "60"}, {"HCCL_CONNECT_TIMEOUT": "fault"}), ({"HCCL_CONNECT_TIMEOUT": "1200"}, {}),
    ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "warning"}),
    ({"ASCEND_LAUNCH_BLOCKING": "1"}, {"ASCEND_LAUNCH_BLOCKING": "warning"}), ({"ASCEND_LAUNCH_BLOCKING": "0"}, {}),
    ({"OMP_NUM_THREADS": "8"}, {"OMP_NUM_THREADS": "warning"}), ({"OMP_NUM_THREADS": "4"}, {}),
    ({"OMP_NUM_THREADS": "all"}, {"OMP_NUM_THREADS": "warning"}), ({"RANK": "x"}, {"launcher": "fault"}),
], ids=str)  # fmt: skip
def test_variables(variables: dict[str, str], expected: dict[str, str]) -> None:
    found = list(variable_findings(variables, ["lo", "eth0"], 8, 2))
    assert bad(iter(found)) == expected
    assert all(one.cure == "export OMP_NUM_THREADS=4" for one in found if one.name == "OMP_NUM_THREADS")


def test_limits_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, expected in ((1024, {"open files": "warning"}), (1 << 20, {})):
        monkeypatch.setattr(machine, "open_file_limit", lambda limit=limit: limit)
        assert bad(file_findings()) == expected
    assert bad(memory_findings(64 << 30, 16 << 30)) == {}
    assert bad(memory_findings(1 << 30, 64 << 20)) == {"host memory": "warning", "shared memory": "warning"}
    assert bad(memory_findings(64 << 30, None)) == {"shared memory": "warning"}
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert bad(name_findings({}, is_one_of_several=False)) == {"host name": "fault"}
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert bad(name_findings({}, is_one_of_several=False)) == {}
    assert bad(name_findings({}, is_one_of_several=True)) == {"host name": "fault"}
    assert bad(name_findings({"GLOO_SOCKET_IFNAME": "eth0"}, is_one_of_several=True)) == {}  # its cure


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "missing"
    (finding,) = directory_findings(missing, takes_checkpoints=True)
    assert finding.level is Level.FAULT and f"mkdir -p '{missing}'" in finding.cure
    missing.mkdir()  # the cure
    name = f"directory {missing}"
    monkeypatch.setattr(machine, "SLOW_DISK_BYTES", 0.0)  # other tests may be writing, too
    assert bad(directory_findings(missing, takes_checkpoints=True)) == {} and not list(missing.iterdir())
    monkeypatch.setattr(machine, "SLOW_DISK_BYTES", 100e6)
    monkeypatch.setattr(machine, "_bytes_per_second", lambda _: 50e6)
    assert bad(directory_findings(missing, takes_checkpoints=True)) == {name: "warning"}
    assert bad(directory_findings(missing, takes_checkpoints=False)) == {}
    monkeypatch.setattr(machine, "MIN_DISK_BYTES", 1 << 60)
    assert bad(directory_findings(missing, takes_checkpoints=True)) == {name: "fault"}

    def refused(_: Path) -> float:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(machine, "MIN_DISK_BYTES", 0)
    monkeypatch.setattr(machine, "_bytes_per_second", refused)
    assert bad(directory_findings(missing, takes_checkpoints=True)) == {name: "warning"}


def test_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    wanted = tmp_path / "missing"
    monkeypatch.setenv("TMPDIR", str(wanted))
    finding, *_ = temporary_findings(os.environ)
    assert finding.name == "TMPDIR" and finding.cure.startswith(f"mkdir -p '{wanted}'")


def test_nodes_that_differ_are_named() -> None:
    (found,) = _different([{"torch": "2.13.0"}, {"torch": "2.12.0"}], ["rank 0", "rank 1 (npu:0 of b)"])
    assert found.level is Level.FAULT and found.what == "rank 1 (npu:0 of b): torch is 2.12.0, on rank 0 2.13.0"


def test_a_device_that_computes_something_else(tmp_path: Path) -> None:
    """A norm that is 1% off, and an all-reduce that loses a rank."""
    run_ranks(2, "tests.doctor.broken_rank", str(tmp_path))
    faults = {one.name: one.what for one in read_lines((tmp_path / FOUND).read_bytes()) if one.level == Level.FAULT}
    assert faults.keys() == {"links", "training step in fp32", "training step in bf16"}
    assert re.match(r"all-reduce over 2 ranks: wrong numbers on rank 0 \(cpu of .*\), rank 1 \(cpu of", faults["links"])
    assert begun_file(tmp_path, 1).read_text().splitlines()[-1] == "end"


def test_the_trial_of_a_rank_that_fails_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(warm_python()))
    monkeypatch.setattr(trial, "RANK", "tests.doctor.failing_rank")
    *_, failed = trial_findings("raises", 300.0, TrialNode(2))
    assert failed.level is Level.FAULT
    assert re.search(r"RuntimeError: no such kernel; rank [01] was at: device", failed.what), failed.what
    *_, hung = trial_findings("hangs", 5.0, TrialNode(2))
    assert hung.level is Level.FAULT and hung.what.startswith("no end of 2 processes within 5 s")


def test_the_fake_npu(tmp_path: Path) -> None:
    """The ranks are new processes: torch learns of the device before megatron is imported."""
    run_ranks(0, "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "tests.doctor.npu_rank",
              str(tmp_path))
    found = read_lines((tmp_path / FOUND).read_bytes())
    assert [one for one in found if one.level == Level.FAULT] == []
    assert found[0].what.startswith("npu: ") and "mm.device.npu.npu_attention" in found[1].what


def test_a_device_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The other checks are made and reported all the same."""
    assert run(["--device", "npu", "--directory", str(tmp_path)]) == 1
    text = capfd.readouterr().out
    assert "fault    trial: UserError: --device npu: torch_npu is not installed" in text and " 1 fault" in text
    assert "host memory: " in text and f"directory {tmp_path}: " in text and "variables: " in text


@pytest.mark.parametrize("line", [
    "[rank3]: torch.distributed.DistBackendError: NCCL error in: x.cpp", "torch.OutOfMemoryError: CUDA out of memory",
    "[rank 1] error: --load is missing", "error: no device", "[rank0]: RuntimeError: wrong"])
def test_the_cause_of_a_failed_trial(line: str) -> None:
    expected = re.sub(r"^\[rank ?\d\]:? ", "", line)
    assert cause(f"Traceback\n{line}\ntorch.x.ChildFailedError: \nlast\n=====") == expected
    assert cause("only this") == "only this" and cause("") == "no output"


def test_a_trial_is_a_job_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod of a larger job."""
    for name in ("PET_NNODES", "RANK", "MASTER_ADDR", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "4")
    found = environment()
    assert "NCCL_DEBUG" in found and not found.keys() & {"PET_NNODES", "RANK", "MASTER_ADDR"}


def test_the_checkpoint_of_7b_is_as_large_as_it_says() -> None:
    num_params = num_model_params(run_of("7b", [32], [28], 1, bf16=True))
    assert pytest.approx(14 * num_params, rel=1e-3) == machine.CHECKPOINT_BYTES
