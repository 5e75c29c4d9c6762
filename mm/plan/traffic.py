"""How long messages and collectives take between ranks, within a node and between nodes.

Ranks are numbered as in ``mm.parallel.mesh``: tensor-parallel ranks are neighbours, then context, data and pipeline.
"""

from mm.plan.calibration import Calibration
from mm.plan.laws import Law


def all_reduce_law(calibration: Calibration, num_ranks: int, stride: int = 1) -> Law:
    """The law of a sum over ``num_ranks`` ranks that are ``stride`` apart, by bytes.

    Between nodes, the group's ranks on a node divide the bytes of a ring over their network adapters, while the ring
    within each node moves the bytes to all of these ranks.
    """
    network = calibration.network
    if network is None or num_ranks * stride <= network.node_size:
        return _within_node(calibration, num_ranks)
    num_here = max(1, network.node_size // stride)
    within = _within_node(calibration, num_here) if num_here > 1 else Law(0.0, 0.0)
    per_byte = 2 * (num_ranks - 1) / num_ranks * network.per_byte / num_here
    num_nodes = -(-num_ranks // num_here)
    return Law(within.fixed + 2 * (num_nodes - 1) * network.fixed, max(within.per_row, per_byte))


def message_law(calibration: Calibration, sender: int, receiver: int) -> Law:
    """The law of a message from rank ``sender`` to rank ``receiver``, by bytes."""
    found, network = calibration.message or Law(0.0, 0.0), calibration.network
    if network is None or sender // network.node_size == receiver // network.node_size:
        return found
    return Law(network.fixed, network.per_byte)


def _within_node(calibration: Calibration, num_ranks: int) -> Law:
    """The law of a sum within a node; if this size was not measured, the nearest size's, scaled by a ring's bytes."""
    sizes = sorted(calibration.all_reduce)
    nearest = min(sizes, key=lambda size: (abs(size - num_ranks), size))
    law = calibration.all_reduce[nearest]
    if nearest == num_ranks:
        return law
    traffic = ((num_ranks - 1) / num_ranks) / ((nearest - 1) / nearest)
    return Law(law.fixed * (num_ranks - 1) / (nearest - 1), law.per_row * traffic)
