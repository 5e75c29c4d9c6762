"""The whole program on environments broken on purpose: it finds each breakage, and the cure that it prints works.

A breakage is a line of shell, and so is a cure: what the program prints, cut out of its sentence.  Those that do not
disturb each other share a run.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest

from mm.doctor.diagnosis import Diagnosis
from mm.requirements import declared_names
from tests.doctor.whole import Examined, examined

PACKAGES = Path(sysconfig.get_path("purelib"))
CHANGED = "packaging", "psutil", "annotated-types", "tqdm", "simplejpeg"
_NAMESPACES = ["unshare", "--map-root-user", "--mount", "--uts", "--net"]
_AWAY = r"remove (\S+) from PYTHONPATH", r'export PYTHONPATH="$(echo "$PYTHONPATH" | sed "s#\1:##")"'


@dataclass(frozen=True)
class Breakage:
    """A line of shell that breaks something, the finding that names it, and how its cure is typed."""

    name: str
    """Name of the finding; ``{}`` stands for the folder of the test."""
    level: str
    breaks: str
    """Run in the folder of the test."""
    cure: str
    """What part of the printed cure is typed."""
    typed: str = r"\g<0>"
    """The typed line, with groups of ``cure``."""


ANYWHERE = (
    Breakage("open files", "warning", "ulimit -Sn 256", r"ulimit -n \d+"),
    Breakage("GLOO_SOCKET_IFNAME", "fault", "export GLOO_SOCKET_IFNAME=ib7", r"unset \w+"),
    Breakage("NCCL_SOCKET_IFNAME", "fault", "export NCCL_SOCKET_IFNAME==ib7", r"unset \w+"),
    Breakage("HCCL_IF_IP", "fault", "export HCCL_IF_IP=203.0.113.9", r"unset \w+"),
    Breakage("HCCL_CONNECT_TIMEOUT", "fault", "export HCCL_CONNECT_TIMEOUT=20m", r"export \S+"),
    Breakage("CUDA_VISIBLE_DEVICES", "warning", "export CUDA_VISIBLE_DEVICES=", r"unset \w+"),
    Breakage("ASCEND_LAUNCH_BLOCKING", "warning", "export ASCEND_LAUNCH_BLOCKING=1", r"unset \w+"),
    Breakage("OMP_NUM_THREADS", "warning", "export OMP_NUM_THREADS=512", r"export \S+"),
    Breakage("python", "warning", "export PYTHONOPTIMIZE=1", r"unset \w+"),
    Breakage("TMPDIR", "warning", "export TMPDIR={}/temporary", r"mkdir -p '[^']+'"),
    Breakage("directory {}/checkpoints", "fault", ":", r"mkdir -p '[^']+'"),
    Breakage("package checkpoint", "fault", "export PYTHONPATH={}/peer:$PYTHONPATH", *_AWAY),
    Breakage("megatron-core", "warning", "export PYTHONPATH={}/Megatron-LM:$PYTHONPATH", *_AWAY),
    Breakage("mindspeed", "fault", "export PYTHONPATH={}/adaptor:$PYTHONPATH", r"remove its import from (\S+)",
             r"sed -i /mindspeed.megatron_adaptor/d \1"),
    Breakage("PATH", "warning", "export PATH={}/bin:$PATH", r"(source|export) \S+"),
    Breakage("tqdm", "fault", ":", r"rename (\S+),", r"mv \1 \1.renamed"),
)
IN_NAMESPACES = (
    Breakage("directory {}/full", "fault", "mount -t tmpfs -o size=20m tmpfs {}/full", "choose another directory",
             "umount {}/full"),
    Breakage("directory {}/read", "warning", "mount -t tmpfs -o ro tmpfs {}/read", "choose another directory",
             "umount {}/read"),
    Breakage("shared memory", "warning", "mount -t tmpfs -o size=64m tmpfs /dev/shm",
             r"mount -o remount,size=16g /dev/shm"),
    Breakage("host name", "fault", "echo nameless > /proc/sys/kernel/hostname; ip link set lo up; "
             "ip addr add 10.77.0.1/32 dev lo; cp /etc/hosts {}/hosts; mount --bind {}/hosts /etc/hosts",
             r"add `127.0.0.1 (\S+)` to (/etc/hosts).*its own address", r"echo 10.77.0.1 \1 >> \2"),
    Breakage("host node-1", "fault", ":", r"add it to (/etc/hosts); `getent hosts (\S+)`", r"echo 10.77.0.1 \2 >> \1"),
)


def _can_make_namespaces() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*_NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True,
                          check=False).returncode == 0


HAS_NAMESPACES = _can_make_namespaces()
BREAKAGES = [*ANYWHERE, *(pytest.param(one, marks=pytest.mark.skipif(
    not HAS_NAMESPACES, reason="a disk can be mounted and the machine renamed only in namespaces, which are denied"))
    for one in IN_NAMESPACES)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With files that some breakages put in front of ours."""
    folder = tmp_path_factory.mktemp("broken").resolve()
    files = {
        "peer/checkpoint/__init__.py": "", "Megatron-LM/megatron/core/__init__.py": "",
        "adaptor/mindspeed/__init__.py": "", "adaptor/mindspeed/megatron_adaptor.py": "",
        "adaptor/sitecustomize.py": "import mindspeed.megatron_adaptor\n", "bin/mm-convert": "#!/bin/sh\n",
        "here/tqdm.py": "import no_such_module\n",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    (folder / "bin/mm-convert").chmod(0o755)
    for name in ("full", "read", "other"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Callable[[list[str]], Examined]:
    """Examine the environment with every breakage, and then the lines of some cures."""
    broken = [one.breaks.replace("{}", str(folder))
              for one in (*(IN_NAMESPACES if HAS_NAMESPACES else ()), *ANYWHERE)]
    words = ["--no-trial", *(f"--directory={folder}/{name}" for name in ("checkpoints", "full", "read")),
             *(["--hosts", "node-1"] if HAS_NAMESPACES else [])]
    return lambda cures: examined(*words, lines=[*broken, *cures], folder=folder / "here",
                                  inside=_NAMESPACES if HAS_NAMESPACES else ())


@pytest.fixture(scope="module")
def broken(run: Callable[[list[str]], Examined]) -> Examined:
    return run([])


@pytest.fixture(scope="module")
def cured(run: Callable[[list[str]], Examined], broken: Examined, folder: Path) -> Examined:
    found, cures = broken.bad, list[str]()
    for one in (*ANYWHERE, *(IN_NAMESPACES if HAS_NAMESPACES else ())):
        if (finding := found.get(_named(one, folder))) is not None:
            cures.append(_typed(one, finding).replace("{}", str(folder)))
    return run(cures)


def _named(one: Breakage, folder: Path) -> str:
    return one.name.replace("{}", str(folder))


def _typed(one: Breakage, finding: Diagnosis) -> str:
    match = re.search(one.cure, finding.cure)
    assert match is not None, finding
    return match.expand(one.typed)


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda one: one.name)
def test_a_breakage_is_found_and_cured(breakage: Breakage, broken: Examined, cured: Examined, folder: Path) -> None:
    name = _named(breakage, folder)
    assert name in broken.bad, broken.output
    assert broken.bad[name].level == breakage.level
    found = cured.bad.get(name)
    # a directory that can be written may still be small or slow, and a cured name may be that of this machine alone
    assert found is None or (found.level == "warning" and found.what != broken.bad[name].what), cured.output


def test_exit_statuses(broken: Examined, cured: Examined) -> None:
    assert broken.status == 1
    assert cured.status == 0, cured.output


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment with the packages of this one, but not those of ``CHANGED``.

    Those that it has are links in a folder outside of it: what pip finds there it neither removes nor overwrites.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    left_out = {"__pycache__", "mm", "checkpoint", "demo", *(top for name in CHANGED for top in _tops(name))}
    others = tmp_path / "others"
    others.mkdir()
    for path in PACKAGES.iterdir():
        if path.suffix != ".pth" and path.name not in left_out:
            (others / path.name).symlink_to(path)
    (_site(tmp_path / "env") / "others.pth").write_text(f"{others}\n")
    return tmp_path / "env"


def _site(environment: Path) -> Path:
    (packages,) = environment.glob("lib/python*/site-packages")
    return packages


def _tops(package: str) -> set[str]:
    """The files and folders of ``package`` in this environment, its metadata too."""
    return {one.parts[0] for one in distribution(package).files or () if one.parts[0] != ".."}


def _wheel_of(package: str, folder: Path) -> None:
    """The wheel from which ``package`` was installed here, made again from its files."""
    own = distribution(package)
    tags = re.findall(r"^Tag: (.+)$", own.read_text("WHEEL") or "", re.MULTILINE)
    start = tags[0].rsplit("-", 1)[0]
    name = f"{package.replace('-', '_')}-{own.version}-{start}-{'.'.join(tag.rsplit('-', 1)[1] for tag in tags)}.whl"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for file in dict.fromkeys(own.files or ()):
            if file.parts[0] != ".." and "__pycache__" not in file.parts:
                wheel.write(str(file.locate()), str(file))


def test_packages_that_are_missing_old_or_damaged(environment: Path, tmp_path: Path) -> None:
    """What compares versions is itself missing at first, so a second look finds more."""
    python = str(environment / "bin/python")
    for name in CHANGED:
        _wheel_of(name, tmp_path)
    info = f"tqdm-{distribution('tqdm').version}.dist-info"
    shutil.copytree(PACKAGES / info, _site(environment) / info)  # without the package itself
    _install_as("simplejpeg", "1.0.0", environment)

    def look(cures: list[str]) -> Examined:
        offline = f"export PIP_NO_INDEX=1 PIP_FIND_LINKS={tmp_path} PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1"
        # between two of them pip says what is still missing
        quiet = [f"{cure} 2>>{tmp_path}/pip.log || cat {tmp_path}/pip.log" for cure in cures]
        return examined("--no-trial", f"--directory={tmp_path}", lines=[offline, *quiet], python=python)

    def cures_of(found: Examined) -> list[str]:
        return list(dict.fromkeys(one.cure for one in found.bad.values() if " -m pip install " in one.cure))

    first = look([])
    faults = {name for name, one in first.bad.items() if one.level == "fault"}
    assert {"packaging", "psutil", "annotated-types", "tqdm"} <= faults, first.output
    assert first.status == 1 and "training step" not in first.output
    second = look(cures_of(first))
    assert {one.level for one in second.bad.values() if one.name in declared_names()} == {"warning"}, second.output
    assert "1.0.0 is outside the tested range" in second.bad["simplejpeg"].what
    third = look(cures_of(second))
    assert not third.bad.keys() & {*declared_names(), "versions", "imports"}, third.output
    assert third.status == 0, third.output


def _install_as(package: str, version: str, environment: Path) -> None:
    """Install the files of ``package`` with the metadata of another version."""
    own = distribution(package).version
    for top in _tops(package):
        shutil.copytree(PACKAGES / top, _site(environment) / top.replace(own, version))
    info = _site(environment) / f"{package}-{version}.dist-info"
    for file in ("METADATA", "RECORD"):
        text = (info / file).read_text()
        (info / file).write_text(text.replace(f"Version: {own}", f"Version: {version}").replace(
            f"{package}-{own}", f"{package}-{version}"))
