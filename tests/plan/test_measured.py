"""The parts of a measured step sum to it, and its passes are those of its spans."""

import numpy as np
import pytest

from mm.parallel.activity import Activity, Work
from mm.plan.costs import counts_of
from mm.plan.measured import measured_step
from mm.plan.passes import Kinds, Passes
from mm.plan.predict import Predictor
from mm.timeline.spans import ActivitySpan, RankRecord, StepTimeline, extent
from tests.plan.steps import as_measured, batches, calibration, run
from tests.timeline.records import SETTINGS


def test_a_step_by_hand() -> None:
    """Two tensor-parallel ranks of one stage: the second is slower."""
    def rank(number: int, later: float) -> RankRecord:
        times = [(Work.DATA, None, 0.0, 1.0), (Work.INPUTS, 0, 2.0, 2.5), (Work.LANGUAGE_FORWARD, 0, 3.0, 5.0 + later),
                 (Work.EXCHANGE, None, 5.0 + later, 6.0), (Work.BACKWARD, 0, 6.0, 9.0), (Work.REDUCTION, None, 9.5, 10),
                 (Work.UPDATE_WAIT, None, 11.0, 11.5), (Work.UPDATE, None, 11.5, 13.0)]
        spans = tuple(ActivitySpan(Activity(work, None if at is None else 0, at), start, end)
                      for work, at, start, end in times)
        return RankRecord(number, 0, 0, number, "", (), spans, tuple(batches(1, 1)[0]))

    found = measured_step(StepTimeline(1, (rank(0, 0.0), rank(1, 0.4)), SETTINGS), 1, 1)
    assert (found.data, found.pipeline, found.reduction, found.update) == pytest.approx((1.0, 7.0, 2.0, 3.0))
    assert found.recorded[0][:, 0, 0].tolist() == pytest.approx([2.7, 3.0])
    assert found.between.tolist() == pytest.approx([0.5])
    assert found.waits.tolist() == pytest.approx([0.8])


def test_a_predicted_step_is_read_as_it_was_predicted() -> None:
    replicas = batches(2)
    timeline, predictor = as_measured(calibration(), replicas), Predictor(run(2), calibration())
    found = measured_step(timeline, 2, 2)
    start, end = extent(timeline.records)
    assert found.seconds == pytest.approx(end - start)
    for counts, recorded in zip(replicas, found.recorded, strict=True):
        passes = Passes.of(predictor, Kinds.of(predictor), counts_of(counts))
        assert np.allclose(recorded, passes.recorded(), rtol=1e-9, atol=1e-12)
    assert found.update == pytest.approx(predictor.after_pipeline(run().model.placement(), [[[0]]])[1])
