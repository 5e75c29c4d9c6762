"""Blocks are recovered from times of slots, whatever one round in three measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.planner.slots import (
    DIFFERENCES,
    DIRECTIONS,
    LANGUAGE,
    LAYERS,
    VISION,
    Round,
    SlotTimes,
    block_seconds,
    law_and_error,
    pass_seconds,
    slots_of,
    usual_pass,
)
from mm.weights.table import Place

CHUNK_PASS = 3e-4
LAYER = {number: 2e-3 + 1e-5 * number for number in (100, 300, 900)}
"""Seconds of each layer by microbatch, whose number is its rows here."""
HEAD = {number: 5e-6 * number for number in LAYER}


def measured(factor: float) -> Round:
    """The slots on a machine that is slower by ``factor``: layers, the head in the last slot, and the host's pass."""
    found = {}
    for slot, (vision, language) in enumerate(zip(VISION, LANGUAGE, strict=True)):
        seconds = {number: factor * (CHUNK_PASS + (vision + language) * layer + (slot == 8) * HEAD[number])
                   for number, layer in LAYER.items()}
        found[slot] = SlotTimes(seconds, {number: 2 * one for number, one in seconds.items()})
    return found


@given(disturbed=st.floats(0.1, 10.0), place=st.integers(0, 2))
def test_one_disturbed_round_changes_no_block(disturbed: float, place: int) -> None:
    factors = [1.0, 1.0]
    factors.insert(place, disturbed)
    rounds = [measured(factor) for factor in factors]
    head = next(one for one in DIFFERENCES if one.place == (Place.HEAD, None))
    for one, expected in ((LAYERS[0], LAYER), (LAYERS[1], LAYER), (head, HEAD)):
        for direction, times in zip(DIRECTIONS, (1, 2), strict=True):
            seconds = block_seconds(rounds, one, direction, 0.0)
            law, _ = law_and_error(seconds, {number: (number, 0) for number in seconds})
            assert [law.seconds(number) for number in LAYER] == pytest.approx(
                [times * expected[number] for number in LAYER])  # fmt: skip


@given(factors=st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3))
def test_the_error_holds_the_spread_of_the_rounds(factors: list[float]) -> None:
    rounds = [measured(factor) for factor in factors]
    seconds = block_seconds(rounds, LAYERS[0], "forward", 0.0)
    _, error = law_and_error(seconds, {number: (number, 0) for number in seconds})
    middle = sorted(factors)[1]
    assert error == pytest.approx((max(factors) - min(factors)) / 2 / middle, abs=1e-6)  # the law itself fits


def test_the_host_takes_what_a_slot_of_one_layer_has_beyond_a_layer() -> None:
    rounds = [measured(1.0)] * 3
    found = pass_seconds(rounds, LAYERS)
    assert len(found) == len(LAYERS) * len(DIRECTIONS) * len(LAYER)
    assert sorted(set(round(one, 9) for one in found)) == [CHUNK_PASS, 2 * CHUNK_PASS]
    assert pass_seconds(rounds, [one for one in DIFFERENCES if one not in LAYERS]) == []
    assert usual_pass(found) == pytest.approx(1.5 * CHUNK_PASS)
    assert usual_pass([]) == usual_pass([-1e-6]) == 0.0, "lost in noise"


def test_a_block_beside_no_other_slot_is_measured_without_the_hosts_pass() -> None:
    (full,) = (one for one in DIFFERENCES if one.less is None)
    assert full.more in slots_of([full])
    seconds = block_seconds([measured(1.0)], full, "forward", CHUNK_PASS)
    assert {number: times[0] for number, times in seconds.items()} == pytest.approx(LAYER)


def test_times_that_are_lost_in_noise_give_a_law_of_zero() -> None:
    law, error = law_and_error({100: [-1e-6, 1e-7, -2e-6], 300: [-1e-6] * 3}, {100: (100, 0), 300: (300, 0)})
    assert law.seconds(300) == 0 and error == 0
