"""``mm-doctor`` finds what is wrong with an environment that was broken on purpose, and its cure mends it."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from mm.doctor import machine, trial
from mm.doctor.begun import FOUND, behind_text
from mm.doctor.commands import run
from mm.doctor.diagnosis import Diagnosis, Level, read_lines
from mm.doctor.imports import import_findings
from mm.doctor.machine import directory_findings, file_findings, memory_findings, temporary_findings
from mm.doctor.network import host_findings, name_findings
from mm.doctor.step import GOLDEN
from mm.doctor.trial import TrialNode, cause, end, environment, trial_findings
from mm.doctor.variables import variable_findings
from mm.plan.sizes import num_model_params
from mm.ports import free_port
from mm.version import VERSION
from tests.files import ROOT
from tests.launch import run_ranks, warm_python
from tests.plan.test_stages import run_of

INTERFACES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.4", "fe80::1"]}
PACKAGES = """
import json, sys
sys.path.remove("")  # as in a command, the current folder is not on the path
from dataclasses import asdict
from mm.doctor.packages import package_findings
print(json.dumps([asdict(one) for one in package_findings()]))
"""


def bad(found: Iterator[Diagnosis]) -> dict[str, str]:
    """Names of warnings and faults, with their levels; each has a cure."""
    some = [one for one in found if one.level is not Level.OK]
    assert all(one.cure for one in some)
    return {one.name: one.level for one in some}


def of_packages(
    environment: Mapping[str, str], python: str = sys.executable, folder: Path = Path("/")
) -> dict[str, tuple[str, str]]:
    """Warnings and faults of packages in another process: level and text by name."""
    done = subprocess.run([python, "-c", PACKAGES], cwd=folder, env={**os.environ, **environment}, text=True,
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
    assert "links: messages between ranks 1 apart" in printed and f"directory {tmp_path}" in printed
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


def test_a_clone_beside_its_installed_copy_is_no_fault(tmp_path: Path) -> None:
    """As after ``pip install .``, where commands run the copy and ``python -m`` in the clone runs the clone."""
    for name in ("mm", "checkpoint"):
        shutil.copytree(ROOT / name, tmp_path / name)
    assert of_packages(path_of(), folder=tmp_path) == {}
    (tmp_path / "checkpoint/new.py").touch()
    (level, text), = of_packages(path_of(), folder=tmp_path).values()
    assert level == "warning" and "checkpoint differs" in text and "pip install --editable" in text
    (tmp_path / "mm/doctor/packages.py").unlink()  # another project
    found = of_packages(path_of(), folder=tmp_path)
    assert {name: level for name, (level, _) in found.items()} == {"folder mm": "fault", "folder checkpoint": "fault"}


def test_a_package_is_missing(tmp_path: Path) -> None:
    """In an environment with nothing but the source and what the check itself needs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    (needed,) = {str(Path(module.__file__ or "").parent.parent) for module in (sys.modules["packaging"],)}
    folder = next(tmp_path.glob("lib/python*/site-packages"))
    (folder / "packaging").symlink_to(Path(needed) / "packaging")
    (tmp_path / "source").mkdir()
    for name in ("mm", "checkpoint"):  # without what an installation may have left beside them
        (tmp_path / "source" / name).symlink_to(ROOT / name)
    found = of_packages({**path_of(), "PYTHONPATH": str(tmp_path / "source")}, str(tmp_path / "bin/python"))
    assert found["package"][0] == "fault" and "pip install --editable" in found["package"][1]


def test_a_package_that_prints_while_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text("import os\nprint('[INFO] here I am', flush=True)\nos.system('echo [again]')")
    info = tmp_path / "chatty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chatty\nVersion: 1.0\n")
    process = subprocess.Popen([sys.executable, "-m", "mm.doctor.imports", "chatty"], text=True, cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))})
    assert [(one.level, one.what) for one in import_findings(process)] == [(Level.OK, "1 package")]


