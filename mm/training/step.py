"""One optimizer step: forward and backward over a plan's microbatches, then the update."""

import math
from dataclasses import asdict, dataclass
from functools import partial

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer

from mm.batch import StepPlan
from mm.config.flags import Arguments
from mm.errors import AgreedError
from mm.model.stage import Stage
from mm.parallel.megatron import bind, ddp_config, optimizer_config
from mm.parallel.mesh import Mesh
from mm.parallel.pipeline import PipelineCommunicator
from mm.parallel.schedule import finalize_gradients, run_schedule
from mm.training.optimizer import Update, build_optimizer, update


@dataclass(frozen=True)
class Parts:
    """What one rank trains with, besides data."""

    mesh: Mesh
    stage: Stage
    model: DistributedDataParallel
    """Around the stage."""
    optimizer: ChainedOptimizer
    communicator: PipelineCommunicator

    @classmethod
    def build(cls, stage: Stage, mesh: Mesh, args: Arguments) -> "Parts":
        """Everything around ``stage``, whose weights must be filled: the optimizer copies them."""
        settings = stage.config
        model = DistributedDataParallel(settings, ddp_config(args), stage)
        optimizer = build_optimizer(optimizer_config(args, settings), model)
        bind(settings, model, optimizer, partial(finalize_gradients, tied_group=mesh.tied_group))
        communicator = PipelineCommunicator(mesh, stage.model, settings, stage.device.torch_device)
        return cls(mesh, stage, model, optimizer, communicator)


@dataclass(frozen=True)
class StepResult(Update):
    """What one optimizer step did; the same on every rank."""

    loss: float
    """The loss of the global batch, before the update."""


def step(parts: Parts, plan: StepPlan, lr: float) -> StepResult:
    """Train one step with learning rate ``lr``.

    Raises AgreedError on all ranks, before a weight has changed, when the loss or a gradient is not finite.
    """
    loss = forward_backward(parts, plan)
    if not math.isfinite(loss):
        raise AgreedError(
            f"the loss is {loss}, so no weight was changed by it; look at the samples of this step, the learning rate "
            f"and the precision, and resume from the last checkpoint"
        )
    return StepResult(**asdict(update(parts.optimizer, lr)), loss=loss)


def forward_backward(parts: Parts, plan: StepPlan) -> float:
    """Leave the reduced gradients of the global batch in the parameters' buffers; returns its loss.

    The loss is summed over replicas and stages, so that every rank sees the same number and decides the same.
    """
    parts.model.zero_grad_buffer()
    parts.optimizer.zero_grad()
    loss = run_schedule(parts.model, plan, parts.communicator, parts.mesh)
    dist.all_reduce(loss, group=parts.mesh.groups.dp)
    dist.all_reduce(loss, group=parts.mesh.groups.pp)
    return float(loss)
