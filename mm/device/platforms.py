"""All platforms, and the choice among them: the only module that imports the devices' files."""

from collections.abc import Iterator

from mm.device.cpu import CPU
from mm.device.cuda import CUDA
from mm.device.npu import NPU
from mm.device.platform import Platform
from mm.errors import UserError

PLATFORMS: tuple[Platform, ...] = (NPU, CUDA, CPU)
"""In the order in which ``--device auto`` prefers them.  The last one works everywhere."""


def absent_device(wanted: str) -> Iterator[str]:
    """Why ``--check`` finds that a run could not start here with ``--device`` ``wanted``."""
    try:
        usable_platform(wanted)
    except UserError as error:
        yield f"{error}; --device auto with --check checks the files alone, on any machine"


def usable_platform(wanted: str) -> Platform:
    """The platform of this name, or for "auto" the first that can be used here.

    Raises UserError if there is none of this name, or it cannot be used here.
    """
    if wanted == "auto":
        return next(platform for platform in PLATFORMS if platform.fault() is None)
    for platform in PLATFORMS:
        if platform.name == wanted:
            if (fault := platform.fault()) is not None:
                raise UserError(f"--device {wanted}: {fault}")
            return platform
    *names, last = ("auto", *(platform.name for platform in PLATFORMS))
    raise UserError(f"--device is {wanted!r}; expected {', '.join(names)} or {last}")
