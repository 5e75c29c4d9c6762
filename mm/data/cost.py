"""What each sample costs to train on, as whole numbers: the ground on which samples are dealt out evenly.

Whole numbers, because every data-parallel rank computes the plan of a step alone, and all must find the same: sums of
floating-point numbers may differ in the last bit between two kinds of processor.  Which ranks there are, and how
samples are dealt, is not known here.
"""

from dataclasses import fields

import numpy as np

from mm.batch import BatchTotals
from mm.config.model import ModelConfig
from mm.data.lengths import Lengths
from mm.model.flops import slot_flops

_MAX_BITS = 40
"""Of the largest cost: sums of 8 million such costs still fit 64 bits."""


def sample_costs(model: ModelConfig, lengths: Lengths) -> np.ndarray:
    """int64 [num_samples]: FLOPs of training on each sample, ViT and LLM together, forward and backward.

    In units of a power of two, so that the largest has 40 bits; less than one unit is dropped.  A microbatch costs the
    sum of its samples; where the LLM is frozen and the ViT is not, text beside pictures costs a little more than told.
    """
    tokens = lengths.num_tokens.astype(np.int64)
    counts = {
        "num_tokens": tokens,
        "num_target_tokens": lengths.num_target_tokens,
        "num_patches": lengths.num_patches,
        "num_causal_pairs": tokens * (tokens + 1) // 2,
        "num_image_pairs": lengths.num_image_pairs,
        "num_window_pairs": lengths.num_window_pairs,
    }
    of_text, of_media = (
        sum(count.astype(np.int64) * flops
            for count, flops in zip(counts.values(), _flops_of_one_each(model, [*counts], has_media), strict=True))
        for has_media in (False, True)
    )
    flops = np.where(lengths.num_media > 0, of_media, of_text)
    return flops >> max(0, int(flops.max(initial=0)).bit_length() - _MAX_BITS)


def _flops_of_one_each(model: ModelConfig, names: list[str], has_media: bool) -> list[int]:
    """For each name of a count: FLOPs of a step that has 1 of it and 0 of all others.  They are linear in the counts.

    That there are pictures is no count: it decides how far gradients go back.
    """
    counts = dict.fromkeys((field.name for field in fields(BatchTotals)), 0) | {"num_images": int(has_media)}
    steps = slot_flops(model, [BatchTotals(**counts | {name: 1}) for name in names])
    return [round(sum(slot.forward + slot.backward for slot in slots)) for slots in steps]
