"""``mm-doctor``: what a run would find on this machine, each line ok, warning or fault with its cure.

    mm-doctor [--device auto] [--directory DIR] [--report FILE] [--nnodes N --node-rank R --master-addr HOST]

Nothing here needs a package at import; without pydantic, which the flags need, only packages are examined.
"""

import os
import platform
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from mm.doctor.machine import (
    Diagnosis,
    Level,
    directory_findings,
    fault,
    file_findings,
    memory_findings,
    name_findings,
    ok,
    package_findings,
    temporary_findings,
    variable_findings,
)
from mm.doctor.trial import TrialNode, trial_findings
from mm.environment import version_line
from mm.errors import UserError, printable
from mm.files import write_whole
from mm.process import run_command

if TYPE_CHECKING:
    from mm.device.platform import Platform
    from mm.doctor.flags import DoctorFlags


def main(argv: Sequence[str] | None = None) -> int:
    """Examine this machine.  Returns the exit status: 0, 1 if there is a fault, 2 for a wrong command line, or 130
    after Ctrl-C."""
    return run_command(lambda: run(sys.argv[1:] if argv is None else argv), lambda: "nothing was changed")


def run(words: Sequence[str]) -> int:
    """Print each finding as soon as it is known, and return the exit status: 0, or 1 if there is a fault."""
    try:
        from mm.doctor.flags import DOCTOR
    except ModuleNotFoundError as error:  # without pydantic there is no command line; the packages are what is wrong
        if (error.name or "").partition(".")[0] == "mm":
            raise
        sys.stdout.write("".join(f"{finding.text()}\n" for finding in package_findings()))
        return 1
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


def _findings(flags: "DoctorFlags") -> Iterator[Diagnosis]:
    """The findings of all checks.  A check that fails does not end the others."""
    for name, check in (
        ("packages", package_findings),
        ("open files", file_findings),
        ("directories", lambda: _directories(flags.directory)),
        ("host name", lambda: name_findings(os.environ, is_one_of_several=flags.nnodes > 1)),
        ("devices", lambda: _devices(flags.device)),
        ("variables", lambda: _variables(flags)),
        *([] if flags.no_trial else [("trial", lambda: _trial(flags))]),
    ):
        yield from _tried(name, check)


def _tried(name: str, check: Callable[[], Iterator[Diagnosis]]) -> Iterator[Diagnosis]:
    """What ``check`` finds.  Its failure is a finding, too: on a faulty machine, it may raise anything."""
    try:
        yield from check()
    except Exception as error:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        place = "" if isinstance(error, UserError | ImportError) else f" ({frame.f_code.co_filename}:{line})"
        yield fault(name, f"{type(error).__name__}: {error}{place}", "mend what the message and the faults above name")


def _directories(wanted: Sequence[Path]) -> Iterator[Diagnosis]:
    """The directories that the user gave, by default the current one, and the one for temporary files."""
    for directory in dict.fromkeys(wanted or [Path.cwd()]):
        yield from directory_findings(directory, takes_checkpoints=True)
    yield from temporary_findings(os.environ)


def _variables(flags: "DoctorFlags") -> Iterator[Diagnosis]:
    import psutil  # not at the top: it may be missing, and the other checks go on

    try:
        num_processes = flags.num_processes or _num_devices(flags.device)
    except (UserError, ImportError):
        num_processes = 1  # the trial reports it
    yield from variable_findings(os.environ, [*psutil.net_if_addrs()], os.cpu_count() or 1, num_processes)


def _trial(flags: "DoctorFlags") -> Iterator[Diagnosis]:
    """A trial of this machine alone and, unless that finds a fault, one of all nodes."""
    own = TrialNode(flags.num_processes or _num_devices(flags.device))
    all_nodes = TrialNode(own.num_processes, flags.node_rank, flags.nnodes, flags.master_addr, flags.master_port)
    for node in dict.fromkeys((own, all_nodes if flags.nnodes > 1 else own)):
        found = list(trial_findings(flags.device, flags.trial_seconds, node))
        yield from found
        if any(one.level is Level.FAULT for one in found):
            return


def _num_devices(wanted: str) -> int:
    """Ranks of the trial; raises UserError if the device cannot be used."""
    from mm.device.device import usable_platform

    return usable_platform(wanted).num_devices() or 2


def _devices(wanted: str) -> Iterator[Diagnosis]:
    """Memory, the devices, and versions of their libraries that do not work together."""
    from mm.device.device import PLATFORMS
    from mm.run.resources import Node

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


if __name__ == "__main__":
    sys.exit(main())
