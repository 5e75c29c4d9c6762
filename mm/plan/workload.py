"""The microbatches of some steps of a run, as counts: its own samples, in the order and the packs of its sampler."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mm.config.run import Run
from mm.data.lengths import HasLengths, Lengths
from mm.data.order.cost import SampleSizes
from mm.data.order.sampler import order_of
from mm.data.order.stream import StepSamples
from mm.plan.costs import COUNTS

NUM_STEPS = 4
"""Steps that a prediction looks at; they also show how much the data makes steps differ."""


@dataclass(frozen=True)
class Workload:
    """Steps -> replicas -> microbatches as counts, float64 [num_microbatches, len(COUNTS)]."""

    steps: tuple[tuple[np.ndarray, ...], ...]

    @property
    def num_tokens(self) -> float:
        """Mean tokens of a step, over all replicas."""
        column = COUNTS.index("num_tokens")
        return sum(float(one[:, column].sum()) for step in self.steps for one in step) / len(self.steps)


def workload_of(
    run: Run, lengths: HasLengths, num_steps: int = NUM_STEPS, first: int = 1, sizes: SampleSizes | None = None
) -> Workload:
    """Some steps of ``run`` from iteration ``first`` on.  ``lengths``: of all its samples; ``sizes``: theirs
    too, computed if absent."""
    order = order_of(run, lengths, dp_rank=0, consumed_samples=0, sizes=sizes)
    return Workload(tuple(_counts(lengths, order.of_ranks(step)) for step in range(first - 1, first - 1 + num_steps)))


def _counts(lengths: HasLengths, step: Sequence[StepSamples]) -> tuple[np.ndarray, ...]:
    """By replica, the counts of its microbatches."""
    microbatches = [one for replica in step for one in replica]
    samples = np.array([one for microbatch in microbatches for one in microbatch])
    sizes = np.array([len(microbatch) for microbatch in microbatches])
    counts = np.add.reduceat(sample_counts(lengths.of(samples)), np.cumsum(sizes) - sizes, axis=0)
    return tuple(np.split(counts, np.cumsum([len(replica) for replica in step])[:-1]))


def sample_counts(lengths: Lengths) -> np.ndarray:
    """float64 [num_samples, len(COUNTS)]: the counts of each sample, as ``BatchTotals`` has them."""
    tokens = lengths.num_tokens.astype(np.float64)
    columns = {
        "num_tokens": tokens, "num_patches": lengths.num_patches, "num_images": lengths.num_media,
        "num_target_tokens": lengths.num_target_tokens, "num_target_samples": lengths.num_target_tokens > 0,
        "num_causal_pairs": tokens * (tokens + 1) / 2, "num_image_pairs": lengths.num_image_pairs,
        "num_window_pairs": lengths.num_window_pairs,
    }  # fmt: skip
    zeros = np.zeros(len(tokens))
    return np.stack([np.asarray(columns.get(name, zeros), dtype=np.float64) for name in COUNTS], axis=1)
