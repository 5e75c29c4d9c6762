"""Copies from host to device that do not wait for the device.

A copy from ordinary memory makes the host wait for the work queued on the device; one from pinned memory does not.
"""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; where that is not the CPU, by way of pinned memory (torch keeps it until copied)."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
