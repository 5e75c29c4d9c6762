"""What ``mm-doctor`` finds without starting a rank: limits, memory, directories, host name, variables, and packages.

Versions are read from metadata alone, because a broken package may be impossible to import; and nothing here needs a
package at import.
"""

import errno
import importlib
import importlib.util
import json
import os
import shutil
import socket
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import distribution
from pathlib import Path
from tempfile import NamedTemporaryFile, gettempdir

from mm.console import whole_number
from mm.environment import (
    DISTRIBUTION,
    declared,
    declared_names,
    installed,
    launcher_problems,
    without_collection,
)
from mm.errors import counted, printable
from mm.files import json_object, whole_lines
from mm.process import open_file_limit

ENOUGH_FILES = 4096
"""One process with everything imported needs some 260 (``mm.run.resources``); many ranks need more."""
ENOUGH_SHARED_BYTES = 1 << 30
"""Containers have 64 MiB unless told otherwise; a microbatch of large images takes more than that."""
ENOUGH_HOST_BYTES = 4 << 30
MIN_DISK_BYTES, ENOUGH_DISK_BYTES = 1 << 28, 20 << 30
CHECKPOINT_BYTES = 116e9
"""A training checkpoint of 7B, all trained: bf16 weights, fp32 copies and two moments."""
SLOW_DISK_BYTES = 100e6
"""Bytes per second below which a directory is called slow: a checkpoint of 7B takes 20 minutes."""
_PROBE_BYTES = 64 << 20
_GB = 1e9


class Level(str, Enum):
    """How bad it is."""

    __str__ = str.__str__

    OK = "ok"
    WARNING = "warning"
    """A run may work, but slowly, or not everywhere."""
    FAULT = "fault"
    """Runs fail here."""


@dataclass(frozen=True)
class Diagnosis:
    """What was looked at, what was found, and what to do about it."""

    level: Level
    name: str
    what: str
    cure: str = ""

    def text(self) -> str:
        """One line, and a second one with the cure."""
        cure = f"\n{'':9}cure: {self.cure}" if self.cure else ""
        return printable(f"{self.level:8} {self.name}: {self.what}{cure}")

    def line(self) -> str:
        """For ``read_lines``."""
        return json.dumps(asdict(self)) + "\n"


def read_lines(content: bytes) -> list[Diagnosis]:
    """Findings in the order in which a process wrote them, without one that it was writing when it ended."""
    return [Diagnosis(**one | {"level": Level(one["level"])}) for one in map(json_object, whole_lines(content))]


def ok(name: str, what: str) -> Diagnosis:
    return Diagnosis(Level.OK, name, what)


def warning(name: str, what: str, cure: str) -> Diagnosis:
    return Diagnosis(Level.WARNING, name, what, cure)


def fault(name: str, what: str, cure: str) -> Diagnosis:
    return Diagnosis(Level.FAULT, name, what, cure)


# Limits, memory, directories and the host name


def file_findings() -> Iterator[Diagnosis]:
    limit = open_file_limit()
    if limit < ENOUGH_FILES:
        yield warning("open files", f"a process may open {limit:,}; jobs of many ranks need more", "let root raise the "
                      "hard limit (/etc/security/limits.conf), or docker run --ulimit nofile=65536")
    else:
        yield ok("open files", f"{limit:,}")


def memory_findings(host_bytes: int, shared_bytes: int | None) -> Iterator[Diagnosis]:
    """``host_bytes``: that processes can still allocate; ``shared_bytes``: free in /dev/shm, None without it."""
    text = f"{host_bytes / _GB:,.1f} GB free, {os.cpu_count()} cores"
    if host_bytes < ENOUGH_HOST_BYTES:
        yield warning("host memory", text, "end other processes (ps aux --sort=-rss | head), or docker run --memory")
    else:
        yield ok("host memory", text)
    if shared_bytes is None or shared_bytes < ENOUGH_SHARED_BYTES:
        found = "does not exist" if shared_bytes is None else f"has {shared_bytes / 1e6:,.0f} MB free"
        yield warning("shared memory", f"/dev/shm {found}; data workers pass pixels through it, and die without room",
                      "docker run --shm-size 16g, or mount -o remount,size=16g /dev/shm, or --num-workers 0")
    else:
        yield ok("shared memory", f"{shared_bytes / _GB:,.1f} GB free")


