"""``mm-doctor`` finds what is wrong with an environment that was broken on purpose, and its cure mends it."""

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mm.doctor import machine
from mm.doctor.commands import run
from mm.doctor.diagnosis import Diagnosis, Level
from mm.doctor.machine import directory_findings, file_findings, host_findings, memory_findings, name_findings
from mm.doctor.step import GOLDEN
from mm.doctor.variables import variable_findings
from mm.version import VERSION
from tests.files import ROOT
from tests.launch import free_port, run_ranks, torchrun

INTERFACES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.4", "fe80::1"]}
PACKAGES = """
import json, sys
from dataclasses import asdict
from mm.doctor.packages import package_findings
print(json.dumps([asdict(one) for one in package_findings()]))
"""


def bad(found: Iterator[Diagnosis]) -> dict[str, str]:
    """Names of warnings and faults, with their levels; each has a cure."""
    some = [one for one in found if one.level is not Level.OK]
    assert all(one.cure for one in some)
    return {one.name: one.level for one in some}


def of_packages(environment: Mapping[str, str], python: str = sys.executable) -> dict[str, tuple[str, str]]:
    """Warnings and faults of packages in another process: level and text by name."""
    done = subprocess.run([python, "-c", PACKAGES], cwd="/", env={**os.environ, **environment}, text=True,
                          capture_output=True, check=True)
    return {one["name"]: (one["level"], f"{one['what']} {one['cure']}") for one in json.loads(done.stdout)
            if one["level"] != "ok"}


def path_of(*folders: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT])),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def installed(folder: Path, name: str, version: str, commands: str = "") -> None:
    """Metadata of a package, as an installation leaves it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(commands)


def test_this_environment_is_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["--device", "cpu", "--directory", str(tmp_path), "--report", str(tmp_path / "report.txt")]) == 0
    printed = capfd.readouterr().out
    assert " 0 fault" in printed and f"mm-doctor {VERSION}" in printed
    for precision in ("fp32", "bf16"):
        assert f"ok       training step in {precision}: loss {GOLDEN['loss']:.2f}"[:-1] in printed
    assert "links: send and receive over 2 ranks" in printed and f"directory {tmp_path}" in printed
    assert printed.startswith((tmp_path / "report.txt").read_text())


def test_packages_in_the_place_of_others(tmp_path: Path) -> None:
    assert of_packages(path_of()) == {}
    installed(tmp_path / "old", "transformers", "4.57.0")
    (level, text), = of_packages(path_of(tmp_path / "old")).values()
    assert level == "warning" and "4.57.0 is outside the tested range" in text and "pip install 'transformers" in text
    peer = tmp_path / "peer"  # MindSpeed-MM's folder and command
    (peer / "checkpoint").mkdir(parents=True)
    (peer / "checkpoint/__init__.py").touch()
    installed(peer, "mindspeed_mm", "26.1.0", "[console_scripts]\nmm-convert = checkpoint.convert_cli:main\n")
    found = of_packages(path_of(peer))
    assert {name: level for name, (level, _) in found.items()} == {"package checkpoint": "fault", "mm-convert": "fault"}
    assert str(peer / "checkpoint") in found["package checkpoint"][1] and "mindspeed_mm" in found["mm-convert"][1]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mm-convert").write_text("#!/bin/sh\n")
    (tmp_path / "bin/mm-convert").chmod(0o755)
    other = of_packages({**path_of(), "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"})
    assert other["PATH"][0] == "warning" and "source " in other["PATH"][1]
    adaptor = tmp_path / "adaptor"
    (adaptor / "mindspeed").mkdir(parents=True)
    (adaptor / "mindspeed/__init__.py").touch()
    (adaptor / "mindspeed/megatron_adaptor.py").touch()
    (adaptor / "sitecustomize.py").write_text("import mindspeed.megatron_adaptor\n")
    assert of_packages({**path_of(adaptor), "PYTHONOPTIMIZE": "1"}).keys() == {"mindspeed", "python"}


def test_a_package_is_missing(tmp_path: Path) -> None:
    """In an environment with nothing but the source and what the check itself needs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    (needed,) = {str(Path(module.__file__ or "").parent.parent) for module in (sys.modules["packaging"],)}
    folder = next(tmp_path.glob("lib/python*/site-packages"))
    (folder / "packaging").symlink_to(Path(needed) / "packaging")
    found = of_packages(path_of(), str(tmp_path / "bin/python"))
    assert found["package"][0] == "fault" and "pip install --editable" in found["package"][1]


