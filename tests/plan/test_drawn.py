"""A predicted step has the records that a measured one has."""

from itertools import pairwise

import pytest

from mm.parallel.activity import Work
from mm.plan.costs import counts_of
from mm.plan.drawn import predicted_timeline
from mm.plan.predict import Predictor
from mm.plan.workload import Workload
from mm.timeline.spans import COMPUTING, StepTimeline, extent, seconds_of
from tests.plan.steps import batches, calibration, run


def drawn(num_replicas: int) -> tuple[Predictor, StepTimeline]:
    predictor = Predictor(run(num_replicas), calibration())
    counts = [predictor.entering(counts_of(one)) for one in batches(num_replicas)]
    return predictor, predicted_timeline(predictor, counts, 3)


def test_every_stage_of_every_replica_has_a_record() -> None:
    _, found = drawn(2)
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
    predictor, found = drawn(2)
    expected = predictor.predict(Workload((tuple(counts_of(one) for one in batches(2)),)))
    start, end = extent(found.records)
    assert (start, end) == pytest.approx((0.0, expected.seconds))
    first, last = extent(found.records, COMPUTING)
    assert last - first == pytest.approx(expected.pipeline, abs=2.1e-4)  # less the host's work after the last pass
    for record in found.records:
        assert seconds_of(record.spans, {Work.UPDATE}) == pytest.approx(expected.update)
        assert seconds_of(record.spans, {Work.REDUCTION}) == pytest.approx(expected.reduction)