def directory_findings(directory: Path, *, takes_checkpoints: bool) -> Iterator[Diagnosis]:
    """Whether files can be written there, how fast, and how much fits.  ``takes_checkpoints``: whether checkpoints are
    written there, or only small files."""
    name = f"directory {directory}"
    try:
        found = os.statvfs(directory)
        free = found.f_bavail * found.f_frsize
        if free < MIN_DISK_BYTES:
            yield fault(name, f"{free / 1e6:,.0f} MB free", "delete files, or choose another directory")
            return
        speed = _bytes_per_second(directory)
    except OSError as error:
        what = error.strerror or str(error)
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            yield warning(name, f"{what}: enough for data, but nothing can be saved there",
                          "choose another directory for --save")
        else:
            cure = f"mkdir -p '{directory}'" if error.errno == errno.ENOENT else "choose another directory"
            yield fault(name, what, cure)
        return
    text = (f"{free / _GB:,.0f} GB free, {speed / 1e6:,.0f} MB/s written: a checkpoint of 7B with optimizer takes "
            f"{CHECKPOINT_BYTES / speed / 60:,.0f} min")
    if takes_checkpoints and free < ENOUGH_DISK_BYTES:
        yield warning(name, text, "no checkpoint of 3B fits; choose another directory for --save")
    elif takes_checkpoints and speed < SLOW_DISK_BYTES:
        yield warning(name, text, "choose a faster directory for --save, or --async-save")
    else:
        yield ok(name, text)


