"""A sampler that records which process called it, and fails on request; pickles into the planner."""

import os
from dataclasses import dataclass

import numpy as np

from mm.data.order.stream import SampleOrder, StepSamples, shuffled


@dataclass(frozen=True)
class Deal:
    """Each of two replicas takes a microbatch with its number, the process id and the first sample of the step."""

    error: Exception | None = None
    failing_sample: int = -1

    def __call__(self, samples: np.ndarray) -> list[StepSamples]:
        if self.error is not None and self.failing_sample in samples:
            raise self.error
        return [[[dp_rank, os.getpid(), int(samples[0])], []] for dp_rank in range(2)]


def order(deal: Deal | None = None) -> SampleOrder:
    """Steps of four samples."""
    return SampleOrder(shuffled(100, 5, shuffle=False), deal or Deal(), 4, 0)
