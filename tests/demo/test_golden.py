"""Losses of the demo that differ from the golden ones are reported with step, both losses and the cure."""

import json
import math

import pytest

from demo import golden
from demo.golden import Golden
from demo.stages import DemoError


def expecting(*losses: float) -> Golden:
    return Golden(losses, 1e-5, "5e-7 between two machines", "2026-11-28")


def test_equal_losses_pass_and_the_largest_difference_is_returned():
    expected = expecting(4.0, 2.0)
    assert golden.check([4.0, 2.0], expected) == 0
    difference = golden.check([4.0, 2.0 + 1e-6], expected)
    assert difference == pytest.approx(5e-7, rel=1e-6)
    assert "first 2 steps differ by at most 5.0e-07 from the golden ones for cpu" in golden.said(
        [], difference, "cpu", expected)


def test_the_first_difference_is_reported():
    text = "step 2 has loss 2.001, the golden one is 2.0: a relative difference of 5.0e-04, above 1e-05 .measured: 5e-7"
    with pytest.raises(DemoError, match=text) as error:
        golden.check([4.0, 2.001, 1.5], expecting(4.0, 2.0, 1.0))
    assert "golden_losses.json and explain it in the commit: [4.0, 2.001, 1.5]" in str(error.value)


def test_a_nan_loss_differs():
    with pytest.raises(DemoError, match="step 1 has loss nan"):
        golden.check([math.nan], expecting(4.0))


def test_without_golden_losses_those_to_add_are_printed(capsys: pytest.CaptureFixture[str]):
    assert golden.of_device("npu") is None and golden.compare([4.0] * 30, "npu") is None
    printed = capsys.readouterr().out
    assert "no golden losses for npu yet" in printed
    assert Golden(**json.loads(printed[printed.index("{"):])["npu"]).losses == [4.0] * golden.NUM_STEPS


def test_the_cpu_has_one_loss_for_each_step():
    assert len(golden.of_device("cpu").losses) == golden.NUM_STEPS