def _bytes_per_second(directory: Path) -> float:
    """Written through to the disk."""
    with NamedTemporaryFile(dir=directory, prefix=".mm-doctor-") as file:
        block = os.urandom(1 << 20)
        began = time.perf_counter()
        for _ in range(_PROBE_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _PROBE_BYTES / (time.perf_counter() - began)


def temporary_findings(environment: Mapping[str, str]) -> Iterator[Diagnosis]:
    """The directory for temporary files.  Python silently skips a TMPDIR that it cannot write to."""
    used = gettempdir()
    wanted = environment.get("TMPDIR") or used
    if os.path.realpath(wanted) != os.path.realpath(used):
        yield warning("TMPDIR", f"{wanted} cannot be written to, so Python uses {used}",
                      f"mkdir -p '{wanted}', or unset TMPDIR")
    yield from directory_findings(Path(used), takes_checkpoints=False)


def name_findings(environment: Mapping[str, str], *, is_one_of_several: bool) -> Iterator[Diagnosis]:
    """Whether this machine can resolve its own name, as gloo does unless GLOO_SOCKET_IFNAME is set."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        yield fault("host name", f"{name} has no address ({error.strerror}); gloo looks it up",
                    f"add `127.0.0.1 {name}` to /etc/hosts for one machine, its own address for several")
        return
    if is_one_of_several and address.startswith("127.") and not environment.get("GLOO_SOCKET_IFNAME"):
        yield fault("host name", f"{name} is {address}, which other machines cannot reach",
                    f"give {name} its own address in /etc/hosts, or set GLOO_SOCKET_IFNAME to its interface")
    else:
        yield ok("host name", f"{name} is {address}")


# Environment variables that make runs fail or slow

_SHOWN = ("ACLNN_", "ASCEND_", "ATB_", "CANN_", "COMBINED_", "CPU_AFFINITY", "CUDA_", "GLOO_", "HCCL_", "MASTER_",
          "MKL_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_", "TASK_QUEUE", "TORCH_", "TP_")
"""Prefixes of the names that matter."""
_PATTERNS = ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
_INTERFACES = (*_PATTERNS, "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_SLOW = {"CUDA_LAUNCH_BLOCKING": "1", "ASCEND_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
         "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}  # fmt: skip
"""Values that are for debugging, or that turn a fast link off."""
_CONNECT_SECONDS = range(120, 7201)
"""HCCL's documentation of HCCL_CONNECT_TIMEOUT."""


def variable_findings(
    environment: Mapping[str, str], interfaces: Sequence[str], num_cores: int, num_processes: int
) -> Iterator[Diagnosis]:
    """``interfaces``: names of the network interfaces; ``num_processes``: ranks on this machine."""
    for name in _INTERFACES:
        if (value := environment.get(name)) and not _names_an_interface(name, value, interfaces):
            yield fault(name, f"{value!r} names no interface of this machine, which has {', '.join(interfaces)}",
                        f"unset {name}, or set it to the interface of the training network")
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        if environment.get(name) == "":
            yield warning(name, "set and empty, which hides all devices", f"unset {name}")
    for name, value in _SLOW.items():
        if environment.get(name, "").upper() == value:
            yield warning(name, f"{value} makes runs slow", f"unset {name} when nothing is to be debugged")
    connect, threads = environment.get("HCCL_CONNECT_TIMEOUT"), whole_number(environment.get("OMP_NUM_THREADS", "1"))
    if connect is not None and whole_number(connect) not in _CONNECT_SECONDS:
        yield fault("HCCL_CONNECT_TIMEOUT", f"{connect!r}; HCCL takes 120 to 7200 seconds",
                    "export HCCL_CONNECT_TIMEOUT=1200")
    if not threads or (threads > 1 and threads * num_processes > num_cores):
        yield warning("OMP_NUM_THREADS", f"{threads or environment['OMP_NUM_THREADS']!r} threads in each of "
                      f"{num_processes} processes, on {num_cores} cores",
                      f"export OMP_NUM_THREADS={max(1, num_cores // num_processes)}")
    for problem in launcher_problems(environment):
        yield fault("launcher", problem, "unset it: torchrun sets it in each rank that it starts")
    shown = sorted(f"{name}={value}" for name, value in environment.items() if name.startswith(_SHOWN))
    yield ok("variables", ", ".join(shown) or "none that matter")


def _names_an_interface(name: str, value: str, interfaces: Sequence[str]) -> bool:
    """Whether the ``value`` of variable ``name`` is valid here.

    NCCL and HCCL take a list of prefixes of names, of which one must exist; ^ excludes them, and = demands whole names.
    gloo takes a list of prefixes, all of which must exist, and knows neither ^ nor = (seen with torch 2.13).
    """
    if name not in _PATTERNS:
        return all(word and any(one.startswith(word) for one in interfaces) for word in value.split(","))
    if value.startswith("^"):
        return True
    exact, words = value.startswith("="), value.lstrip("=").split(",")
    return any(one == word if exact else one.startswith(word) for one in interfaces for word in words if word)


# Packages: whether they are those that the trainer needs, can be imported, and hide each other

_ROOT = Path(__file__).resolve().parent.parent.parent
"""The folder that holds the package ``mm``."""
_ADAPTOR = "mindspeed.megatron_adaptor"
_MODULES = {"pillow": "PIL", "pyyaml": "yaml", "megatron-core": "megatron.core"}
"""What is imported for a package whose module has another name."""
_TRIED_LATER = ("torch", "megatron-core")
"""Other checks import them, and megatron only once a device is chosen; here they are only looked up."""


def package_findings() -> Iterator[Diagnosis]:
    yield ok("python", f"{sys.version.split()[0]} in {sys.prefix}")
    if sys.flags.optimize:
        yield warning("python", "PYTHONOPTIMIZE or -O is set, which removes the program's own checks",
                      "unset PYTHONOPTIMIZE")
    yield from _versions()
    yield from _imports()
    yield from _mindspeed()


def _versions() -> Iterator[Diagnosis]:
    if installed(DISTRIBUTION) is None:
        yield fault("package", f"{DISTRIBUTION} is not installed in this Python, so its requirements are not known",
                    f"{sys.executable} -m pip install --editable '{_ROOT}'")
        return
    if installed("packaging") is None:  # which compares versions
        for name in declared_names():
            if installed(name) is None:
                yield fault(name, "not installed", f"{sys.executable} -m pip install '{name}'")
        return
    found = list[str]()
    for requirement in declared():
        version, name = installed(requirement.name), requirement.name
        install = f"{sys.executable} -m pip install '{name}{requirement.specifier}'"
        if version is None:
            yield fault(name, "not installed", install)
        elif not requirement.specifier.contains(version, prereleases=True):
            yield warning(name, f"{version} is outside the tested range, {requirement.specifier}", install)
        else:
            found.append(f"{name} {version}")
    yield ok("versions", ", ".join(found))


def _imports() -> Iterator[Diagnosis]:
    """Import the installed packages, as a program in the current folder would."""
    names, num_good = [name for name in declared_names() if installed(name) is not None], 0
    for name in names:
        module = _MODULES.get(name, name.replace("-", "_"))
        try:
            place = _hiding(name, module)
            if name not in _TRIED_LATER:
                with without_collection():
                    importlib.import_module(module)
        except Exception as error:  # an import may raise anything, and it is reported
            yield fault(name, f"`import {module}` fails: {type(error).__name__}: {error}",
                        f"{sys.executable} -m pip install --force-reinstall --no-deps '{name}=={installed(name)}', "
                        f"and what the message names")
            continue
        if place is None:
            num_good += 1
        else:
            yield warning(name, f"`import {module}` finds {place}, not {name} {installed(name)}, which is installed",
                          f"remove {place.parents[module.count('.')]} from PYTHONPATH, or start from another folder")
    yield ok("imports", counted(num_good, "package"))


def _hiding(name: str, module: str) -> Path | None:
    """Where ``module`` is, if that is not where the package ``name`` was installed."""
    spec, own = importlib.util.find_spec(module), distribution(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {module!r}")
    origin = Path(spec.origin)
    is_editable = '"editable": true' in (own.read_text("direct_url.json") or "")
    if is_editable or origin.is_relative_to(str(own.locate_file(""))):
        return None
    return origin.parent if origin.name == "__init__.py" else origin


def _mindspeed() -> Iterator[Diagnosis]:
    """MindSpeed-MM has a package and a command of our names, and MindSpeed patches megatron."""
    spec = importlib.util.find_spec("checkpoint")
    places = [] if spec is None else list(spec.submodule_search_locations or [spec.origin or "built in"])
    if others := [one for one in places if Path(one).resolve() != _ROOT / "checkpoint"]:
        yield fault("package checkpoint", f"`import checkpoint` finds {', '.join(others)}, not {_ROOT / 'checkpoint'}",
                    f"remove {' and '.join(str(Path(one).parent) for one in others)} from PYTHONPATH, or use an "
                    f"environment of its own for this trainer, apart from MindSpeed-MM's")
    path, own = shutil.which("mm-convert"), Path(sysconfig.get_path("scripts")) / "mm-convert"
    if path is not None and own.exists() and not own.samefile(path):
        yield warning("PATH", f"a shell starts {path}; this environment's is {own}", f"export PATH={own.parent}:$PATH")
    if _ADAPTOR in sys.modules:
        place = getattr(sys.modules.get("sitecustomize"), "__file__", None) or "sitecustomize.py"
        yield fault("mindspeed", f"{_ADAPTOR} is loaded in every Python here, and replaces parts of megatron",
                    f"remove its import from {place} or a .pth file of site-packages; MindSpeed may stay")
