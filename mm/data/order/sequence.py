"""In which order the microbatches of a step pass the pipeline: so that stages wait little where they differ.

A step's gradient is a sum over its microbatches, so their order is free.  While one stage works on a long microbatch
and its neighbour on a short one, the neighbour waits; in the order in which they happen to be read, lengths from a
quarter to seven quarters of the mean cost two stages a fifth of their time.  A function of the model and of counts.
"""

from collections.abc import Callable, Sequence

from mm.batch import BatchTotals, Microbatch
from mm.config.model import ModelConfig
from mm.model.flops import slot_flops
from mm.parallel.simulation import SlotCost, step_cost


def in_pipeline_order(model: ModelConfig, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    """``microbatches`` in the order that takes the least simulated time, by FLOPs; as given where none is better."""
    placement = model.placement()
    if placement.num_stages == 1:
        return list(microbatches)
    costs = slot_flops(model, [BatchTotals.of([one], model.vision) for one in microbatches])
    return [microbatches[number] for number in pipeline_order(costs, placement.num_stages)]


def pipeline_order(costs: Sequence[Sequence[SlotCost]], num_stages: int) -> list[int]:
    """Numbers of the microbatches, whose slots take ``costs``.

    Neighbours should be alike, and the short ones should stand at both ends, where the pipeline fills and empties.
    Alike means in the whole cost, or in that of the stage with most work, where microbatches differ in their images.
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
