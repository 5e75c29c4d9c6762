"""What identifies a process beyond its number, and how a process that we start ends with the one that started it."""

import fcntl
import os
import secrets
import select
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def node_id(namespace: str) -> str:
    """An id shared by the processes of this machine in the same Linux ``namespace``; unique per call if unknown.

    Processes of one "net" namespace can reach each other's abstract sockets, those of one "pid" namespace see each
    other's process ids.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id} {os.readlink(f'/proc/self/ns/{namespace}')}"
    except OSError:
        return secrets.token_hex(16)


def began(pid: int) -> str | None:
    """When a process of this machine began, in the kernel's clock ticks since boot: process ids are reused.

    None if it does not exist or is a zombie.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


Identity = tuple[str, int, str]
"""Node, process id, and when the process began."""


def own_identity() -> Identity:
    """This process."""
    return node_id("pid"), os.getpid(), began(os.getpid()) or ""


def kill(processes: Iterable[Identity]) -> None:
    """Kill those of the processes that run on this machine."""
    here = node_id("pid")
    for node, pid, start in processes:
        if node == here and began(pid) == start:
            with suppress(OSError):  # it has just ended, or is another user's
                os.kill(pid, signal.SIGKILL)


def end_with(pipe: int) -> None:
    """Let the system kill this process, even while it is stopped, as soon as no process has the other end of ``pipe``
    open any more.  Nothing may be written to the pipe.

    PR_SET_PDEATHSIG would end it with the thread that has started it.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    ends = select.poll()
    ends.register(pipe)
    if ends.poll(0):  # it was closed before
        os._exit(1)
