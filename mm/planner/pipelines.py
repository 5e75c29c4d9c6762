"""Measures the host's work between the passes of a pipeline: its schedule, and the calls that send and receive."""

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
from mm.parallel.activity import Work
from mm.parallel.mesh import Mesh
from mm.plan.measured import unrecorded
from mm.planner.timing import mean_of_ranks
from mm.timeline.spans import COMPUTING, ActivitySpan
from mm.training.recorder import Recorder
from mm.training.step import Setup, forward_backward

NUM_REPEATS = 5
_NUM_MICROBATCHES = 16


def seconds_between_passes(device: Device, args: Arguments, model: ModelConfig, microbatch: Microbatch) -> float:
    """The host's seconds after each pass, in which nothing is recorded.  Needs an even number of ranks.

    Messages and waits for them are recorded, so this holds for microbatches of every size.
    """
    small = _two_stages(model)
    mesh = parallel.start(device, small, tp_size=1)
    setup, recorder = _setup(device, mesh, args, small), Recorder(device)
    batch, seconds = [microbatch] * _NUM_MICROBATCHES, list[float]()
    plan = StepPlan(tuple(batch), BatchTotals.of(batch * mesh.dp_size, small.vision))
    setup.stage.journal.listeners.append(recorder)
    for _ in range(NUM_REPEATS + 1):
        dist.barrier()
        forward_backward(setup, plan)
        device.runtime.synchronize()
        spans = recorder.spans()
        seconds.append(unrecorded(spans) / _num_passes(spans))
    found = mean_of_ranks(median(seconds[1:]), mesh)
    parallel.stop_mesh()
    return found


def _num_passes(spans: Sequence[ActivitySpan]) -> int:
    """Passes of the only chunk: a forward pass is recorded in several spans."""
    return len({(span.activity.work is Work.BACKWARD, span.activity.microbatch) for span in spans
                if span.activity.work in COMPUTING})


def _two_stages(model: ModelConfig) -> ModelConfig:
    """A ViT layer on the first stage and an LLM layer on the second, of the widths of ``model``, all trained."""
    vision = replace(model.vision, num_layers=1, pipeline_num_layers=((1, 0),), fullatt_block_indexes=())
    language = replace(model.language, num_layers=1, pipeline_num_layers=((0, 1),))
    return replace(model, vision=vision, language=language).unfrozen.base


def _setup(device: Device, mesh: Mesh, args: Arguments, model: ModelConfig) -> Setup:
    stage = Stage(model, mesh, args.precision, device)
    with torch.no_grad():
        for _, parameter in stage.named_parameters():
            parameter.normal_(0.0, 0.02)
    return Setup.build(stage, mesh, args)
