"""Spikes and bad steps: what counts as one, and that a run with --skip-bad-steps goes on, alike in any layout."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.checkpoint.directories import find_checkpoint
from mm.checkpoint.manifest import validated
from mm.errors import AgreedError
from mm.run.optim.update import StepResult
from mm.run.progress import NUM_RECENT, RecentSteps
from tests.tiny_inputs import metrics, run, write_inputs


def result(loss: float = 1.0, norm: float = 1.0, fault: str = "") -> StepResult:
    return StepResult(loss, 1e-3, norm, 1.0, updated=not fault, fault=fault)


def after(recent: RecentSteps, *results: StepResult) -> RecentSteps:
    for one in results:
        recent = recent.after(one, 2)
    return recent


def test_a_spike_is_a_multiple_of_the_median_of_enough_steps() -> None:
    known = after(RecentSteps(), *[result(2.0, 3.0)] * 20)
    assert RecentSteps().max_norm(10) == after(RecentSteps(), *[result()] * 19).max_norm(10) == math.inf
    assert known.max_norm(10) == 30.0
    assert known.spike(result(19.9, 29.9), 10) == ""
    assert known.spike(result(20.1, 1), 10) == "the loss is 20.1, more than 10 times its median of 2"
    assert known.spike(result(1, 31), 10) == "the gradient norm is 31, more than 10 times its median of 3"
    assert known.spike(result(fault="the loss is nan"), 10) == "the loss is nan"


@given(st.lists(st.floats(0.1, 100), max_size=3 * NUM_RECENT))
def test_only_the_latest_steps_count(norms: list[float]) -> None:
    recent = after(RecentSteps(), *(result(norm=norm) for norm in norms))
    assert recent.norms == tuple(norms[-NUM_RECENT:])
    assert validated(RecentSteps, vars(recent), Path("save")) == recent


def test_bad_steps_do_not_count_and_only_so_many_in_a_row_are_skipped() -> None:
    bad = result(math.nan, fault="the loss is nan")
    recent = after(RecentSteps(), result(), bad, bad, result(), bad, bad)
    assert recent.norms == (1.0, 1.0) and recent.num_bad == 2
    with pytest.raises(AgreedError, match="the loss is nan, and the 2 steps before were bad too; --skip-bad-steps 2"):
        recent.after(bad, 2)


def test_spikes_are_skipped_and_recorded_alike_in_any_layout_and_after_a_resume(tmp_path: Path) -> None:
    """The factor is so small that some steps of an ordinary training count as spikes."""
    inputs = write_inputs(tmp_path)
    flags = ("--train-iters", "36", "--skip-bad-steps", "50", "--spike-factor", "0.96", "--lr", "1e-5")
    said = run(inputs, "one", 1, *flags, "--load", str(inputs / "hf"))
    for more in (("--exit-interval", "28"), ()):
        run(inputs, "stopped", 2, *flags, "--load", str(inputs / "hf"), *more)
    found = [[row for row in metrics(inputs, name) if row["kind"] == "spike"] for name in ("one", "stopped")]
    shown = [[(row["iteration"], row["skipped"], row["samples"]) for row in rows] for rows in found]
    assert shown[0] == shown[1]
    skipped = [row for row in found[0] if row["skipped"]]
    assert skipped and skipped[0]["iteration"] < 28 < skipped[-1]["iteration"]
    assert all(len(row["samples"]) == 4 for row in found[0])
    assert f"note: iteration {skipped[0]['iteration']} is skipped: the gradient norm is " in said
    steps = {row["iteration"]: row for row in metrics(inputs, "one") if row["kind"] == "step"}
    assert [iteration for iteration, row in steps.items() if not row["updated"]] == [
        row["iteration"] for row in skipped]


def test_a_run_that_fails_keeps_the_checkpoint_that_it_was_writing(tmp_path: Path) -> None:
    """From step 21 on, all steps are bad: one is skipped and saved, and the next ends the run before any other vote."""
    inputs = write_inputs(tmp_path)
    with pytest.raises(AssertionError, match=r"iteration 22: the gradient norm is .* and the step before was bad too"):
        run(inputs, "fails", 2, "--load", str(inputs / "hf"), "--train-iters", "50", "--lr", "1e-5", "--skip-bad-steps",
            "1", "--spike-factor", "0.5", "--async-save", "--save-interval", "21")  # fmt: skip
    saved = inputs / "fails" / "save"
    assert sorted(path.name for path in saved.glob("iter_*")) == ["iter_0000021"]
    assert find_checkpoint(saved) == (saved / "iter_0000021", ())
