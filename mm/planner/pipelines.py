"""Measures the host's work for a pass through a pipeline: schedule, messages and their waits, besides the blocks."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from mm.batch import BatchTotals, Microbatch, StepPlan
from mm.config.flags import Arguments
from mm.config.model import ModelConfig
from mm.device.device import Device
from mm.model.stage import Stage
from mm.parallel import mesh as parallel
from mm.parallel.mesh import Mesh
from mm.planner.links import mean_of_ranks
from mm.training.step import Setup, forward_backward

NUM_REPEATS = 7
_FEW, _MANY = 4, 16
"""Microbatches of two steps, whose difference has no start and no end of a pipeline."""


def two_stages(model: ModelConfig) -> ModelConfig:
    """A ViT layer on the first stage and an LLM layer on the second, of the widths of ``model``, all trained."""
    vision = replace(model.vision, num_layers=1, pipeline_num_layers=((1, 0),), fullatt_block_indexes=())
    language = replace(model.language, num_layers=1, pipeline_num_layers=((0, 1),))
    return replace(model, vision=vision, language=language).unfrozen.base


def seconds_of_microbatch(device: Device, args: Arguments, model: ModelConfig, microbatch: Microbatch) -> float:
    """How much longer a step of ``two_stages`` takes for each further microbatch.  Needs an even number of ranks."""
    small = two_stages(model)
    mesh = parallel.start(device, small, tp_size=1)
    setup = _setup(device, mesh, args, small)
    few, many = (_seconds(setup, microbatch, count) for count in (_FEW, _MANY))
    found = mean_of_ranks((many - few) / (_MANY - _FEW), mesh)
    parallel.stop_mesh()
    return found


def _setup(device: Device, mesh: Mesh, args: Arguments, model: ModelConfig) -> Setup:
    stage = Stage(model, mesh, args.precision, device)
    with torch.no_grad():
        for _, parameter in stage.named_parameters():
            parameter.normal_(0.0, 0.02)
    return Setup.build(stage, mesh, args)


def _seconds(setup: Setup, microbatch: Microbatch, count: int) -> float:
    """The median time of forward and backward of ``count`` microbatches, without the first, which warms up."""
    device, batch = setup.stage.device, [microbatch] * count
    totals = BatchTotals.of(batch * setup.mesh.dp_size, setup.stage.model.vision)
    seconds: list[float] = []
    for _ in range(NUM_REPEATS + 1):
        dist.barrier()
        marks = [device.mark()]
        forward_backward(setup, StepPlan(tuple(batch), totals))
        marks.append(device.mark())
        device.synchronize()
        began, ended = device.seconds_of(marks)
        seconds.append(ended - began)
    return median(seconds[1:])


def pass_seconds(of_microbatch: float, work: Sequence[Sequence[float]]) -> float:
    """The host's seconds for a pass of the busier stage.  ``work``: forward and backward seconds of each stage's blocks
    for one microbatch."""
    return max(0.0, (of_microbatch - max(map(sum, work))) / 2)
