"""The training cost of each sample as an integer: the basis for even distribution.

Integers, because every data-parallel rank plans a step by itself and all must agree: floating-point sums may differ in
the last bit between types of processor.
"""

from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property

import numpy as np

from mm.batch import BatchTotals
from mm.config.model import ModelConfig
from mm.data.lengths import HasLengths, Lengths
from mm.data.sampler.balance import Sizes
from mm.model.flops import slot_flops

_MAX_BITS = 40
"""Bits of the largest cost: sums of 8 million such costs still fit 64 bits."""
_BATCH_SAMPLES = 1 << 20
"""Samples processed at a time when all are needed: temporary arrays take tens of MB."""
_COUNTS = ("num_tokens", "num_target_tokens", "num_patches", "num_causal_pairs", "num_image_pairs", "num_window_pairs")


class SampleSizes:
    """The cost and size of each sample, computed on demand.

    The cost is the FLOPs of training on it, ViT and LLM together, forward and backward, in units of a power of two
    chosen so that the costliest sample has 40 bits; fractions of a unit are dropped.  A microbatch costs the sum of its
    samples.  If the LLM is frozen and the ViT is not, text packed with images costs slightly more than this estimate.
    """

    def __init__(self, model: ModelConfig, lengths: HasLengths) -> None:
        """Reads no lengths until a cost is requested."""
        self._model, self._lengths = model, lengths

    def __len__(self) -> int:
        return len(self._lengths)

    @cached_property
    def _rates(self) -> list[list[int]]:
        return [_flops_of_one_each(self._model, [*_COUNTS], has_media) for has_media in (False, True)]

    @cached_property
    def _num_dropped_bits(self) -> int:
        """Reads the lengths of all samples once, to find the costliest."""
        largest = max((int(self._flops(self._lengths.of(numbers)).max()) for numbers in self._batches()), default=0)
        return max(0, largest.bit_length() - _MAX_BITS)

    def of(self, numbers: np.ndarray) -> Sizes:
        """The sizes of some samples, in the given order."""
        lengths = self._lengths.of(numbers)
        costs = self._flops(lengths) >> self._num_dropped_bits
        return Sizes(costs, lengths.num_tokens.astype(np.int64), lengths.num_patches.astype(np.int64))

    def all_costs(self) -> np.ndarray:
        """int64 [num_samples], 8 bytes each."""
        costs = np.empty(len(self._lengths), dtype=np.int64)
        for numbers in self._batches():
            costs[numbers[0] : numbers[-1] + 1] = self.of(numbers).costs
        return costs

    def _batches(self) -> Iterator[np.ndarray]:
        for first in range(0, len(self), _BATCH_SAMPLES):
            yield np.arange(first, min(first + _BATCH_SAMPLES, len(self)))

    def _flops(self, lengths: Lengths) -> np.ndarray:
        """int64, one per sample."""
        tokens = lengths.num_tokens.astype(np.int64)
        counts = (tokens, lengths.num_target_tokens, lengths.num_patches, tokens * (tokens + 1) // 2,
                  lengths.num_image_pairs, lengths.num_window_pairs)
        of_text, of_media = (sum(count.astype(np.int64) * rate for count, rate in zip(counts, rates, strict=True))
                             for rates in self._rates)
        return np.where(lengths.num_media > 0, of_media, of_text)


def _flops_of_one_each(model: ModelConfig, names: list[str], has_media: bool) -> list[int]:
    """For each count in ``names``: the FLOPs of a step where it is 1 and all others are 0.  FLOPs are linear in counts.

    Whether there are images is not a count: it decides how far back gradients flow.
    """
    counts = dict.fromkeys((field.name for field in fields(BatchTotals)), 0) | {"num_images": int(has_media)}
    steps = slot_flops(model, [BatchTotals(**counts | {name: 1}) for name in names])
    return [round(sum(slot.forward + slot.backward for slot in slots)) for slots in steps]
