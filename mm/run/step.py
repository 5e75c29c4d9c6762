"""One optimizer step: forward and backward over a plan's microbatches, then the update."""

from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor

from mm.batch import StepPlan
from mm.config.args import Arguments
from mm.device.device import Device
from mm.model.stage import Stage
from mm.parallel.activity import Work
from mm.parallel.megatron import ddp_config, optimizer_config
from mm.parallel.mesh import Mesh
from mm.parallel.pipeline.loop import run_forward, run_schedule
from mm.parallel.pipeline.p2p import PipelineCommunicator
from mm.parallel.zero import reduction
from mm.parallel.zero.bucket_schedule import Zero2Schedule, Zero3Schedule
from mm.parallel.zero.gradient_shards import ShardedGradients
from mm.run.optim.optimizer import build_optimizer, kept_states
from mm.run.optim.update import StepResult, update
from mm.weights.trained import group_of, is_frozen


@dataclass(frozen=True)
class Setup:
    """What one rank trains with, except the data: model, optimizer and groups."""

    mesh: Mesh
    stage: Stage
    models: tuple[DistributedDataParallel, ...]
    """One per chunk of the stage."""
    passes: Zero2Schedule | Zero3Schedule | None
    """With sharded gradients: reduces them during the passes of ``models``, and gathers weights if these are sharded
    too.  Else None."""
    optimizer: ChainedOptimizer
    communicator: PipelineCommunicator

    @classmethod
    def build(cls, stage: Stage, mesh: Mesh, args: Arguments) -> "Setup":
        """Build DDP, optimizer and communication around ``stage``.  Its weights must already be filled, because the
        optimizer copies them."""
        settings = stage.config
        models, passes = _wrapped(stage, mesh, args)
        groups = {weight.name: group_of(weight, args, stage.model) for weight in stage.weights
                  if not is_frozen(weight, stage.model)}
        optimizer = build_optimizer(optimizer_config(args, settings), models, groups, kept_states(args), stage.device)
        communicator = PipelineCommunicator(mesh, stage.model, settings, stage.device.torch_device, stage.journal,
                                            starts_ahead(args, stage.device))
        return cls(mesh, stage, models, passes, optimizer, communicator)

    def gather_weights(self) -> None:
        """With the distributed optimizer, gather the weights from the ranks that own their parts, and wait for them."""
        for model in self.models:
            model.start_param_sync(force_sync=True)

    def finish_gathering(self) -> None:
        """With overlapped gathers, wait until the weights that other ranks updated last have arrived."""
        if any(model.ddp_config.overlap_param_gather for model in self.models):
            self.gather_weights()


def _wrapped(
    stage: Stage, mesh: Mesh, args: Arguments
) -> tuple[tuple[DistributedDataParallel, ...], Zero2Schedule | Zero3Schedule | None]:
    """The chunks of ``stage`` in megatron's DDP, and their passes if ranks keep only shards of the gradients."""
    settings, config = stage.config, ddp_config(args)
    if not args.shards_gradients or mesh.num_copies == 1:
        return tuple(DistributedDataParallel(settings, config, chunk) for chunk in stage.chunks), None
    models = tuple(
        ShardedGradients(settings, config, chunk, chunk.bucket_specs(), chunk.weight_shards) for chunk in stage.chunks)
    if stage.shards_weights:
        return models, Zero3Schedule(models[0], stage.journal, args.overlap_param_gather)
    return models, Zero2Schedule(models, mesh.pp_size)


def starts_ahead(args: Arguments, device: Device) -> bool:
    """Whether transfers between stages start before the receiver waits: by flag, else by the device's default."""
    return args.overlap_p2p_communication or (
        device.platform.starts_messages_ahead and not args.no_overlap_p2p_communication)


def step(
    setup: Setup, plan: StepPlan, lr: float, votes: Tensor | None = None, max_norm: float | None = None
) -> StepResult:
    """Train one step with learning rate ``lr``; ``votes`` and ``max_norm``: see ``update``.  Raises AgreedError as
    ``update`` does."""
    loss = forward_backward(setup, plan)
    stage = setup.stage
    with stage.journal.during(Work.UPDATE):
        return update(setup.optimizer, loss, lr, setup.mesh, stage.device, votes, max_norm, stage.journal)


def forward_backward(setup: Setup, plan: StepPlan) -> Tensor:
    """Compute the reduced gradients of the global batch into the parameters' buffers; return this rank's loss share.
    ``update`` sums the shares in one collective with the gradient norm."""
    overwrites = setup.stage.device.kernels.overwrites
    if setup.passes is None:
        reduction.begin(setup.models, overwrites)
    else:
        setup.passes.begin(plan, overwrites)
    setup.optimizer.zero_grad()
    scale = setup.optimizer.scale_loss if setup.stage.config.fp16 else None
    leave = setup.passes.leave if isinstance(setup.passes, Zero2Schedule) else None
    loss = run_schedule(setup.models, plan, setup.communicator, scale, leave)
    reduction.finalize(setup.models, setup.passes, setup.mesh.tied_group)
    return loss


def forward(setup: Setup, plan: StepPlan) -> Tensor:
    """The forward passes alone; see ``run_forward``."""
    passes = setup.passes if isinstance(setup.passes, Zero3Schedule) else None
    if passes is not None:
        passes.begin(plan, overwrites=False, forward_only=True)
    losses = run_forward(setup.models, plan, setup.communicator)
    if passes is not None:
        passes.end()
    return losses
