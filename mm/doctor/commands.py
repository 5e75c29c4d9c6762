"""The checks of ``mm-doctor``, from those that need nothing to those that need everything."""

import os
import platform
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from mm.config.choices import DeviceName
from mm.config.command_line import CommandLine
from mm.config.schema import APPENDS, STRICT, Count, Group, NaturalNumber, Positive
from mm.doctor.diagnosis import Diagnosis, Level, fault, ok
from mm.doctor.imports import import_findings, start_imports
from mm.doctor.machine import directory_findings, file_findings, memory_findings, temporary_findings
from mm.doctor.network import host_findings, name_findings
from mm.doctor.packages import package_findings
from mm.doctor.trial import TrialNode, trial_findings
from mm.doctor.variables import variable_findings
from mm.errors import UserError, printable
from mm.files import write_whole
from mm.version import version_line

if TYPE_CHECKING:
    from mm.device.platform import Platform


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DoctorFlags:
    """``mm-doctor``."""

    device: Annotated[DeviceName, Group("What is examined")] = Field("auto", description="what to examine")
    directory: Annotated[tuple[Path, ...], APPENDS] = Field((), title="one or more directories", description=(
        "where data is read or checkpoints are written; absent = here"))
    hosts: Annotated[tuple[str, ...], APPENDS] = Field(
        (), title="HOST or HOST:PORT", description="other nodes, which this one must reach")
    port: Count = Field(29500, description="port of --hosts without one")
    report: Path | None = Field(None, description="also write everything to this file, for an issue")

    no_trial: Annotated[bool, Group("The trial: ranks that compute and talk to each other")] = Field(
        False, description="start no ranks, for example while devices are busy")
    num_processes: Count | None = Field(
        None, description="ranks of the trial on this machine; absent = one for each device, 2 on the CPU")
    trial_seconds: Positive = Field(
        300.0, description="how long the trial may take, and how long to wait for other nodes")

    nnodes: Annotated[Count, Group("Several nodes: the same command on each of them, as for torchrun")] = Field(
        1, description="how many")
    node_rank: NaturalNumber = Field(0, description="the number of this node, from 0")
    master_addr: str = Field("localhost", description="name or address of node 0")
    master_port: Count = Field(6000, description="a free port of node 0")


DOCTOR = CommandLine("mm-doctor", "Print what a run would find on this machine, and how to mend it.", DoctorFlags)


def run(words: Sequence[str]) -> int:
    """Examine this machine, print each finding as soon as it is known, and return the exit status: 0, or 1 if there is
    a fault."""
    flags = DOCTOR.read(DOCTOR.split(words))
    if flags.node_rank >= flags.nnodes:
        raise UserError(f"--node-rank is {flags.node_rank}; expected 0 to {flags.nnodes - 1} (--nnodes)")
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
    say("\n" + ", ".join(f"{counts[level]} {level}{'s' * (level is not Level.OK and counts[level] != 1)}"
                          for level in Level))
    if flags.report is not None:
        write_whole(flags.report, ("\n".join(lines) + "\n").encode())
        sys.stdout.write(printable(f"wrote {flags.report}; attach it to an issue\n"))
    return int(counts[Level.FAULT] > 0)


def _findings(flags: DoctorFlags) -> Iterator[Diagnosis]:
    """The findings of all checks.  A check that fails does not end the others."""
    imports = start_imports()
    for name, check in (
        ("packages", package_findings),
        ("open files", file_findings),
        ("directories", lambda: _directories(flags.directory)),
        ("host name", lambda: name_findings(os.environ, is_one_of_several=bool(flags.hosts) or flags.nnodes > 1)),
        ("hosts", lambda: host_findings(flags.hosts, flags.port)),
        ("imports", lambda: import_findings(imports)),
        ("devices", lambda: _of_the_node(flags.device)),
        ("variables", lambda: _variables(flags)),
        *([] if flags.no_trial else [("trial", lambda: _trial(flags, TrialNode()))]),
        *([] if flags.nnodes == 1 else [("nodes", lambda: _between(flags))]),
    ):
        yield from _tried(name, check)


def _tried(name: str, check: Callable[[], Iterator[Diagnosis]]) -> Iterator[Diagnosis]:
    """What ``check`` finds.  Its failure is a finding, too: on a faulty machine, it may raise anything."""
    try:
        yield from check()
    except Exception as error:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        place = "" if isinstance(error, UserError | ImportError) else f" ({frame.f_code.co_filename}:{line})"
        yield fault(name, f"{type(error).__name__}: {error}{place}", _cure_of(error))


def _cure_of(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return f"install what the faults above name, or else the package of the module {error.name}"
    return "mend what the message and the faults above name"


def _directories(wanted: Sequence[Path]) -> Iterator[Diagnosis]:
    """The directories that the user gave, by default the current one, and the one for temporary files."""
    for directory in dict.fromkeys(wanted or [Path.cwd()]):
        yield from directory_findings(directory, takes_checkpoints=True)
    yield from temporary_findings(os.environ)


def _variables(flags: DoctorFlags) -> Iterator[Diagnosis]:
    import psutil  # not at the top: it may be missing, and the other checks go on

    interfaces = {name: [one.address for one in some] for name, some in psutil.net_if_addrs().items()}
    try:
        num_processes = flags.num_processes or _num_devices(flags.device)
    except (UserError, ImportError):
        num_processes = 1  # the trial reports it
    yield from variable_findings(os.environ, interfaces, os.cpu_count() or 1, num_processes)


def _trial(flags: DoctorFlags, own: TrialNode) -> Iterator[Diagnosis]:
    num_processes = flags.num_processes or _num_devices(flags.device)
    yield from trial_findings(flags.device, num_processes, flags.trial_seconds, own)


def _between(flags: DoctorFlags) -> Iterator[Diagnosis]:
    """Checks between the nodes: first of the network, then, unless there is a fault, a trial on all their devices."""
    from mm.device.platforms import PLATFORMS
    from mm.doctor.nodes import Nodes

    versions = {name: version for one in PLATFORMS for name, version in one.versions().items()}
    nodes = Nodes(flags.node_rank, flags.nnodes, flags.master_addr, flags.master_port, flags.trial_seconds)
    ports = list[int]()
    yield from nodes.findings(flags.num_processes or _num_devices(flags.device), versions, os.environ, ports)
    if ports and not flags.no_trial:
        yield from _trial(flags, TrialNode(flags.node_rank, flags.nnodes, flags.master_addr, ports[0]))


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
    what, _, cure = reason.partition("; ")
    if not files or not is_wanted:
        return ok(f"{one.name} devices", f"none: {what}")
    return fault(f"{one.name} devices", f"{', '.join(files)} exist, but {what}", cure)
