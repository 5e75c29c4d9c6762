"""Measures how fast this device is outside of a model: matrix products, and copies in its memory and from the host."""

from collections.abc import Callable
from statistics import median

import torch

from mm.config.model import ModelConfig
from mm.device.device import Device
from mm.parallel.mesh import Mesh
from mm.plan.calibration import DeviceSpeeds
from mm.planner.timing import mean_of_ranks, repeated_seconds

NUM_REPEATS = 5
_COPIED_BYTES = 64 << 20
_MAX_ROWS = 4096


def measured_speeds(device: Device, mesh: Mesh, model: ModelConfig, dtype: torch.dtype, num_rows: int) -> DeviceSpeeds:
    """The speeds of one rank while all measure.  The product is that of an MLP of the LLM with ``num_rows`` rows."""
    language, at = model.language, device.torch_device
    rows, inner, outer = min(num_rows, _MAX_ROWS), language.hidden_size, language.ffn_hidden_size
    left, right = torch.ones(rows, inner, dtype=dtype, device=at), torch.ones(inner, outer, dtype=dtype, device=at)
    whole = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=at)
    target, on_host = torch.empty_like(whole), device.runtime.pin(torch.ones(_COPIED_BYTES, dtype=torch.uint8))
    return DeviceSpeeds(
        product_flops=2.0 * rows * inner * outer / _seconds(device, mesh, lambda: torch.mm(left, right)),
        copy_bytes=2.0 * _COPIED_BYTES / _seconds(device, mesh, lambda: target.copy_(whole)),
        host_bytes=_COPIED_BYTES / _seconds(device, mesh, lambda: target.copy_(on_host, non_blocking=True)))


def _seconds(device: Device, mesh: Mesh, work: Callable[[], object]) -> float:
    """The median of the repeats, averaged over the ranks."""
    return mean_of_ranks(median(repeated_seconds(device, NUM_REPEATS, work)), mesh)
