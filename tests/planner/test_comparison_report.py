"""What ``mm-plan compare`` says about a difference, above its tables."""

from dataclasses import replace
from pathlib import Path

import pytest

from mm.plan.calibration import Calibration
from mm.plan.differences import compare
from mm.plan.laws import Law
from mm.plan.predict import Predictor
from mm.planner.comparison_report import cause_lines, comparison_report, refinement_lines
from tests.plan.steps import as_measured, batches, calibration, run, scaled, with_slow_pass


@pytest.mark.parametrize(("truth", "beginning", "end"), [
    (calibration(), "The prediction is accurate: it differs from the measured step by ", "%"),
    (scaled(calibration(), {"LLM layer": (3.0, 3.0)}), "The step took ",
     " s longer than predicted; the largest cause is: LLM layer, {largest} s, above all on stage 1"),
    (scaled(calibration(), {"LLM layer": (0.2, 0.2)}), "The step took ",
     " s less than predicted; the largest cause is: LLM layer, {largest} s, above all on stage 1"),
    (scaled(calibration(), {"window-attention ViT layer": (4.0, 4.0)}), "The step took ",
     " s longer than predicted; the largest cause is: window-attention ViT layer, {largest} s, above all on stage 0"),
    (replace(calibration(), step=Law(0.1, 0.0)), "The step took ", "; the largest cause is: update, {largest} s"),
])  # fmt: skip
def test_the_first_line_names_the_largest_cause(truth: Calibration, beginning: str, end: str) -> None:
    timelines = [as_measured(truth, batches(1, seed=seed), iteration) for seed, iteration in ((1, 3), (2, 5))]
    found = compare(Predictor(run(), calibration()), timelines)
    text = comparison_report(found, timelines)
    first = text.splitlines()[0]
    largest = max(found.causes.values(), key=abs)
    assert first.startswith(beginning) and first.endswith(end.format(largest=f"{abs(largest):.4g}"))
    assert "Measured  iterations 3, 5" in text
    assert all(name in text for name in ("0      forward, chunk 1", "1      backward, chunk 0", "gradient reduction"))
    assert cause_lines(found)[0] == f"{first}."


def test_single_slow_passes_are_explained() -> None:
    slow = with_slow_pass(as_measured(calibration(), batches(1)), 0.5)
    text = comparison_report(compare(Predictor(run(), calibration()), [slow]), [slow])
    assert "the largest cause is: single passes" in text.splitlines()[0]
    assert text.splitlines()[-1].startswith("note: single passes: some passes took longer or shorter than others")


def test_what_was_refined_is_said() -> None:
    timelines = [as_measured(scaled(calibration(), {"LLM layer": (3.0, 3.0)}), batches(1))]
    found, better = (compare(Predictor(run(), one), timelines) for one in (
        calibration(), scaled(calibration(), {"LLM layer": (3.0, 3.0)})))
    first, forward, _, others = refinement_lines(found, better, Path("new.json")).splitlines()
    assert first == f"written: new.json: the error of these steps was {found.error:+.1%} and is {better.error:+.1%}"
    assert forward.startswith("         refined, forward: ") and "LLM layer" in forward
    assert others == "         refined too: update, host between passes"