@pytest.mark.parametrize(("variables", "expected"), [
    ({}, {}), ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0,lo", "HCCL_SOCKET_IFNAME": "^docker"}, {}),
    ({"GLOO_SOCKET_IFNAME": "ib0"}, {"GLOO_SOCKET_IFNAME": "fault"}), ({"GLOO_SOCKET_IFNAME": "eth0,lo"}, {}),
    ({"GLOO_SOCKET_IFNAME": "^docker"}, {"GLOO_SOCKET_IFNAME": "fault"}),
    ({"GLOO_SOCKET_IFNAME": "=eth0"}, {"GLOO_SOCKET_IFNAME": "fault"}),
    ({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, {"GLOO_SOCKET_IFNAME": "fault"}),
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
    (finding,) = directory_findings(missing, takes_checkpoints=True)
    assert finding.level is Level.FAULT and f"mkdir -p '{missing}'" in finding.cure
    missing.mkdir()  # the cure
    monkeypatch.setattr(machine, "SLOW_DISK_BYTES", 0.0)  # other tests may be writing, too
    assert bad(directory_findings(missing, takes_checkpoints=True)) == {} and not list(missing.iterdir())
    monkeypatch.setattr(machine, "SLOW_DISK_BYTES", 100e6)
    monkeypatch.setattr(machine, "_written", lambda _: (50e6, -7.0))
    slow = {f"directory {missing}": "warning", "clock": "warning"}
    assert bad(directory_findings(missing, takes_checkpoints=True)) == slow
    assert bad(directory_findings(missing, takes_checkpoints=False)) == {"clock": "warning"}
    monkeypatch.setattr(machine, "ENOUGH_DISK_BYTES", 1 << 60)
    assert bad(directory_findings(missing, takes_checkpoints=True)) == slow
    monkeypatch.setattr(machine, "MIN_DISK_BYTES", 1 << 60)
    assert bad(directory_findings(missing, takes_checkpoints=True)) == {f"directory {missing}": "fault"}


def test_names_and_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert bad(host_findings([f"localhost:{port}"], 1)) == {}
    assert bad(host_findings(["localhost"], free_port())) == {}, "a machine that refuses is there"
    for name in ("localhost:x", "localhost:0", "localhost:99999"):
        assert bad(host_findings([name, "localhost"], free_port())) == {f"host {name}": "fault"}
    assert bad(host_findings(["localhost"], 99999)) == {"host localhost": "fault"}
    assert bad(host_findings(["no-such-host.invalid"], 1)) == {"host no-such-host.invalid": "fault"}

    def unreachable(*_: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    assert bad(host_findings(["localhost"], 1)) == {"host localhost": "fault"}
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert bad(name_findings({}, is_one_of_several=False)) == {"host name": "fault"}
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert bad(name_findings({}, is_one_of_several=False)) == {"host name": "warning"}
    assert bad(name_findings({}, is_one_of_several=True)) == {"host name": "fault"}
    assert bad(name_findings({"GLOO_SOCKET_IFNAME": "eth0"}, is_one_of_several=True)) == {}  # its cure
    assert bad(host_findings(["node-1"], 1)) == {"host node-1": "fault"}
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.0.0.4")
    assert bad(name_findings({}, is_one_of_several=True)) == {}


def test_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    wanted = tmp_path / "missing"
    monkeypatch.setenv("TMPDIR", str(wanted))
    finding, *_ = temporary_findings(os.environ)
    assert finding.name == "TMPDIR" and finding.cure.startswith(f"mkdir -p '{wanted}'")
    wanted.mkdir()  # the cure
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert bad(temporary_findings(os.environ)) == {}


def test_a_device_that_computes_something_else(tmp_path: Path) -> None:
    """A norm that is 1% off, and an all-reduce that loses a rank."""
    run_ranks(2, "tests.doctor.broken_rank", str(tmp_path))
    faults = {one.name: one.what for one in read_lines((tmp_path / FOUND).read_bytes()) if one.level == Level.FAULT}
    assert faults.keys() == {"links", "training step in fp32", "training step in bf16"}
    assert faults["links"] == "all-reduce over 2 ranks: wrong numbers on rank 0 (cpu), rank 1 (cpu)"


PYTHON = sys.executable


@pytest.fixture
def is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``mm-doctor`` starts runs in forks of the warm process; ``test_this_environment_is_whole`` starts Python."""
    monkeypatch.setattr(sys, "executable", str(warm_python()))


@pytest.mark.usefixtures("is_warm")
def test_the_device_that_computes_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm of torch is 5% off on device 1, as with a broken kernel or driver."""
    monkeypatch.setattr(trial, "RANK", "tests.doctor.off_rank")
    faults = [(one.name, one.what) for one in trial_findings("cpu", 2, 300.0, TrialNode()) if one.level is Level.FAULT]
    assert [name for name, _ in faults] == ["training step in fp32", "training step in bf16", "device alone"]
    assert faults[-1][1].startswith("LOCAL_RANK 1 fails without the others, too: training step in fp32: ")


@pytest.mark.usefixtures("is_warm")
def test_the_rank_that_fails_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found before the crash is reported; alone, the same device fails again.

    The launcher starts new processes, whose ends it sees at once: of a fork, it would hear after the other's failure.
    """
    monkeypatch.setenv("PYTHON_EXEC", PYTHON)
    monkeypatch.setattr(trial, "RANK", "tests.doctor.dying_rank")
    *found, crash, alone = trial_findings("cpu", 2, 300.0, TrialNode())
    assert [one.name for one in found] == ["device", "kernels", "matrix products", *["links"] * 4]
    assert (crash.name, crash.level) == ("trial", Level.FAULT)
    assert "ended with status 1: rank 1 failed first, with status 9, at: training step in fp32: " in crash.what
    assert (alone.name, alone.level) == ("device alone", Level.FAULT)
    assert alone.what.startswith("LOCAL_RANK 1 fails without the others, too: status 9 at: training step in fp32: ")


def test_every_distance_and_division_of_the_ranks_is_tried(tmp_path: Path) -> None:
    run_ranks(4, "mm.doctor.rank", str(tmp_path), "cpu")
    found = [one for one in read_lines((tmp_path / FOUND).read_bytes()) if one.name == "links"]
    assert [one.what.partition(":")[0] for one in found if one.level is Level.OK] == [
        "all-reduce over 4 ranks", "all-gather over 4 ranks", "broadcast over 4 ranks",
        "messages between ranks 1 apart", "messages between ranks 2 apart",
        "all-reduce in groups of 2 neighbours", "all-reduce in groups of ranks 2 apart"]


def test_the_rank_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    others = ["device", "matrix products", "all-reduce over 3 ranks"]
    assert behind_text({0: others, 1: others[:2], 2: others}) == (
        "rank 1 is still at: matrix products; the others at: all-reduce over 3 ranks")
    assert behind_text({0: others, 1: others}) == "all are at: all-reduce over 3 ranks"
    assert behind_text({}) == "no rank has begun"
    monkeypatch.setattr(trial, "RANK", "tests.doctor.stuck_rank")
    monkeypatch.setattr(trial, "_END_SECONDS", 2.0)
    (stuck,) = trial._alone("cpu", 2, 300.0)
    assert stuck.level is Level.FAULT
    assert stuck.what == "LOCAL_RANK 1 fails without the others, too: no end, still at: matrix products"


def test_ranks_without_a_launcher_end_with_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a signal, which raises in the main thread."""
    started = list[subprocess.Popen[bytes]]()

    def stopped(processes: Sequence[subprocess.Popen[bytes]], _: float) -> None:
        started.extend(processes)
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "RANK", "tests.doctor.stuck_rank")
    monkeypatch.setattr(trial, "_wait_for_all", stopped)
    with pytest.raises(KeyboardInterrupt):
        next(trial._alone("cpu", 2, 300.0))
    assert len(started) == 2 and started[0].poll() is not None and started[1].poll() == -signal.SIGTERM


def test_the_fake_npu(tmp_path: Path) -> None:
    """The ranks are new processes: torch learns of the device before megatron is imported."""
    run_ranks(0, "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "tests.doctor.npu_rank",
              str(tmp_path))
    found = read_lines((tmp_path / FOUND).read_bytes())
    assert [one for one in found if one.level == Level.FAULT] == []
    assert found[0].what.startswith("npu: ") and "mm.device.npu.npu_attention" in found[1].what


@pytest.mark.usefixtures("is_warm")
def test_a_device_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The other checks are made and reported all the same."""
    report = tmp_path / "report.txt"
    assert run(["--device", "npu", "--directory", str(tmp_path), "--report", str(report)]) == 1
    text = report.read_text()
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


def test_the_ranks_end_with_the_launcher() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    end(process)
    assert process.poll() == -signal.SIGTERM
    end(process)


def test_a_folder_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(machine, "_written", refused)
    assert bad(directory_findings(tmp_path, takes_checkpoints=True)) == {f"directory {tmp_path}": "warning"}


def test_a_checkout_behind_a_link_and_a_folder_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(ROOT)
    assert of_packages({**path_of(), "PYTHONPATH": str(tmp_path / "link")}) == {}
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/convert_cli.py").touch()
    assert of_packages(path_of(), folder=tmp_path)["folder checkpoint"][0] == "fault"


def test_the_checkpoint_of_7b_is_as_large_as_it_says() -> None:
    num_params = num_model_params(run_of("7b", [32], [28], 1, bf16=True))
    assert pytest.approx(14 * num_params, rel=1e-3) == machine.CHECKPOINT_BYTES
