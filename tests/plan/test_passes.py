"""Passes by kind of block add up to the slots that predictions use."""

import numpy as np
import pytest

from mm.plan.costs import counts_of
from mm.plan.passes import Kinds, Passes
from mm.plan.predict import Predictor
from mm.plan.workload import Workload
from tests.plan.steps import batches, calibration, model, run
from tests.plan.test_costs import seconds


def test_kinds_of_all_blocks_have_their_tower() -> None:
    kinds = Kinds.of(Predictor(run(), calibration()))
    assert dict(zip(kinds.names, kinds.is_vision, strict=True)) == {
        "patch embedding": True, "window-attention ViT layer": True, "full-attention ViT layer": True,
        "projector": True, "word embedding": False, "LLM layer": False, "norm and head": False}


def test_kinds_and_the_hosts_work_add_up_to_slots() -> None:
    predictor, (batch,) = Predictor(run(), calibration()), batches(1)
    counts = counts_of(batch)
    passes = Passes.of(predictor, Kinds.of(predictor), counts)
    whole = seconds(model(), calibration(), *batch)
    assert (passes.inside, passes.between) == pytest.approx((1e-4, 2e-4))
    assert np.allclose(passes.recorded() + passes.between * passes.is_passed, whole, rtol=1e-9)
    double = passes.recorded(np.full((2, 7), 2.0))
    assert np.allclose(double - passes.recorded(), passes.of_kinds.sum(axis=-1))


def test_the_pipeline_is_that_of_the_prediction() -> None:
    predictor, (batch,) = Predictor(run(), calibration()), batches(1)
    counts = counts_of(batch)
    passes = Passes.of(predictor, Kinds.of(predictor), predictor.entering(counts))
    timeline = passes.timeline(passes.recorded(), [passes.between] * 2)
    found = predictor.predict(Workload(((counts,),)))
    assert max(steps[-1].end for steps in timeline) == pytest.approx(found.pipeline)
    assert passes.num_passes.tolist() == [len(steps) - int((~passes.is_passed[:, :, stage::2]).sum())
                                          for stage, steps in enumerate(timeline)]
