"""The parts of a measured step sum to it, and those of a predicted step are the prediction's."""

import pytest

from mm.parallel.activity import Activity, Work
from mm.plan.costs import counts_of
from mm.plan.drawn import predicted_timeline
from mm.plan.measured import step_parts, unrecorded
from mm.plan.predict import Predictor
from mm.plan.workload import Workload
from mm.timeline.spans import ActivitySpan, RankRecord, StepTimeline, extent
from tests.plan.steps import batches, calibration, run
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

    found = step_parts(StepTimeline(1, (rank(0, 0.0), rank(1, 0.4)), SETTINGS))
    assert (found.data, found.pipeline, found.reduction, found.update) == pytest.approx((1.0, 7.0, 2.0, 3.0))
    assert unrecorded(rank(0, 0.0).spans) == pytest.approx(0.5)


def test_the_parts_of_a_predicted_step_are_those_of_the_prediction() -> None:
    predictor, replicas = Predictor(run(2), calibration()), tuple(counts_of(one) for one in batches(2))
    timeline = predicted_timeline(predictor, [predictor.entering(one) for one in replicas], 1)
    found, (start, end) = step_parts(timeline), extent(timeline.records)
    assert found.seconds == pytest.approx(end - start)
    assert found.update == pytest.approx(predictor.after_pipeline(run().model.placement(), [[[0]]])[1])
    # without the host's work after the last pass, which is not recorded
    assert found.pipeline == pytest.approx(predictor.predict(Workload((replicas,))).pipeline, abs=2e-4)
