"""Times steps of two data-parallel ranks, in turn with each of ``STRATEGIES``.

Started by ``python -m benchmarks.step sharding``; import it after ``Device.pick``.
"""

import statistics
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import median_ratio
from benchmarks.sides import Ours, random_tensors
from benchmarks.step.cpu import batch_of, model_of
from benchmarks.step.encoder import times_of
from mm.device.device import Device

NUM_STEPS, NUM_SAMPLES = 3, 2
STRATEGIES = {
    "no_shard": (),
    "optim": ("--use-distributed-optimizer",),
    "optim_grads": ("--data-parallel-sharding-strategy", "optim_grads"),
    "optim_grads, overlapped": ("--data-parallel-sharding-strategy", "optim_grads", "--overlap-grad-reduce"),
    "optim_grads_params": ("--data-parallel-sharding-strategy", "optim_grads_params"),
    "optim_grads_params, overlapped": ("--data-parallel-sharding-strategy", "optim_grads_params",
                                       "--overlap-grad-reduce", "--overlap-param-gather"),
}
FIRST = "no_shard"


def measure(device: Device, rounds: int, num_microbatches: int, is_quick: bool) -> dict[str, Any] | None:
    """For each of ``STRATEGIES``, the time of a step and its ratio to that of ``no_shard``.

    Only the first rank returns a result.
    """
    torch.set_num_threads(1)
    model = model_of(1, is_quick)
    model = replace(model, vision=replace(model.vision, freeze=False))
    tensors = random_tensors(model, device.torch_device, torch.float32)
    batch = batch_of(model, 0, NUM_SAMPLES, num_microbatches)
    seconds = {name: list[float]() for name in STRATEGIES}
    firsts: list[tuple[float, float]] = []
    for _ in range(rounds):
        for name, flags in STRATEGIES.items():
            ours = Ours(model, device, "fp32", tensors, flags=flags)
            times, first = times_of(ours, batch, 1 if is_quick else NUM_STEPS)
            seconds[name] += [taken for taken, _ in times]
            firsts.append(first)
            ours.close()
    for values in zip(*firsts, strict=True):
        assert max(values) - min(values) < 1e-5 * max(values), f"not the same training: {firsts}"
    if dist.get_rank():
        return None
    return {
        "microbatches": num_microbatches,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "ratio": {name: median_ratio(times, seconds[FIRST]) for name, times in seconds.items() if name != FIRST},
    }
