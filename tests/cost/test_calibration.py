"""Laws recover what they are fitted to; messages and sums follow the network between nodes."""

from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.cost.calibration import Law, Network, Timed, fitted
from mm.cost.costs import all_reduce_law, message_law
from mm.plan.measure import law_and_error
from tests.cost.test_costs import by_flops
from tests.tiny import our_config

ROWS = ((64, 4e3), (256, 2e4), (256, 6e4), (1024, 3e5), (2048, 3e6))
"""Rows and pairs of some microbatches."""
COEFFICIENTS = st.sampled_from((0.0, 1e-4, 3e-3))
CALIBRATION = replace(by_flops(our_config(((4,),), ((4,),))), message=Law(1.0, 2.0),
                      all_reduce={2: Law(1.0, 4.0), 4: Law(3.0, 6.0)})  # fmt: skip
NODES = replace(CALIBRATION, network=Network(node_size=8, fixed=5.0, per_byte=100.0))


@given(fixed=COEFFICIENTS, per_row=COEFFICIENTS, per_pair=st.sampled_from((0.0, 1e-8, 3e-7)))
def test_exact_times_give_their_law(fixed: float, per_row: float, per_pair: float) -> None:
    law = Law(fixed, per_row, per_pair)
    times = [Timed(rows, pairs, law.seconds(rows, pairs)) for rows, pairs in ROWS]
    if any(one.seconds for one in times):
        assert astuple(fitted(times)) == pytest.approx((fixed, per_row, per_pair), rel=1e-6, abs=1e-15)
    assert law.seconds(0) == 0


@given(noise=st.lists(st.floats(0.5, 2.0), min_size=len(ROWS), max_size=len(ROWS)))
def test_noisy_times_give_no_negative_coefficient(noise: list[float]) -> None:
    law = Law(1e-3, 1e-5, 1e-9)
    times = [Timed(rows, pairs, factor * law.seconds(rows, pairs))
             for (rows, pairs), factor in zip(ROWS, noise, strict=True)]
    found = fitted(times)
    assert min(astuple(found)) >= 0
    own, true = (sum((one.seconds(time.rows, time.pairs) / time.seconds - 1) ** 2 for time in times)
                 for one in (found, law))
    assert own <= true + 1e-12  # no law that is allowed fits better


@given(factors=st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3))
def test_the_middle_round_counts_and_the_error_holds_their_spread(factors: list[float]) -> None:
    rounds = [{number: factor * (1e-3 + 1e-5 * number) for number in (100, 300, 900)} for factor in factors]
    law, error = law_and_error(rounds, {number: (number, 0) for number in rounds[0]})
    middle = sorted(factors)[1]
    assert law.seconds(300) == pytest.approx(middle * 4e-3)
    assert error == pytest.approx((max(factors) - min(factors)) / 2 / middle, abs=1e-6)  # the law itself fits
    noise, error = law_and_error([{100: -1e-6, 300: 1e-7}, {100: -1e-6, 300: -1e-6}], {100: (100, 0), 300: (300, 0)})
    assert noise.seconds(300) == 0 == error


def test_a_group_that_was_not_measured_follows_the_nearest() -> None:
    assert all_reduce_law(CALIBRATION, 2) == Law(1.0, 4.0)
    ring = all_reduce_law(CALIBRATION, 8)
    assert (ring.fixed, ring.per_row) == pytest.approx((3 * 7 / 3, 6 * (7 / 8) / (3 / 4)))


def test_only_groups_on_several_nodes_use_the_network_and_share_its_traffic() -> None:
    """16 ranks on two nodes, eight network adapters each; with a stride of 8 each group has one rank on a node."""
    assert all_reduce_law(NODES, 4, stride=2) == all_reduce_law(CALIBRATION, 4)
    together, apart = all_reduce_law(NODES, 16), all_reduce_law(NODES, 2, stride=8)
    assert together.per_row == pytest.approx(2 * 15 / 16 * 100 / 8)
    assert apart == Law(2 * 5.0, 2 * 1 / 2 * 100.0)
    assert together.fixed == pytest.approx(all_reduce_law(CALIBRATION, 8).fixed + 10)
    slow = replace(NODES, all_reduce={2: Law(0.0, 1000.0)})
    assert all_reduce_law(slow, 16).per_row == pytest.approx(1000 * (7 / 8) / (1 / 2))


@pytest.mark.parametrize(("sender", "receiver", "crosses"), [
    (4, 6, False), (6, 8, True), (80, 96, True), (14, 0, True)])
def test_messages_cross_nodes_where_ranks_do(sender: int, receiver: int, crosses: bool) -> None:
    assert message_law(NODES, sender, receiver) == (Law(5.0, 100.0) if crosses else Law(1.0, 2.0))
    assert message_law(CALIBRATION, sender, receiver) == Law(1.0, 2.0)
