"""Why the stages of a pipeline wait: how much equal stages, equal microbatches and instant messages would save."""

from dataclasses import astuple, dataclass

import numpy as np

from mm.parallel.simulation import even_step_cost, step_costs
from mm.placement import Placement
from mm.plan.predict import Predictor
from mm.plan.workload import Workload


@dataclass(frozen=True)
class Waits:
    """Shares of the pipeline's time in which a stage waits, on average; they add up to the bubble.

    A frozen ViT, whose stage runs ahead, can make uneven stages faster than even ones; then their share is negative.
    """

    filling: float
    """Waits while the pipeline fills and drains, as if all stages and microbatches were equal."""
    stages: float
    microbatches: float
    messages: float

    @property
    def total(self) -> float:
        return sum(astuple(self))


def waits_of(predictor: Predictor, workload: Workload, placement: Placement) -> Waits:
    """The waits of the replica with most work in each step, averaged over the steps."""
    return Waits(*np.mean([_of_replica(predictor, predictor.slowest(step), placement) for step in workload.steps],
                          axis=0).tolist())


def _of_replica(predictor: Predictor, counts: np.ndarray, placement: Placement) -> np.ndarray:
    costs, messages = predictor.ordered(counts, [placement])
    num_stages, num_microbatches = placement.num_stages, len(counts)
    busy = float(costs.sum()) / num_stages
    even = even_step_cost(busy, float(num_microbatches), num_stages, placement.num_chunks)
    equal = np.repeat(costs.mean(axis=1, keepdims=True), num_microbatches, axis=1)
    times = [busy, even, *(float(step_costs(one, num_stages)[0]) for one in (equal, costs)),
             float(step_costs(costs, num_stages, messages)[0])]
    return np.diff(times) / times[-1]
