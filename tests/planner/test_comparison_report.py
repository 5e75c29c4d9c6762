"""What ``mm-plan compare`` says of a difference, on top of its tables."""

from dataclasses import replace
from pathlib import Path

import pytest

from mm.plan.calibration import Calibration
from mm.plan.differences import compare
from mm.plan.laws import Law
from mm.plan.predict import Predictor
from mm.planner.comparison_report import cause_lines, comparison_report, refinement_lines
from tests.plan.steps import as_measured, batches, calibration, run, scaled


@pytest.mark.parametrize(("truth", "beginning", "end"), [
    (calibration(), "The prediction is right: it differs from the measured step by ", "%"),
    (scaled(calibration(), {"LLM layer": (3.0, 3.0)}), "The step took ",
     " s longer than predicted; the largest cause is: LLM layer, {largest} s, above all on stage 1"),
    (scaled(calibration(), {"LLM layer": (0.2, 0.2)}), "The step took ",
     " s less than predicted; the largest cause is: LLM layer, {largest} s, above all on stage 1"),
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


def test_what_was_refined_is_said() -> None:
    timelines = [as_measured(scaled(calibration(), {"LLM layer": (3.0, 3.0)}), batches(1))]
    found, better = (compare(Predictor(run(), one), timelines) for one in (
        calibration(), scaled(calibration(), {"LLM layer": (3.0, 3.0)})))
    first, forward, _, others = refinement_lines(found, better, Path("new.json")).splitlines()
    assert first == f"written: new.json: the error of these steps was {found.error:+.1%} and is {better.error:+.1%}"
    assert forward.startswith("         refined, forward: ") and "LLM layer" in forward
    assert others == "         refined too: update, host between passes"
