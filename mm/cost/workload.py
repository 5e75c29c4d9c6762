"""The microbatches of some steps as counts, what each rank computes of them, and the messages between stages."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TypeVar

import numpy as np

from mm.batch import BatchTotals
from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.data.sample import HasLengths, Lengths
from mm.data.sampler.cost import SampleSizes
from mm.data.sampler.sampler import StepSamples, order_of
from mm.placement import Message

Rows = TypeVar("Rows", int, np.ndarray)
NUM_STEPS = 4
"""Steps that a prediction looks at; they also show how much the data makes steps differ."""
COUNTS = tuple(field.name for field in fields(BatchTotals))
"""The columns of an array of microbatches."""
_OF_IMAGES = ("num_patches", "num_image_pairs", "num_window_pairs")
"""Counts that are divided over ranks by whole images."""


@cache
def one_stage(model: ModelConfig) -> ModelConfig:
    """``model`` in one slot, for computing once what does not depend on the lists."""
    return model.on_one_stage


@dataclass(frozen=True)
class Workload:
    """Steps -> replicas -> microbatches as counts, float64 [num_microbatches, len(COUNTS)]."""

    steps: tuple[tuple[np.ndarray, ...], ...]

    def mean(self, name: str) -> float:
        """The mean of a count over the steps, of all replicas together."""
        column = COUNTS.index(name)
        return sum(float(one[:, column].sum()) for step in self.steps for one in step) / len(self.steps)


def workload_of(
    run: Run, lengths: HasLengths, num_steps: int = NUM_STEPS, first: int = 1, sizes: SampleSizes | None = None
) -> Workload:
    """Some steps of ``run`` from iteration ``first`` on, in the order and the packs of its sampler."""
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


def counts_of(microbatches: Sequence[BatchTotals]) -> np.ndarray:
    """float64 [num_microbatches, num_counts]."""
    return np.array([[getattr(one, name) for name in COUNTS] for one in microbatches], dtype=np.float64)


def image_kinds(counts: np.ndarray) -> np.ndarray:
    """Whether each microbatch has images, as 0 or 1."""
    return (counts[:, COUNTS.index("num_images")] > 0).astype(int)


def per_rank(counts: np.ndarray, num_ranks: int, num_encoders: int) -> np.ndarray:
    """The costliest share of each microbatch: tokens divided evenly, and whole images of about the same size."""
    if num_encoders == 1:
        return counts
    images = counts[:, COUNTS.index("num_images")]
    share = np.ceil(images / num_encoders) / np.maximum(images, 1)
    found = counts / num_ranks
    for name in _OF_IMAGES:
        found[:, COUNTS.index(name)] = counts[:, COUNTS.index(name)] * share
    return found


def mean_per_rank(counts: np.ndarray, num_ranks: int, num_encoders: int) -> np.ndarray:
    """The mean share of each microbatch: at most ``per_rank``."""
    return counts / np.where(np.isin(COUNTS, _OF_IMAGES), num_encoders, num_ranks)


def message_bytes(message: Message, num_patches: Rows, num_tokens: Rows, model: ModelConfig, width: int) -> Rows:
    """Bytes that cross a boundary for one microbatch, of all tensor-parallel ranks together if they cut the rows.

    ``width``: bytes per element.
    """
    vision, language = model.vision, model.language
    return {
        Message.NOTHING: 0 * num_tokens,
        Message.PATCHES: num_patches * vision.hidden_size,
        Message.VISUAL_TOKENS: num_patches // vision.spatial_merge_size**2 * language.hidden_size,
        Message.HIDDEN_STATES: num_tokens * language.hidden_size,
    }[message] * width
