"""Our settings as megatron-core's configs, in the order in which a stage, its DDP and its optimizer are built.

No other module sets their fields; ``mm.parallel.mesh`` gives megatron the parallel sizes.  Model mathematics stays in
``mm.model``.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from torch import nn

from mm.config.args import Arguments
from mm.config.model import ModelConfig
from mm.parallel.mesh import Mesh
from mm.weights.table import EMBEDDING_NAME, Place, Weight, stored_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parallel_config(
    model: ModelConfig, mesh: Mesh, precision: str, sequence_parallel: bool = False
) -> TransformerConfig:
    """megatron's settings for a stage.  ``calculate_per_token_loss`` makes it sum gradients over data-parallel ranks:
    our loss is already divided by the global batch's total."""
    language, dtype = model.language, DTYPES[precision]
    return TransformerConfig(
        num_layers=language.num_layers, hidden_size=language.hidden_size, ffn_hidden_size=language.ffn_hidden_size,
        num_attention_heads=language.num_attention_heads, num_query_groups=language.num_query_groups,
        kv_channels=language.kv_channels, tensor_model_parallel_size=mesh.tp_size,
        pipeline_model_parallel_size=mesh.pp_size, context_parallel_size=mesh.cp_size,
        virtual_pipeline_model_parallel_size=model.num_chunks if model.num_chunks > 1 else None,
        sequence_parallel=sequence_parallel, pipeline_dtype=dtype, params_dtype=dtype, bf16=precision == "bf16",
        fp16=precision == "fp16", perform_initialization=False, gradient_accumulation_fusion=False,
        calculate_per_token_loss=True, batch_p2p_comm=False, overlap_p2p_comm=False)


def set_megatron_attributes(
    parameters: Mapping[str, nn.Parameter], weights: Iterable[Weight], tied_over_slots: bool, sequence_parallel: bool
) -> None:
    """Set the attributes that megatron reads from each parameter; call it between building a chunk and its DDP.

    - ``tensor_model_parallel`` and its ``partition_*``: megatron sets them only when it draws initial values.  Its
      gradient norm counts a parameter without them on one tensor-parallel rank only.
    - ``sequence_parallel``: each tensor-parallel rank has the gradient of its own rows, or of its own images, and
      ``mm.parallel.zero.reduction`` sums them.
    - ``shared_embedding``, if ``tied_over_slots`` (word embedding and output layer are one weight in two slots): gives
      both copies the same shard of the distributed optimizer.
    - ``shared`` on the copy in the output layer: keeps the gradient norm from counting the tied weight twice.
    """
    for weight in weights:
        parameter: Any = parameters[weight.name]  # torch's types lack megatron's attributes
        parameter.tensor_model_parallel = weight.is_cut
        parameter.partition_dim = weight.tp_dim if weight.is_cut else -1
        parameter.partition_stride = 1
        # Replicated weights that each rank applies to its own rows; the final norm sees all rows on every rank.
        shards_rows = sequence_parallel and weight.tp_dim is None and weight.place is not Place.HEAD
        parameter.sequence_parallel = shards_rows or weight.is_whole
        if tied_over_slots and stored_name(weight) == EMBEDDING_NAME:
            parameter.shared_embedding = True
        if weight.is_tied_copy:
            parameter.shared = True


def ddp_config(args: Arguments) -> DistributedDataParallelConfig:
    """DDP settings: gradients are summed over data-parallel ranks, in fp32 or with ``--grad-reduce-in-bf16`` in bf16.

    ``align_param_gather`` keeps megatron's forward hooks from starting overlapped gathers: ``schedule.py`` does, in one
    order on all ranks, because a rank without images never calls the ViT's hooks.
    """
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=not args.grad_reduce_in_bf16, overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.gathers_during_forward, align_param_gather=args.gathers_during_forward,
        use_distributed_optimizer=args.splits_optimizer, average_in_collective=False)


def optimizer_config(args: Arguments, settings: TransformerConfig) -> OptimizerConfig:
    """Adam with decoupled weight decay, in the precision of the stage's ``settings``.  The learning rate is set again
    before each step."""
    return OptimizerConfig(
        optimizer="adam", lr=args.lr, min_lr=args.min_lr, weight_decay=args.weight_decay, adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2, adam_eps=args.adam_eps, clip_grad=args.clip_grad,
        params_dtype=settings.params_dtype, bf16=settings.bf16, fp16=settings.fp16,
        # megatron divides gradients by a given scale in every precision; the loss is multiplied by it in fp16 only
        loss_scale=args.loss_scale if settings.fp16 else None,
        initial_loss_scale=args.initial_loss_scale, min_loss_scale=args.min_loss_scale,
        loss_scale_window=args.loss_scale_window, hysteresis=args.hysteresis,
        use_distributed_optimizer=args.splits_optimizer, overlap_param_gather=args.gathers_during_forward)
