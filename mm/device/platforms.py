"""All platforms and types of devices, and the choice among them: the only module that imports the devices' files."""

import re
from collections.abc import Iterator

from mm.device.cpu import CPU
from mm.device.cuda import CUDA
from mm.device.npu import NPU
from mm.device.platform import KnownDevice, Platform
from mm.errors import UserError

PLATFORMS: tuple[Platform, ...] = (NPU, CUDA, CPU)
"""In the order in which ``--device auto`` prefers them.  The last one works everywhere."""
KNOWN_DEVICES = tuple(device for platform in PLATFORMS for device in platform.known_devices)


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


def known_device(name: str) -> KnownDevice | None:
    """The type of the device whose driver reports ``name``; None if it is not known.

    The whole name must match, so a slice of a device (MIG) or a later type is never mistaken for a known one.
    """
    short = name.removeprefix("NVIDIA ")
    return next((one for one in KNOWN_DEVICES if re.fullmatch(one.names, short)), None)


def peak_flops(name: str) -> float | None:
    """Published peak bf16 FLOP/s of the device whose driver reports ``name``; None if unknown, as MFU is then."""
    found = known_device(name)
    return None if found is None else found.peak_flops


def peak_notes(platform: Platform, name: str) -> tuple[str, ...]:
    """A note if the device's peak is unknown, so MFU is not reported; none for a platform without published peaks."""
    if not platform.known_devices or peak_flops(name) is not None:
        return ()
    return (f"no published peak FLOP/s is known for {name}, so MFU is not reported",)
