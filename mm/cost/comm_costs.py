"""What the ranks of a run exchange besides the layers' own collectives: seconds of messages and sums,
and the reduction and the update after the pipeline.

Ranks are numbered as in ``mm.parallel.mesh``: tensor-parallel ranks are neighbours, then context, data and pipeline.
"""

from collections.abc import Sequence

from mm.config.run import Run
from mm.cost.calibration import Calibration
from mm.cost.layer_memory import WIDTHS
from mm.cost.linear_costs import FREE, Law
from mm.cost.model_states import StageSize, gathered_params, num_optimizer_shards


def all_reduce_law(calibration: Calibration, num_ranks: int, stride: int = 1) -> Law:
    """The law of a sum over ``num_ranks`` ranks that are ``stride`` apart, by bytes.

    Between nodes, the group's ranks on a node divide the bytes of a ring over their network adapters, while the ring
    within each node moves the bytes to all of these ranks.
    """
    network = calibration.network
    if network is None or num_ranks * stride <= network.node_size:
        return _within_node(calibration, num_ranks)
    num_here = max(1, network.node_size // stride)
    within = _within_node(calibration, num_here) if num_here > 1 else FREE
    per_byte = 2 * (num_ranks - 1) / num_ranks * network.per_byte / num_here
    num_nodes = -(-num_ranks // num_here)
    return Law(within.fixed + 2 * (num_nodes - 1) * network.fixed, max(within.per_row, per_byte))


def message_law(calibration: Calibration, sender: int, receiver: int) -> Law:
    """The law of a message from rank ``sender`` to rank ``receiver``, by bytes."""
    network = calibration.network
    if network is None or sender // network.node_size == receiver // network.node_size:
        return calibration.message or FREE
    return Law(network.fixed, network.per_byte)


def _within_node(calibration: Calibration, num_ranks: int) -> Law:
    """The law of a sum within a node; if this size was not measured, the nearest size's, scaled by a ring's bytes."""
    nearest = min(calibration.all_reduce, key=lambda size: (abs(size - num_ranks), size))
    law = calibration.all_reduce[nearest]
    if nearest == num_ranks:
        return law
    traffic = ((num_ranks - 1) / num_ranks) / ((nearest - 1) / nearest)
    return Law(law.fixed * (num_ranks - 1) / (nearest - 1), law.per_row * traffic)


def reduction_seconds(
    run: Run, calibration: Calibration, sizes: Sequence[StageSize], num_passes: float
) -> float:
    """Seconds to sum the gradients over the ranks with the same weights, and to gather weights.

    ``num_passes``: microbatches of a replica in a step.  Shards of gradients are reduced in each one's backward pass,
    shards of weights are gathered in its forward and in its backward pass.  Overlap is not deducted.
    """
    of_encoders, most = 0.0, max(size.whole_gradient_bytes for size in sizes)
    if run.tp_size > 1 and most:  # with sharded states, each rank sums its shard
        of_encoders = all_reduce_law(calibration, run.tp_size).seconds(most / num_optimizer_shards(run))
    return _of_copies(run, calibration, sizes, num_passes) + of_encoders


def _of_copies(run: Run, calibration: Calibration, sizes: Sequence[StageSize], num_passes: float) -> float:
    most, num_copies = max(sizes, key=lambda size: size.reduced_bytes), run.num_copies
    if num_copies == 1 or not (most.reduced_bytes or run.shards_weights):
        return 0.0
    law = all_reduce_law(calibration, num_copies, run.tp_size)
    if not run.args.splits_optimizer:
        return law.seconds(most.reduced_bytes)
    # a reduce-scatter of gradients and an all-gather of weights are half of an all-reduce each
    gather = law.seconds(most.num_trainable_params * WIDTHS[run.args.precision]) / 2
    if not run.shards_gradients:
        return law.seconds(most.reduced_bytes) / 2 + gather
    reduced = num_passes * most.num_units * law.seconds(most.reduced_bytes / max(1, most.num_units)) / 2
    if not run.shards_weights:
        return reduced + gather
    gathered = sum(law.seconds(num_params * WIDTHS[run.args.precision]) for num_params in gathered_params(run)) / 2
    return reduced + num_passes * gathered


def update_seconds(run: Run, calibration: Calibration, sizes: Sequence[StageSize]) -> float:
    """Seconds of the optimizer."""
    law = calibration.step
    return law.fixed + law.per_row * max(size.num_trainable_params for size in sizes) / num_optimizer_shards(run)