@pytest.mark.parametrize(("variables", "expected"), [
    ({}, {}), ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0,lo", "HCCL_SOCKET_IFNAME": "^docker"}, {}),
    ({"GLOO_SOCKET_IFNAME": "ib0"}, {"GLOO_SOCKET_IFNAME": "fault"}),
    ({"NCCL_SOCKET_IFNAME": "=eth"}, {"NCCL_SOCKET_IFNAME": "fault"}),
    ({"HCCL_IF_IP": "10.0.0.5"}, {"HCCL_IF_IP": "fault"}), ({"HCCL_IF_IP": "10.0.0.4"}, {}),
    ({"HCCL_CONNECT_TIMEOUT": "60"}, {"HCCL_CONNECT_TIMEOUT": "fault"}), ({"HCCL_CONNECT_TIMEOUT": "1200"}, {}),
    ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "warning"}),
    ({"ASCEND_LAUNCH_BLOCKING": "1"}, {"ASCEND_LAUNCH_BLOCKING": "warning"}), ({"ASCEND_LAUNCH_BLOCKING": "0"}, {}),
    ({"OMP_NUM_THREADS": "8"}, {"OMP_NUM_THREADS": "warning"}), ({"OMP_NUM_THREADS": "4"}, {}),
    ({"OMP_NUM_THREADS": "all"}, {"OMP_NUM_THREADS": "fault"}),
], ids=str)  # fmt: skip
def test_variables(variables: dict[str, str], expected: dict[str, str]) -> None:
    found = list(variable_findings(variables, INTERFACES, 8, 2))
    assert bad(iter(found)) == expected
    assert "OMP_NUM_THREADS" not in expected or expected["OMP_NUM_THREADS"] == "fault" or (
        next(one.cure for one in found if one.name == "OMP_NUM_THREADS") == "export OMP_NUM_THREADS=4")
    *_, shown = found
    assert all(f"{name}={value}" in shown.what for name, value in variables.items())


def test_open_files() -> None:
    own = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, own[1]))
        assert bad(file_findings()) == {"open files": "warning"}
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(65536, own[1]), own[1]))  # the cure
        assert bad(file_findings()) == {}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, own)


def test_memory() -> None:
    assert bad(memory_findings(64 << 30, 16 << 30)) == {}
    assert bad(memory_findings(1 << 30, 64 << 20)) == {"host memory": "warning", "shared memory": "warning"}
    assert bad(memory_findings(64 << 30, None)) == {"shared memory": "warning"}


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "missing"
    (finding,) = directory_findings(missing)
    assert finding.level is Level.FAULT and f"mkdir -p '{missing}'" in finding.cure
    missing.mkdir()  # the cure
    assert bad(directory_findings(missing)) == {} and not list(missing.iterdir())
    monkeypatch.setattr(machine, "_written", lambda _: (50e6, -7.0))
    assert bad(directory_findings(missing)) == {f"directory {missing}": "warning", "clock": "warning"}
    monkeypatch.setattr(machine, "ENOUGH_DISK_BYTES", 1 << 60)
    assert bad(directory_findings(missing)) == {f"directory {missing}": "warning", "clock": "warning"}
    monkeypatch.setattr(machine, "MIN_DISK_BYTES", 1 << 60)
    assert bad(directory_findings(missing)) == {f"directory {missing}": "fault"}


def test_names_and_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert bad(host_findings([f"localhost:{port}"], 1)) == {}
    assert bad(host_findings(["localhost"], free_port())) == {}, "a machine that refuses is there"
    assert bad(host_findings(["no-such-host.invalid"], 1)) == {"host no-such-host.invalid": "fault"}

    def unreachable(*_: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    assert bad(host_findings(["localhost"], 1)) == {"host localhost": "fault"}
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert bad(name_findings()) == {"host name": "fault"}
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert bad(name_findings()) == {"host name": "warning"}
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.0.0.4")
    assert bad(name_findings()) == {}


def test_a_device_that_computes_something_else(tmp_path: Path) -> None:
    """A norm that is 1 % off, and an all-reduce that loses a rank."""
    run_ranks(2, "tests.doctor.broken_rank", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert {one["name"] for one in found if one["level"] == "fault"} == {
        "links", "training step in fp32", "training step in bf16"}
    (link,) = [one for one in found if one["name"] == "links" and one["level"] == "fault"]
    assert "all-reduce over 2 ranks gives wrong numbers" in link["what"]


def test_the_fake_npu(tmp_path: Path) -> None:
    done = torchrun(2, "tests.doctor.npu_rank", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [one for one in found if one["level"] == "fault"] == []
    assert found[0]["what"].startswith("npu: ") and "mm.device.npu.npu_attention" in found[1]["what"]


def test_a_device_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    from mm.doctor.cli import main

    assert main(["--device", "tpu"]) == 2
    assert "--device is 'tpu'; expected auto, npu, cuda or cpu" in capfd.readouterr().err
