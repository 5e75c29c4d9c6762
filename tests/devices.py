"""Platforms by name, for tests of several."""

from mm.device.device import PLATFORMS
from mm.device.kernels import Fuse, Kernels, compiled
from mm.device.platform import Platform


def platform_of(name: str) -> Platform:
    (found,) = (platform for platform in PLATFORMS if platform.name == name)
    return found


def kernels_of(name: str, fuse: Fuse | None = compiled) -> Kernels:
    return platform_of(name).kernels(fuse)
