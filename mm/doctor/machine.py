"""What a machine gives to a run: open files, memory, directories, clock and the way to other machines."""

import errno
import os
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from mm.doctor.diagnosis import Diagnosis, fault, ok, warning

MIN_FILES, ENOUGH_FILES = 300, 4096
"""One process with everything imported needs some 260 (``mm.training.machine``); many ranks need more."""
ENOUGH_SHARED_BYTES = 1 << 30
"""Containers have 64 MiB unless told otherwise; a microbatch of large pictures takes more than that."""
ENOUGH_HOST_BYTES = 4 << 30
MIN_DISK_BYTES, ENOUGH_DISK_BYTES = 1 << 28, 20 << 30
CHECKPOINT_BYTES = 116e9
"""A training checkpoint of 7B, all trained: bf16 weights, fp32 copies and two moments."""
SLOW_DISK_BYTES = 100e6
"""Bytes per second below which a directory is called slow: a checkpoint of 7B takes 20 minutes."""
_PROBE_BYTES = 64 << 20
_CLOCK_SECONDS = 2.0
_CONNECT_SECONDS = 3.0
_GB = 1e9


def file_findings() -> Iterator[Diagnosis]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = ((1 << 62) if one == resource.RLIM_INFINITY else one for one in (soft, hard))
    cure = "ulimit -n 65536 before the launcher, or docker run --ulimit nofile=65536"
    if hard < MIN_FILES:
        yield fault("open files", f"a process may open {hard:,}", cure)
    elif soft < ENOUGH_FILES:
        yield warning("open files", f"a process may open {soft:,}; jobs of many ranks need more", cure)
    else:
        yield ok("open files", f"{soft:,}" if soft < 1 << 62 else "unlimited")


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
    """Whether files can be written there, how fast, how much fits, and whether its clock is this machine's.

    ``takes_checkpoints``: or only small files.
    """
    name = f"directory {directory}"
    try:
        found = os.statvfs(directory)
        free = found.f_bavail * found.f_frsize
        if free < MIN_DISK_BYTES:
            yield fault(name, f"{free / 1e6:,.0f} MB free", "delete files, or choose another directory")
            return
        speed, skew = _written(directory)
    except OSError as error:
        what = error.strerror or str(error)
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            yield warning(name, f"{what}: enough for data, but nothing can be saved there",
                          "choose another directory for --save")
        else:
            cure = f"mkdir -p '{directory}'" if error.errno == errno.ENOENT else "choose another directory"
            yield fault(name, what, cure)
        return
    minutes = CHECKPOINT_BYTES / speed / 60
    text = (f"{free / _GB:,.0f} GB free, {speed / 1e6:,.0f} MB/s written: a checkpoint of 7B with optimizer takes "
            f"{minutes:,.0f} min")
    if takes_checkpoints and free < ENOUGH_DISK_BYTES:
        yield warning(name, text, "no checkpoint of 3B fits; choose another directory for --save")
    elif takes_checkpoints and speed < SLOW_DISK_BYTES:
        yield warning(name, text, "choose a faster directory for --save, or --async-save")
    else:
        yield ok(name, text)
    if abs(skew) > _CLOCK_SECONDS:
        yield warning("clock", f"the file server of {directory} is {skew:+.1f} s from this machine",
                      "let both follow one time server (chronyc makestep)")


def _written(directory: Path) -> tuple[float, float]:
    """Bytes per second written through to the disk, and seconds from this machine's clock to the file server's."""
    with NamedTemporaryFile(dir=directory, prefix=".mm-doctor-") as file:
        block = os.urandom(1 << 20)
        began = time.perf_counter()
        for _ in range(_PROBE_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        return _PROBE_BYTES / seconds, os.stat(file.name).st_mtime - time.time()


def name_findings() -> Iterator[Diagnosis]:
    """Whether this machine finds its own address: gloo asks for it by name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        yield fault("host name", f"{name} has no address ({error.strerror}); gloo looks it up",
                    f"add `127.0.0.1 {name}` to /etc/hosts for one machine, its own address for several")
        return
    if address.startswith("127."):
        yield warning("host name", f"{name} is {address}, which other machines cannot reach",
                      f"nothing for one machine; for several, give {name} its own address in /etc/hosts, or set "
                      f"GLOO_SOCKET_IFNAME")
    else:
        yield ok("host name", f"{name} is {address}")


def host_findings(hosts: Sequence[str], default_port: int) -> Iterator[Diagnosis]:
    """Whether this machine reaches other ones, by ``HOST`` or ``HOST:PORT``: that nothing listens there counts."""
    for host in hosts:
        name, _, port = host.partition(":")
        try:
            address = socket.gethostbyname(name)
        except OSError as error:
            yield fault(f"host {host}", f"has no address ({error.strerror})",
                        f"correct the name, or add it to /etc/hosts; `getent hosts {name}` must find it on every node")
            continue
        yield _reached(host, address, int(port or default_port))


def _reached(host: str, address: str, port: int) -> Diagnosis:
    began = time.perf_counter()
    try:
        with suppress(ConnectionRefusedError):  # it answered
            socket.create_connection((address, port), _CONNECT_SECONDS).close()
    except OSError as error:
        return fault(f"host {host}", f"{address} does not answer on port {port} ({error.strerror or error})",
                     f"open the ports between the nodes (iptables -L), and see that `ping {address}` works")
    return ok(f"host {host}", f"{address} answers in {1000 * (time.perf_counter() - began):.1f} ms")
