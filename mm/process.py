"""Which machine this process runs on, and when a process began: what identifies a process beyond its number."""

import os
import secrets
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
