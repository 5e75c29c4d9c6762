"""The small model with transformers' random weights and a step's data, ready to train in a process group of one."""

from typing import TYPE_CHECKING, Any

import torch

from mm.batch import BatchTotals, StepPlan
from mm.config.model import ModelConfig
from mm.device.device import Device
from tests.tiny import hf_model, hf_tensors, microbatch, our_config, random_sample, whole

if TYPE_CHECKING:
    from mm.run.step import Setup

LR = 1e-3
SMALL = our_config(((4,),), ((4,),))


def setup_of(mesh: Any, *flags: str, model: ModelConfig = SMALL, device: Device | None = None,
             tensors: dict[str, torch.Tensor] | None = None) -> "Setup":
    """``tensors`` replace transformers' weights; adapters stay as they are."""
    from mm.config import args as arguments
    from mm.model.load import set_weight
    from mm.model.stage import Stage
    from mm.run.step import Setup

    args = arguments.parse(["--lr", str(LR), "--train-iters", "1", "--micro-batch-size", "1", "--seq-length", "64",
                            "--mm-model", "m", "--mm-data", "d", *flags])
    stage = Stage(model, mesh, args.precision, device or Device.pick("cpu"))
    tensors = tensors or hf_tensors(hf_model(model.language.tied))
    for weight in stage.weights:
        if not weight.is_adapter:
            set_weight(stage, weight, whole(weight, tensors), mesh)
    return Setup.build(stage, mesh, args)


def plan_of(*grids: tuple, model: ModelConfig = SMALL) -> StepPlan:
    """A microbatch of one sample for each of ``grids``; by default one with a picture and one without."""
    generator = torch.Generator().manual_seed(0)
    batch = [microbatch([random_sample(generator, one, 12)]) for one in grids or (((1, 4, 6),), ())]
    return StepPlan(tuple(batch), BatchTotals.of(batch, model.vision))
