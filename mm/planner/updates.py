"""Measures how long the rest of a step takes besides its passes: clearing gradients, their norm, and the update."""

from dataclasses import replace
from statistics import median

import torch
from megatron.core.distributed import DistributedDataParallel

from mm.config.flags import Arguments
from mm.config.model import ModelConfig
from mm.device.device import Device
from mm.model.stage import Stage
from mm.parallel import reduction
from mm.parallel.megatron import ddp_config, optimizer_config
from mm.parallel.mesh import Mesh
from mm.plan.laws import Law, Timed, fitted
from mm.planner.timing import mean_of_ranks, repeated_seconds
from mm.training.optimizer import build_optimizer, kept_states
from mm.training.update import update
from mm.weights.groups import group_of
from mm.weights.trained import is_frozen

NUM_REPEATS = 5
_NUM_LANGUAGE_LAYERS = (1, 4)


def step_law(device: Device, mesh: Mesh, args: Arguments, model: ModelConfig) -> Law:
    """Seconds by the trained parameters of one rank, for models of the widths of ``model`` whose LLM is trained."""
    return fitted([_timed(device, mesh, args, _small(model, count)) for count in _NUM_LANGUAGE_LAYERS])


def _small(model: ModelConfig, num_layers: int) -> ModelConfig:
    vision = replace(model.vision, num_layers=1, pipeline_num_layers=((1,),), fullatt_block_indexes=())
    language = replace(model.language, num_layers=num_layers, pipeline_num_layers=((num_layers,),))
    return replace(model, vision=vision, language=language).unfrozen.base


def _timed(device: Device, mesh: Mesh, args: Arguments, model: ModelConfig) -> Timed:
    stage = Stage(model, mesh, args.precision, device, sequence_parallel=args.sequence_parallel)
    with torch.no_grad():
        for _, parameter in stage.named_parameters():
            parameter.zero_()
    models = [DistributedDataParallel(stage.config, ddp_config(args), chunk) for chunk in stage.chunks]
    trained = [weight for weight in stage.weights if not is_frozen(weight, model)]
    groups = {weight.name: group_of(weight, args, model) for weight in trained}
    optimizer = build_optimizer(optimizer_config(args, stage.config), models, groups, kept_states(args), device)
    loss = torch.zeros((), device=device.torch_device)

    def work() -> None:
        reduction.begin(models, device.kernels.overwrites)
        optimizer.zero_grad()
        reduction.end(models)
        update(optimizer, loss, args.lr, mesh, device, journal=stage.journal)

    seconds = repeated_seconds(device, NUM_REPEATS, work)  # the first call, which does not count, allocates
    num_trained = sum(parameter.numel() for _, parameter in stage.named_parameters() if parameter.requires_grad)
    return Timed(num_trained, 0.0, mean_of_ranks(median(seconds), mesh))
