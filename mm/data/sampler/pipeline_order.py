"""The order in which a step's microbatches enter the pipeline, chosen so that stages wait little.

A step's gradient is a sum over its microbatches, so their order is free.  While one stage works on a long microbatch
and its neighbour on a short one, the neighbour waits.  With lengths between 0.25 and 1.75 of the mean, in the order in
which they are read, two stages wait for a fifth of their time.
"""

from collections.abc import Sequence

import numpy as np

from mm.batch import BatchTotals, Microbatch
from mm.config.model import ModelConfig
from mm.model.flops import slot_flops
from mm.parallel.simulation import SlotCost, as_array, step_costs


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

    ``costs`` is as ``mm.parallel.simulation.step_costs`` takes it.  Neighbours should be similar, and short ones belong
    at both ends, where the pipeline fills and drains.  Similarity is judged by total cost and by the cost of the
    busiest stage, where microbatches differ in their images.
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
