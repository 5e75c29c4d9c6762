"""Devices that are known by the name that their driver reports.

A name is compared as a whole, so that a slice of a device (MIG) or a later type is never taken for one of these.  What
is not here has no peak, and MFU is left out.
"""

import re

from mm.device.platform import KnownDevice, Platform
from mm.device.platforms import PLATFORMS

KNOWN_DEVICES = tuple(device for platform in PLATFORMS for device in platform.known_devices)


def known_device(name: str) -> KnownDevice | None:
    """The type of a device by the ``name`` that its driver reports; None for one that is not known."""
    short = name.removeprefix("NVIDIA ")
    return next((one for one in KNOWN_DEVICES if re.fullmatch(one.names, short)), None)


def peak_flops(name: str) -> float | None:
    """Peak bf16 FLOP/s of a device by the ``name`` that its driver reports; None where no published number is known."""
    found = known_device(name)
    return None if found is None else found.peak_flops


def peak_notes(platform: Platform, name: str) -> tuple[str, ...]:
    """Note that the device's peak is unknown, so there is no MFU; nothing for a platform without published peaks."""
    if not platform.known_devices or peak_flops(name) is not None:
        return ()
    return (f"no published peak is known of {name}, so MFU is left out",)
