"""Losses of the demo that differ from those on its card are reported with step, both losses and the cure."""

import math
from dataclasses import replace

import pytest

from demo import golden
from demo.stages import DemoError
from mm.device.platforms import PLATFORMS
from verified.card import Card

CARD = golden.card_of("cpu")


def expecting(*losses: float) -> Card:
    return replace(CARD, losses=losses)


def test_equal_losses_pass_and_the_largest_difference_is_returned():
    card = expecting(4.0, 2.0)
    assert golden.check([4.0, 2.0], card) == 0
    difference = golden.check([4.0, 2.0 + 1e-6], card)
    assert difference == pytest.approx(5e-7, rel=1e-6)
    assert "first 2 steps differ by at most 5.0e-07 from the golden ones for cpu" in golden.said(difference, card)


def test_the_first_difference_is_reported():
    text = "step 2 has loss 2.001; the card has 2.0, a relative difference of 5.0e-04"
    with pytest.raises(DemoError, match=text) as error:
        golden.check([4.0, 2.001, 1.5], expecting(4.0, 2.0, 1.0))
    assert "python -m verified.fill verified/tiny-cpu-demo.yaml --by NAME" in str(error.value)
    assert "AVX2 kernels and plain SSE ones; 2.6e-7 between the two layouts: 5.0e-07" in str(error.value)


def test_a_nan_loss_differs():
    with pytest.raises(DemoError, match="step 1 has loss nan"):
        golden.check([math.nan], expecting(4.0))


def test_without_golden_losses_the_command_that_records_them_is_named():
    card = replace(golden.card_of("npu"), status="unverified", losses=())
    difference = golden.check([4.0], card)
    assert difference is None
    assert golden.said(difference, card) == (
        "There are no golden losses for npu yet; this command records them: "
        "python -m verified.fill verified/tiny-npu-demo.yaml --by NAME")


@pytest.mark.parametrize("device", [one.name for one in PLATFORMS])
def test_each_device_has_a_card_with_one_loss_per_step(device: str):
    card = golden.card_of(device)
    assert len(card.losses) == (golden.NUM_STEPS if card.is_verified else 0)
    assert card.is_verified or device != "cpu"
