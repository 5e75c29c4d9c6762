"""The training cost of each sample, and the order of a step's microbatches in the pipeline that costs least.

Costs are integers, because every data-parallel rank plans a step by itself and all must agree: floating-point sums may
differ in the last bit between types of processor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cached_property

import numpy as np

from mm.batch import BatchTotals, Microbatch
from mm.config.model import ModelConfig
from mm.data.sample import HasLengths, Lengths
from mm.data.sampler.balance import Sizes
from mm.model.flops import slot_flops
from mm.parallel.pipeline_schedule import SlotCost, as_array, step_costs

_MAX_BITS = 40
"""Bits of the largest cost: sums of 8 million such costs still fit 64 bits."""
_BATCH_SAMPLES = 1 << 20
"""Samples processed at a time when all are needed: temporary arrays take tens of MB."""
_COUNTS = ("num_tokens", "num_target_tokens", "num_patches", "num_causal_pairs", "num_image_pairs", "num_window_pairs")


class SampleSizes:
    """The cost and size of each sample, computed on demand.

    The cost is the FLOPs of training on it, ViT and LLM together, in units of a power of two chosen so that the
    costliest sample has 40 bits; fractions of a unit are dropped.  If the LLM is frozen and the ViT is not, text packed
    with images costs slightly more.
    """

    def __init__(self, model: ModelConfig, lengths: HasLengths) -> None:
        """Reads no lengths until a cost is requested."""
        self._model, self._lengths = model, lengths

    def __len__(self) -> int:
        return len(self._lengths)

    @cached_property
    def _rates(self) -> list[list[int]]:
        return [_flops_of_one_each(self._model, has_media) for has_media in (False, True)]

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


def _flops_of_one_each(model: ModelConfig, has_media: bool) -> list[int]:
    """For each of ``_COUNTS``: the FLOPs of a step where it is 1 and all others are 0.  FLOPs are linear in counts.

    Whether there are images decides how far back gradients flow.
    """
    counts = dict.fromkeys((field.name for field in fields(BatchTotals)), 0) | {"num_images": int(has_media)}
    steps = slot_flops(model, [BatchTotals(**counts | {name: 1}) for name in _COUNTS])
    return [round(sum(slot.forward + slot.backward for slot in slots)) for slots in steps]


def in_pipeline_order(model: ModelConfig, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    """``microbatches`` in the order with the least simulated time, by FLOPs; unchanged if no order is better."""
    placement = model.placement()
    if placement.num_stages == 1:
        return list(microbatches)
    costs = slot_flops(model, [BatchTotals.of([one], model.vision) for one in microbatches])
    return [microbatches[number] for number in pipeline_order(costs, placement.num_stages)]


def pipeline_order(costs: Sequence[Sequence[SlotCost]], num_stages: int) -> list[int]:
    """The order of the microbatches, as numbers, given the ``costs`` of their slots."""
    return pipeline_orders(as_array(costs)[..., None], num_stages)[:, 0].tolist()


def pipeline_orders(costs: np.ndarray, num_stages: int) -> np.ndarray:
    """The order of the microbatches in each of many pipelines, as numbers: int64 [num_microbatches, num_pipelines].

    ``costs`` is as ``pipeline_schedule.step_costs`` takes it.  Neighbours should be similar, by total cost or that of
    the busiest stage, and short ones belong at both ends, where the pipeline fills and drains.
    """
    _, num_microbatches, _, num_pipelines = costs.shape
    of_stages = costs.sum(axis=0).reshape(num_microbatches, -1, num_stages, num_pipelines).sum(axis=1)
    busiest = of_stages.sum(axis=0).argmax(axis=0)
    orders = [
        np.repeat(np.arange(num_microbatches)[:, None], num_pipelines, axis=1),
        _rising_and_falling(of_stages.sum(axis=1)),
        _rising_and_falling(np.take_along_axis(of_stages, busiest[None, None], axis=1)[:, 0]),
    ]
    all_costs = np.concatenate([in_order(costs, order) for order in orders], axis=-1)
    seconds = step_costs(all_costs, num_stages).reshape(len(orders), num_pipelines)
    return np.stack(orders)[seconds.argmin(axis=0), :, range(num_pipelines)].T


def in_order(costs: np.ndarray, order: np.ndarray) -> np.ndarray:
    """``costs`` of each pipeline with its microbatches in ``order``, as ``pipeline_orders`` gives it."""
    return np.take_along_axis(costs, order[None, :, None], axis=1)


def _rising_and_falling(keys: np.ndarray) -> np.ndarray:
    """Orders in which the keys rise to the largest and fall again: 1 3 5 4 2.  ``keys``: [num_microbatches,
    num_pipelines]."""
    ordered = keys.argsort(axis=0, kind="stable")
    return np.concatenate([ordered[::2], ordered[1::2][::-1]])
