"""A rank of ``mm-doctor`` whose kernels and collectives are wrong: ``python -m tests.doctor.broken_rank FOLDER``."""

import sys
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from mm.device.device import Device
from mm.doctor import trial

all_reduce, pick = dist.all_reduce, Device.pick


def lossy(tensor: Any, *args: Any, **more: Any) -> Any:
    """Without the share of the last rank, if it is a large vector."""
    from mm.doctor.device_checks import NUM_ELEMENTS  # megatron, which it imports, asks for the device

    if tensor.numel() == NUM_ELEMENTS and dist.get_rank() == dist.get_world_size() - 1:
        tensor = tensor.zero_()
    return all_reduce(tensor, *args, **more)


def off(wanted: str) -> Device:
    device = pick(wanted)
    plain = device.kernels.rms_norm
    return replace(device, kernels=replace(
        device.kernels, rms_norm=lambda x, weight, epsilon: plain(x, weight * 1.01, epsilon)))


if __name__ == "__main__":
    dist.all_reduce, Device.pick = lossy, off
    sys.exit(trial.main([sys.argv[1], "cpu"]))
