"""A predicted step has the records that a measured one has, and the parts of either sum to it."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from mm.cost.calibration import BlockLaws, Law
from mm.cost.predict import Predictor
from mm.cost.workload import COUNTS, Workload
from mm.parallel.activity import Activity, Work
from mm.plan.reports import predicted_timeline, step_parts
from mm.timeline import COMPUTING, ActivitySpan, RankRecord, StepTimeline, extent, seconds_of
from tests.cost.test_costs import by_flops
from tests.cost.test_predict import run_of
from tests.test_timeline import SETTINGS
from tests.tiny import our_config

IMAGES = ("num_images", "num_patches", "num_image_pairs", "num_window_pairs")


def drawn() -> tuple[Predictor, tuple[np.ndarray, ...], StepTimeline]:
    """Two replicas of two stages with two chunks, each with equal microbatches."""
    model, rng = our_config(((2, 1), (1, 0)), ((0, 0), (1, 3))), np.random.default_rng(0)
    found = by_flops(model)
    blocks = tuple(replace(one, laws=BlockLaws(one.laws.forward * 1e-9 + Law(0, 1e-6), one.laws.backward * 1e-9))
                   for one in found.blocks)
    calibration = replace(found, blocks=blocks, step=Law(1e-3, 1e-8), message=Law(5e-5, 1e-9),
                          all_reduce={2: Law(1e-4, 1e-9)})
    counts = np.zeros((2, 6, len(COUNTS)))
    for name in ("num_tokens", "num_target_tokens", "num_causal_pairs", *IMAGES):
        counts[..., COUNTS.index(name)] = rng.integers(100, 400, (2, 1))
    predictor = Predictor(run_of(model, 4), calibration)
    return predictor, tuple(counts), predicted_timeline(predictor, counts, 3)


def test_every_stage_of_every_replica_has_a_record() -> None:
    _, _, found = drawn()
    assert [(one.rank, one.pp_rank, one.dp_rank) for one in found.records] == [(0, 0, 0), (1, 0, 1), (2, 1, 0),
                                                                               (3, 1, 1)]
    assert [one.holds for one in found.rows] == ["3 ViT, 1 LLM layers", "1 ViT, 3 LLM layers"]
    assert (found.name, found.iteration) == ("predicted_step_3", 3)
    for record in found.records:
        assert all(one.start <= one.end <= other.start + 1e-12 for one, other in pairwise(record.spans))
        passes = {(span.activity.work is Work.BACKWARD, span.activity.chunk, span.activity.microbatch)
                  for span in record.spans if span.activity.work in COMPUTING}
        assert {(direction, 1, number) for direction in (False, True) for number in range(6)} <= passes


def test_its_seconds_are_those_of_the_prediction() -> None:
    predictor, counts, found = drawn()
    expected, parts = predictor.predict(Workload((counts,))), step_parts(found)
    assert extent(found.records) == pytest.approx((0.0, expected.seconds)) and parts.data == 0
    assert parts.seconds == pytest.approx(expected.seconds) and parts.pipeline == pytest.approx(expected.pipeline)
    assert (parts.update, parts.reduction) == pytest.approx((expected.update, expected.reduction))
    for record in found.records:
        assert seconds_of(record.spans, {Work.UPDATE}) == pytest.approx(expected.update)


def test_the_parts_of_a_step_by_hand() -> None:
    """Two tensor-parallel ranks of one stage: the second is slower."""
    def rank(number: int, later: float) -> RankRecord:
        times = [(Work.DATA, None, 0.0, 1.0), (Work.INPUTS, 0, 2.0, 2.5), (Work.LANGUAGE_FORWARD, 0, 3.0, 5.0 + later),
                 (Work.EXCHANGE, None, 5.0 + later, 6.0), (Work.BACKWARD, 0, 6.0, 9.0), (Work.REDUCTION, None, 9.5, 10),
                 (Work.UPDATE_WAIT, None, 11.0, 11.5), (Work.UPDATE, None, 11.5, 13.0)]
        spans = tuple(ActivitySpan(Activity(work, None if at is None else 0, at), start, end)
                      for work, at, start, end in times)
        return RankRecord(number, 0, 0, number, "", (), spans)

    found = step_parts(StepTimeline(1, (rank(0, 0.0), rank(1, 0.4)), SETTINGS))
    assert (found.data, found.pipeline, found.reduction, found.update) == pytest.approx((1.0, 7.0, 2.0, 3.0))
