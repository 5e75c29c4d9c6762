"""What each sample costs to train on, as whole numbers: the ground on which samples are dealt out evenly.

Whole numbers, because every data-parallel rank computes the plan of a step alone, and all must find the same: sums of
floating-point numbers may differ in the last bit between two kinds of processor.  Which ranks there are, and how
samples are dealt, is not known here.
"""

from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property

import numpy as np

from mm.batch import BatchTotals
from mm.config.model import ModelConfig
from mm.data.lengths import HasLengths, Lengths
from mm.data.order.balance import Sizes
from mm.model.flops import slot_flops

_MAX_BITS = 40
"""Of the largest cost: sums of 8 million such costs still fit 64 bits."""


_CHUNK_SAMPLES = 1 << 20
"""That are looked at together where all are: what is computed of them takes tens of MB."""
_COUNTS = ("num_tokens", "num_target_tokens", "num_patches", "num_causal_pairs", "num_image_pairs", "num_window_pairs")


class SampleSizes:
    """What each sample costs and takes up, computed for those that are asked for.

    Its cost is the FLOPs of training on it, ViT and LLM together, forward and backward, in units of a power of two, so
    that the costliest sample of all has 40 bits; less than one unit is dropped.  A microbatch costs the sum of its
    samples; where the LLM is frozen and the ViT is not, text beside pictures costs a little more than told.
    """

    def __init__(self, model: ModelConfig, lengths: HasLengths) -> None:
        """Looks at no sample before a cost is asked for."""
        self._model, self._lengths = model, lengths

    def __len__(self) -> int:
        return len(self._lengths)

    @cached_property
    def _rates(self) -> list[list[int]]:
        return [_flops_of_one_each(self._model, [*_COUNTS], has_media) for has_media in (False, True)]

    @cached_property
    def _num_dropped_bits(self) -> int:
        """Looks at each sample once, for the costliest."""
        largest = max((int(self._flops(self._lengths.of(numbers)).max()) for numbers in self._chunks()), default=0)
        return max(0, largest.bit_length() - _MAX_BITS)

    def of(self, numbers: np.ndarray) -> Sizes:
        """The sizes of some samples, in the given order."""
        lengths = self._lengths.of(numbers)
        costs = self._flops(lengths) >> self._num_dropped_bits
        return Sizes(costs, lengths.num_tokens.astype(np.int64), lengths.num_patches.astype(np.int64))

    def all_costs(self) -> np.ndarray:
        """int64 [num_samples], which takes 8 bytes of each."""
        costs = np.empty(len(self._lengths), dtype=np.int64)
        for numbers in self._chunks():
            costs[numbers[0] : numbers[-1] + 1] = self.of(numbers).costs
        return costs

    def _chunks(self) -> Iterator[np.ndarray]:
        for first in range(0, len(self), _CHUNK_SAMPLES):
            yield np.arange(first, min(first + _CHUNK_SAMPLES, len(self)))

    def _flops(self, lengths: Lengths) -> np.ndarray:
        """int64, of each sample."""
        tokens = lengths.num_tokens.astype(np.int64)
        counts = (tokens, lengths.num_target_tokens, lengths.num_patches, tokens * (tokens + 1) // 2,
                  lengths.num_image_pairs, lengths.num_window_pairs)
        of_text, of_media = (sum(count.astype(np.int64) * rate for count, rate in zip(counts, rates, strict=True))
                             for rates in self._rates)
        return np.where(lengths.num_media > 0, of_media, of_text)


def sample_costs(model: ModelConfig, lengths: HasLengths) -> np.ndarray:
    """int64 [num_samples], as ``SampleSizes`` says."""
    return SampleSizes(model, lengths).all_costs()


def _flops_of_one_each(model: ModelConfig, names: list[str], has_media: bool) -> list[int]:
    """For each name of a count: FLOPs of a step that has 1 of it and 0 of all others.  They are linear in the counts.

    That there are pictures is no count: it decides how far gradients go back.
    """
    counts = dict.fromkeys((field.name for field in fields(BatchTotals)), 0) | {"num_images": int(has_media)}
    steps = slot_flops(model, [BatchTotals(**counts | {name: 1}) for name in names])
    return [round(sum(slot.forward + slot.backward for slot in slots)) for slots in steps]
