"""The limits of a machine: open files, memory, directories and clock."""

import errno
import os
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile, gettempdir

from mm.doctor.diagnosis import Diagnosis, fault, ok, warning

MIN_FILES, ENOUGH_FILES, WANTED_FILES = 300, 4096, 65536
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
CLOCK_SECONDS = 2.0
_GB = 1e9
_TEMPORARY = "TMPDIR", "TEMP", "TMP"


def file_findings() -> Iterator[Diagnosis]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = ((1 << 62) if one == resource.RLIM_INFINITY else one for one in (soft, hard))
    most = min(hard, WANTED_FILES)  # a shell without rights cannot go beyond the hard limit
    cure = (f"ulimit -n {most} before the launcher" if most >= MIN_FILES else
            "let root raise the hard limit (/etc/security/limits.conf)") + (
        f", or docker run --ulimit nofile={WANTED_FILES}")
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

    ``takes_checkpoints``: whether checkpoints are written there, or only small files.
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
    if abs(skew) > CLOCK_SECONDS:
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


def temporary_findings(environment: Mapping[str, str]) -> Iterator[Diagnosis]:
    """The directory for temporary files.  Python silently skips a TMPDIR that it cannot write to."""
    used = gettempdir()
    wanted = next((environment[name] for name in _TEMPORARY if environment.get(name)), used)
    if os.path.realpath(wanted) != os.path.realpath(used):
        yield warning("TMPDIR", f"{wanted} cannot be written to, so Python uses {used}",
                      f"mkdir -p '{wanted}', or unset TMPDIR")
    yield from directory_findings(Path(used), takes_checkpoints=False)
