"""A difference between prediction and measurement is found where it was made."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.parallel.activity import Activity, Work
from mm.plan.differences import DATA, HOST, MESSAGES, SINGLE, UPDATE, Comparison, compare
from mm.plan.laws import Law
from mm.plan.predict import Predictor
from mm.plan.refined import refined
from mm.timeline.spans import ActivitySpan
from tests.plan.steps import as_measured, batches, calibration, run, scaled, with_slow_pass

KINDS = ("patch embedding", "window-attention ViT layer", "full-attention ViT layer", "projector", "word embedding",
         "LLM layer", "norm and head")  # fmt: skip
PAIRS = st.tuples(st.floats(0.5, 3.0), st.floats(0.5, 3.0))


def compared(truth: object, num_replicas: int = 1) -> Comparison:
    timelines = [as_measured(truth, batches(num_replicas, seed=seed), seed) for seed in (1, 2)]
    found = compare(Predictor(run(num_replicas), calibration()), timelines)
    assert sum(found.causes.values()) == pytest.approx(found.step.more, abs=1e-12)
    assert sum(one.predicted for one in found.parts.values()) == pytest.approx(found.step.predicted)
    return found


def test_no_difference_has_no_causes() -> None:
    found = compared(calibration(), 2)
    assert found.error == pytest.approx(0, abs=1e-9)
    assert all(abs(seconds) < 2.5e-4 for seconds in found.causes.values())  # the host's work after the last pass
    for stage in found.stages:
        assert stage.busy.more == pytest.approx(0, abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(KINDS, PAIRS)))
def test_known_factors_come_back_by_kind_and_direction(factors: dict[str, tuple[float, float]]) -> None:
    found = compared(scaled(calibration(), factors))
    for direction, fitted in enumerate(found.factors):
        expected = [factors[name][direction] for name in found.kinds.names]
        alone = {group[0] for group in fitted.groups if len(group) == 1}
        assert {KINDS.index("LLM layer"), KINDS.index("norm and head")} <= alone
        for kind in alone:
            assert fitted.values[kind] == pytest.approx(expected[kind], rel=1e-3)


@settings(max_examples=10, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(KINDS, PAIRS)), st.floats(0.5, 3.0), st.floats(0.0, 1e-3))
def test_a_refined_calibration_predicts_what_was_measured(
    factors: dict[str, tuple[float, float]], of_update: float, host: float
) -> None:  # fmt: skip
    truth = scaled(calibration(), factors)
    truth = replace(truth, step=truth.step * of_update, pipeline_pass=1e-4 + host)
    timelines = [as_measured(truth, batches(1, seed=seed), seed) for seed in (1, 2)]
    predictor = Predictor(run(), calibration())
    before = compare(predictor, timelines)
    better = refined(predictor, before)
    after = compare(Predictor(run(), better), timelines)
    assert abs(after.error) < max(0.02, abs(before.error) / 5)
    assert better.step.fixed == pytest.approx(truth.step.fixed, rel=0.2)
    assert (better.message, better.all_reduce) == (truth.message, truth.all_reduce)
    assert {one.key for one in better.blocks} >= {one.key for one in truth.blocks}


@pytest.mark.parametrize(("truth", "name"), [
    (scaled(calibration(), {"LLM layer": (2.0, 1.0)}), "LLM layer"),
    (scaled(calibration(), {"LLM layer": (1.0, 0.4)}), "LLM layer"),
    (scaled(calibration(), {"norm and head": (3.0, 3.0)}), "norm and head"),
    (replace(calibration(), message=Law(5e-3, 0.0)), MESSAGES),
    (replace(calibration(), pipeline_pass=3e-3), HOST),
    (replace(calibration(), step=Law(0.1, 0.0)), UPDATE),
])  # fmt: skip
def test_the_largest_cause_is_what_was_changed(truth: object, name: str) -> None:
    found = compared(truth)
    others = {other: abs(seconds) for other, seconds in found.causes.items() if other != name}
    assert abs(found.causes[name]) > 3 * max(others.values())
    assert np.sign(found.causes[name]) == np.sign(found.step.more)


def test_waits_for_data_and_single_slow_passes_are_causes() -> None:
    timeline = as_measured(calibration(), batches(1))
    late = [replace(record, spans=(ActivitySpan(Activity(Work.DATA), -0.5, 0.0), *record.spans))
            for record in timeline.records]
    found = compare(Predictor(run(), calibration()), [replace(timeline, records=tuple(late))])
    assert found.causes[DATA] == pytest.approx(0.5)
    slow = with_slow_pass(timeline, 0.5)
    found = compare(Predictor(run(), calibration()), [slow])
    assert max(found.causes, key=lambda name: found.causes[name]) == SINGLE
    assert found.stages[0].busy.more == pytest.approx(0.5)
    assert found.stages[1].busy.more == pytest.approx(0)
