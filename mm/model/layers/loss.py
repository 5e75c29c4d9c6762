"""The training loss: how each token's cross entropy, which ``vocabulary.py`` computes, is weighted.

The weights depend on the global batch, never on its distribution over ranks, so every layout has the same loss.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mm.batch import IGNORE_INDEX, BatchTotals, Microbatch, targets_per_segment
from mm.config.args import LossUnit
from mm.device.device import Device
from mm.parallel.context import Share

MAX_LOGIT_ROWS = 1024
"""Target tokens whose logits exist at a time, in forward and backward, if 16-bit logits are widened to fp32.

Qwen2.5's 151,936 logits of 1,024 tokens take 622 MB in fp32, and another 311 MB while they are converted.  Every block
of the backward reads and writes the weight's fp32 gradient: with fewer than 824 rows an H200 would wait for memory."""
_MAX_LOGIT_BYTES = 6 * MAX_LOGIT_ROWS
"""Memory of ``MAX_LOGIT_ROWS`` per column of the vocabulary: 4 bytes of fp32 and 2 bytes of a 16-bit number per row."""


def max_logit_rows(width: int, is_fused: bool) -> int:
    """``MAX_LOGIT_ROWS``; for fused kernels (``LogitKernels.is_fused``) the rows that take the same memory.

    Fused kernels make only the logits and their gradient, of ``width`` bytes per number: 1,536 rows in 16 bits, 768 in
    fp32.
    """
    return _MAX_LOGIT_BYTES // (2 * width) if is_fused else MAX_LOGIT_ROWS


@dataclass(frozen=True)
class LossInputs:
    """The positions of one microbatch that have a loss, on the device."""

    target_index: Tensor
    """int64 [num_targets]: rows of the packed microbatch, as indices among those that this rank holds."""
    target_ids: Tensor
    """int64 [num_targets]"""
    weights: Tensor
    """float32 [num_targets]: they sum to 1 over the global batch, or each is 1."""


def loss_inputs(
    microbatch: Microbatch, totals: BatchTotals, unit: LossUnit | None, device: Device, share: Share | None = None
) -> LossInputs:
    """Select the target tokens and compute their weights.

    Every unit of the global batch has the same weight, which its target tokens share.  A unit is a target token, a
    sample with a target (MindSpeed-MM's ``--calculate-per-sample-loss``), or a microbatch, with or without a target
    (MindSpeed-MM's default).  Without a ``unit`` each weight is 1, so the loss is a sum.  A batch without targets has
    no rows, so its loss is 0.  With ``share`` only the targets that this rank of the context axis holds are selected.
    """
    index = (microbatch.labels != IGNORE_INDEX).nonzero().squeeze(1)
    match unit:
        case "token":
            weights = torch.full((len(index),), 1.0 / max(totals.num_target_tokens, 1), dtype=torch.float64)
        case "sample":
            counts = targets_per_segment(microbatch)
            of_row = torch.repeat_interleave(counts, torch.tensor(microbatch.segment_lengths, dtype=torch.int64))
            weights = 1.0 / (of_row[index].double() * max(totals.num_target_samples, 1))
        case "microbatch":
            of_each = 1.0 / (totals.num_microbatches * max(len(index), 1))
            weights = torch.full((len(index),), of_each, dtype=torch.float64)
        case None:
            weights = torch.ones(len(index))
    target_ids = microbatch.labels[index]
    if share is not None:
        is_here, index = share.find(index)
        target_ids, weights = target_ids[is_here], weights[is_here]
    return LossInputs(device.copy(index), device.copy(target_ids), device.copy(weights.float()))
