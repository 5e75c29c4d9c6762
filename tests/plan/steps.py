"""Measured steps without a device: the prediction of another calibration, for tests of comparisons."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from mm.batch import BatchTotals
from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.plan.calibration import BlockLaws, Calibration, MeasuredBlock
from mm.plan.costs import counts_of
from mm.plan.drawn import predicted_timeline
from mm.plan.laws import Law
from mm.plan.predict import Predictor
from mm.timeline.spans import StepTimeline
from tests.plan.test_costs import by_flops
from tests.plan.test_predict import run_of
from tests.tiny import our_config

SECONDS = 1e-9
"""The time of one FLOP."""


@cache
def model() -> ModelConfig:
    """Two chunks on two stages."""
    return our_config(((2, 1), (1, 0)), ((0, 0), (1, 3)))


def calibration(**fields: object) -> Calibration:
    """A slow device: every FLOP takes the same time, and everything else takes time too."""
    found = by_flops(model())
    blocks = tuple(_scaled(one) for one in found.blocks)
    return replace(found, blocks=blocks, chunk_pass=1e-4, pipeline_pass=3e-4, step=Law(1e-3, 1e-8),
                   message=Law(5e-5, 1e-9), all_reduce={2: Law(1e-4, 1e-9)}, **fields)


def _scaled(one: MeasuredBlock) -> MeasuredBlock:
    # word embeddings have no FLOPs, but take time
    own = one.laws if one.key.kind != "word embedding" else BlockLaws(Law(0, 1e3), Law(0, 2e3))
    return replace(one, laws=BlockLaws(own.forward * SECONDS, own.backward * SECONDS))


def batches(num_replicas: int, num_microbatches: int = 6, seed: int = 0) -> list[list[BatchTotals]]:
    """Random microbatches of each replica, every third without images."""
    rng = np.random.default_rng(seed)

    def one(number: int) -> BatchTotals:
        tokens, patches = (int(rng.integers(100, 400)) for _ in range(2))
        has_images = number % 3 < 2
        return BatchTotals(
            tokens, patches * has_images, int(has_images), 0, int(rng.integers(10, tokens)), 1, 1, tokens**2 // 2,
            int(patches**2 * rng.uniform(0.2, 1.0)) * has_images, int(30 * patches * rng.uniform(0.5, 1)) * has_images)

    return [[one(number) for number in range(num_microbatches)] for _ in range(num_replicas)]


def run(dp_size: int = 1) -> Run:
    return run_of(model(), 2 * dp_size)


def as_measured(truth: Calibration, replicas: Sequence[Sequence[BatchTotals]], iteration: int = 5) -> StepTimeline:
    """What a run would measure on a device of which ``truth`` is the calibration."""
    found = predicted_timeline(Predictor(run(len(replicas)), truth), [counts_of(one) for one in replicas], iteration)
    records = tuple(replace(one, microbatches=tuple(replicas[one.dp_rank])) for one in found.records)
    return replace(found, records=records, is_predicted=False)
