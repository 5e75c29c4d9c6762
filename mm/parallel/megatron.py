"""Our config as megatron-core's config objects, field by field.

The one place that knows megatron's settings.  Model mathematics stays in ``mm.model``.
"""

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from mm.config.flags import Arguments
from mm.parallel.mesh import Mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parallel_config(mesh: Mesh, precision: str) -> TransformerConfig:
    """What megatron's layers, schedules and DDP ask about: parallel sizes and precision, not the model's shape.

    Layer counts and widths are required fields there; our layers take them from ``mm.config.model``, so they hold
    placeholders here.  ``calculate_per_token_loss`` makes megatron sum gradients over data-parallel ranks: our loss
    is already divided by what the global batch holds.
    """
    dtype = DTYPES[precision]
    return TransformerConfig(
        num_layers=mesh.pp_size,
        hidden_size=mesh.tp_size,
        num_attention_heads=mesh.tp_size,
        tensor_model_parallel_size=mesh.tp_size,
        pipeline_model_parallel_size=mesh.pp_size,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        batch_p2p_comm=False,
        overlap_p2p_comm=False,
    )


def ddp_config(args: Arguments) -> DistributedDataParallelConfig:
    """Gradient buffers in fp32, summed over data-parallel ranks.

    ``align_param_gather`` takes the order of overlapped gathers out of megatron's forward hooks: ``pipeline.py``
    starts them, in one order on all ranks, because a rank without images never calls the ViT's hooks.
    """
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        align_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        average_in_collective=False,
    )


def optimizer_config(args: Arguments, precision: str) -> OptimizerConfig:
    """Adam with decoupled weight decay; the learning rate is set before each step by ``mm.training.optimizer``."""
    return OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        params_dtype=DTYPES[precision],
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        # megatron divides gradients by a given scale in every precision; the loss is multiplied by it in fp16 only
        loss_scale=args.loss_scale if precision == "fp16" else None,
        initial_loss_scale=args.initial_loss_scale,
        min_loss_scale=args.min_loss_scale,
        loss_scale_window=args.loss_scale_window,
        hysteresis=args.hysteresis,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
    )
