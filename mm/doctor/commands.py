"""The checks of ``mm-doctor``, from those that need nothing to those that need everything."""

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from glob import glob
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, get_args

import psutil

from mm.config.flags import DeviceName
from mm.console import add_common_flags
from mm.doctor.diagnosis import Diagnosis, Level, fault, ok, read_lines
from mm.doctor.machine import directory_findings, file_findings, host_findings, memory_findings, name_findings
from mm.doctor.packages import package_findings
from mm.doctor.variables import variable_findings
from mm.errors import UserError, printable
from mm.files import write_whole
from mm.progress import ongoing
from mm.version import version_line

if TYPE_CHECKING:
    from mm.device.platform import Platform

_RANK = "mm.doctor.rank"
_RANK_SECONDS, _END_SECONDS = 300.0, 20.0
_FAILURES = (UserError, ImportError, OSError, RuntimeError)
"""What a check may raise on a machine that is not in order."""
_OF_A_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which a launcher places a process in a job."""
_ERROR = re.compile(r"^(?:\[rank ?\d+\]:? )?([\w.]*Error: .+|error: .+)$", re.MULTILINE)


def run(words: Sequence[str]) -> int:
    """Examine this machine, print each finding at once, and return the exit status: 0, or 1 if there is a fault."""
    flags = _parser().parse_args(words)
    lines, counts = list[str](), Counter[Level]()

    def say(line: str) -> None:
        lines.append(line)
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    say(version_line("mm-doctor"))
    say(f"{platform.platform()}, {time.strftime('%Y-%m-%d')}\n")
    for finding in _findings(flags):
        counts[finding.level] += 1
        say(finding.text())
    say("\n" + ", ".join(f"{counts[level]} {level}" for level in Level))
    if flags.report is not None:
        write_whole(flags.report, ("\n".join(lines) + "\n").encode())
        sys.stdout.write(printable(f"wrote {flags.report}; attach it to an issue\n"))
    return int(counts[Level.FAULT] > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("mm-doctor", allow_abbrev=False, description=(
        "Prints what a run would find on this machine, and how to mend it."))
    add_common_flags(parser, version_line("mm-doctor"), "mm-doctor")
    parser.add_argument("--device", default="auto", choices=get_args(DeviceName), help="what to examine (default auto)")
    parser.add_argument("--num-processes", type=int, metavar="N",
                        help="ranks of the trial on this machine; absent = one for each device, 2 on the CPU")
    parser.add_argument("--directory", type=Path, action="append", metavar="DIR",
                        help="where data is read or checkpoints are written; may be repeated (default: here)")
    parser.add_argument("--hosts", nargs="*", default=[], metavar="HOST[:PORT]",
                        help="other nodes, which this one must reach")
    parser.add_argument("--port", type=int, default=29500, help="port of --hosts without one (default 29500)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write all of it to a file, for an issue")
    return parser


def _findings(flags: argparse.Namespace) -> Iterator[Diagnosis]:
    yield from package_findings()
    yield from file_findings()
    yield from _tried("directories", lambda: _directories(flags.directory))
    yield from name_findings()
    yield from host_findings(flags.hosts, flags.port)
    yield from _tried("devices", lambda: _of_the_node(flags.device))
    yield from _variables(flags)
    yield from _tried("trial", lambda: _trial(flags.device, flags.num_processes or _num_devices(flags.device)))


def _tried(name: str, check: Callable[[], Iterator[Diagnosis]]) -> Iterator[Diagnosis]:
    """What ``check`` finds; if it fails, that is a finding, and the checks after it go on."""
    try:
        yield from check()
    except _FAILURES as error:
        yield fault(name, f"{type(error).__name__}: {error}", "mend what the message and the faults above name")


def _directories(wanted: Sequence[Path] | None) -> Iterator[Diagnosis]:
    """Those of the user, by default the current one, and the one for temporary files."""
    for directory in dict.fromkeys(wanted or [Path.cwd()]):
        yield from directory_findings(directory, takes_checkpoints=True)
    yield from directory_findings(Path(gettempdir()), takes_checkpoints=False)


def _variables(flags: argparse.Namespace) -> Iterator[Diagnosis]:
    interfaces = {name: [one.address for one in some] for name, some in psutil.net_if_addrs().items()}
    try:
        num_processes = flags.num_processes or _num_devices(flags.device)
    except _FAILURES:
        num_processes = 1  # the trial reports it
    yield from variable_findings(os.environ, interfaces, os.cpu_count() or 1, num_processes)


def _num_devices(wanted: str) -> int:
    """Ranks of the trial; raises UserError if the device cannot be used."""
    from mm.device.platforms import usable_platform

    return usable_platform(wanted).num_devices() or 2


def _of_the_node(wanted: str) -> Iterator[Diagnosis]:
    from mm.device.platforms import PLATFORMS
    from mm.training.machine import Node

    node = Node.here()
    yield from memory_findings(node.host_bytes, node.shared_bytes)
    for one in PLATFORMS:
        yield _usable(one, is_wanted=wanted in ("auto", one.name))
        for is_certain, text in one.version_findings(node.versions):
            what, _, cure = text.partition(": ")
            yield Diagnosis(Level.FAULT if is_certain else Level.WARNING, f"{one.name} versions", what, cure)


def _usable(one: "Platform", *, is_wanted: bool) -> Diagnosis:
    reason, files = one.fault(), sorted(glob(one.device_files)) if one.device_files else []
    if reason is None:
        return ok(f"{one.name} devices", "usable")
    if not files or not is_wanted:
        return ok(f"{one.name} devices", f"none: {reason}")
    what, _, cure = reason.partition("; ")
    return fault(f"{one.name} devices", f"{', '.join(files)} exist, but {what}", cure)


def _trial(wanted: str, num_processes: int) -> Iterator[Diagnosis]:
    """What the ranks of a small job find."""
    with TemporaryDirectory(prefix="mm-doctor-") as folder:
        output = Path(folder) / "found.jsonl"
        words = [sys.executable, "-m", "mm.launch", "--standalone", "--nnodes", "1", "--nproc_per_node",
                 str(num_processes), "-m", _RANK, str(output), wanted]
        process = subprocess.Popen(words, env=_environment(), text=True, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE)
        try:
            with ongoing(f"trial of {num_processes} processes, of at most {_RANK_SECONDS:.0f} s"):
                _, errors = process.communicate(timeout=_RANK_SECONDS)
        except subprocess.TimeoutExpired:
            errors = None
        finally:
            _end(process)
        found = read_lines(output.read_bytes()) if output.exists() else []
        yield from found
        after = f" after: {found[-1].name}, {found[-1].what}" if found else ""
        if errors is None:
            what = f"{num_processes} processes wait for each other: no end within {_RANK_SECONDS:.0f} s{after}"
            yield fault("trial", what, (
                "see whether --num-processes 1 works; if so, look at the network interface (GLOO_SOCKET_IFNAME, "
                "HCCL_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and at the links between the devices"))
        elif process.returncode or not found:
            again = " ".join([*words[:-2], os.devnull, wanted])
            what = f"{num_processes} processes ended with status {process.returncode}{after}: {_cause(errors)}"
            yield fault("trial", what, f"to see all of it: {again}")


def _environment() -> dict[str, str]:
    """This process's, without what a launcher or a pod says of a larger job."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("PET_", "TORCHELASTIC_")) and name not in _OF_A_JOB}
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONWARNINGS": "ignore"}


def _end(process: subprocess.Popen) -> None:
    """Let the launcher end its ranks; if it is killed instead, they notice (``end_with_launcher``)."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _cause(output: str) -> str:
    """The first error that is not the launcher's, or else the last line."""
    errors = [one for one in _ERROR.findall(output) if "ChildFailedError" not in one]
    return (errors or output.strip().splitlines()[-1:] or ["no output"])[0]
