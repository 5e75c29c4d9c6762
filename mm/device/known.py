"""Looks up devices of known type by the name that their driver reports.

The whole name must match, so a slice of a device (MIG) or a later type is never mistaken for a known one.  Unknown
devices have no peak, and MFU is not reported.
"""

import re

from mm.device.platform import KnownDevice, Platform
from mm.device.platforms import PLATFORMS

KNOWN_DEVICES = tuple(device for platform in PLATFORMS for device in platform.known_devices)


def known_device(name: str) -> KnownDevice | None:
    """The type of the device whose driver reports ``name``; None if it is not known."""
    short = name.removeprefix("NVIDIA ")
    return next((one for one in KNOWN_DEVICES if re.fullmatch(one.names, short)), None)


def peak_flops(name: str) -> float | None:
    """Peak bf16 FLOP/s of the device whose driver reports ``name``; None if no published number is known."""
    found = known_device(name)
    return None if found is None else found.peak_flops


def peak_notes(platform: Platform, name: str) -> tuple[str, ...]:
    """A note if the device's peak is unknown, so MFU is not reported; none for a platform without published peaks."""
    if not platform.known_devices or peak_flops(name) is not None:
        return ()
    return (f"no published peak FLOP/s is known for {name}, so MFU is not reported",)
