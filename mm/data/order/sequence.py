"""The order in which a step's microbatches enter the pipeline, chosen so that stages wait little.

A step's gradient is a sum over its microbatches, so their order is free.  While one stage works on a long microbatch
and its neighbour on a short one, the neighbour waits.  In the order in which samples are read, lengths between 0.25 and
1.75 of the mean cost two stages a fifth of their time.
"""

from collections.abc import Callable, Sequence

from mm.batch import BatchTotals, Microbatch
from mm.config.model import ModelConfig
from mm.model.flops import slot_flops
from mm.parallel.simulation import SlotCost, step_cost


def in_pipeline_order(model: ModelConfig, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    """``microbatches`` in the order with the least simulated time, by FLOPs; unchanged if no order is better."""
    placement = model.placement()
    if placement.num_stages == 1:
        return list(microbatches)
    costs = slot_flops(model, [BatchTotals.of([one], model.vision) for one in microbatches])
    return [microbatches[number] for number in pipeline_order(costs, placement.num_stages)]


def pipeline_order(costs: Sequence[Sequence[SlotCost]], num_stages: int) -> list[int]:
    """The order of the microbatches, as numbers, given the ``costs`` of their slots.

    Neighbours should be similar, and short ones belong at both ends, where the pipeline fills and drains.  Similarity
    is judged by total cost and by the cost of the busiest stage, where microbatches differ in their images.
    """
    numbers = range(len(costs))

    def of_stage(number: int, stage: int) -> float:
        return sum(cost.forward + cost.backward for cost in costs[number][stage::num_stages])

    busiest = max(range(num_stages), key=lambda stage: sum(of_stage(number, stage) for number in numbers))
    orders = [
        list(numbers),
        _rising_and_falling(numbers, lambda number: sum(of_stage(number, stage) for stage in range(num_stages))),
        _rising_and_falling(numbers, lambda number: of_stage(number, busiest)),
    ]
    return min(orders, key=lambda order: step_cost([costs[number] for number in order], num_stages))


def _rising_and_falling(numbers: Sequence[int], key: Callable[[int], float]) -> list[int]:
    ordered = sorted(numbers, key=key)
    return ordered[::2] + ordered[1::2][::-1]
