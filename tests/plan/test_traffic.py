"""Messages and sums, within a node and between nodes."""

from dataclasses import replace

import pytest

from mm.plan.calibration import Network
from mm.plan.laws import Law
from mm.plan.traffic import all_reduce_law, message_law
from tests.plan.test_costs import by_flops
from tests.tiny import our_config

CALIBRATION = replace(by_flops(our_config(((4,),), ((4,),))), message=Law(1.0, 2.0),
                      all_reduce={2: Law(1.0, 4.0), 4: Law(3.0, 6.0)})  # fmt: skip
NODES = replace(CALIBRATION, network=Network(node_size=8, fixed=5.0, per_byte=100.0))


def test_a_group_that_was_not_measured_follows_the_nearest() -> None:
    assert all_reduce_law(CALIBRATION, 2) == Law(1.0, 4.0)
    ring = all_reduce_law(CALIBRATION, 8)
    assert (ring.fixed, ring.per_row) == pytest.approx((3 * 7 / 3, 6 * (7 / 8) / (3 / 4)))


def test_a_group_within_a_node_does_not_use_the_network() -> None:
    assert all_reduce_law(NODES, 4, stride=2) == all_reduce_law(CALIBRATION, 4)
    assert all_reduce_law(NODES, 8) == all_reduce_law(CALIBRATION, 8)


def test_ranks_of_a_node_share_the_traffic_between_nodes() -> None:
    """16 ranks on two nodes, eight network adapters each; with a stride of 8 each group has one rank on a node."""
    together, apart = all_reduce_law(NODES, 16), all_reduce_law(NODES, 2, stride=8)
    assert together.per_row == pytest.approx(2 * 15 / 16 * 100 / 8)
    assert apart == Law(2 * 5.0, 2 * 1 / 2 * 100.0)
    assert together.fixed == pytest.approx(all_reduce_law(CALIBRATION, 8).fixed + 10)


def test_a_slow_ring_within_the_node_bounds_a_sum_between_nodes() -> None:
    slow = replace(NODES, all_reduce={2: Law(0.0, 1000.0)})
    assert all_reduce_law(slow, 16).per_row == pytest.approx(1000 * (7 / 8) / (1 / 2))


@pytest.mark.parametrize(("sender", "receiver", "crosses"), [
    (0, 2, False), (4, 6, False), (6, 8, True), (0, 8, True), (80, 96, True), (0, 4, False), (4, 8, True),
    (6, 0, False), (14, 0, True)])  # fmt: skip
def test_messages_cross_nodes_where_ranks_do(sender: int, receiver: int, crosses: bool) -> None:
    assert message_law(NODES, sender, receiver) == (Law(5.0, 100.0) if crosses else Law(1.0, 2.0))
    assert message_law(CALIBRATION, sender, receiver) == Law(1.0, 2.0)
