"""How long a step takes after its pipeline: the reduction of gradients and the update."""

from collections.abc import Sequence

from mm.config.run import Run
from mm.plan.calibration import Calibration
from mm.plan.layer_memory import WIDTHS
from mm.plan.sizes import StageSize, gathered_params, num_optimizer_shards
from mm.plan.traffic import all_reduce_law


def reduction_seconds(
    run: Run, calibration: Calibration, sizes: Sequence[StageSize], num_passes: float
) -> float:
    """Seconds to sum the gradients over the ranks with the same weights, and to gather weights.

    ``num_passes``: microbatches of a replica in a step.  Shards of gradients are reduced in each one's backward pass,
    shards of weights are gathered in its forward and in its backward pass.  Overlap is not deducted.
    """
    return _of_copies(run, calibration, sizes, num_passes) + _of_encoders(run, calibration, sizes)


def _of_encoders(run: Run, calibration: Calibration, sizes: Sequence[StageSize]) -> float:
    """Tensor-parallel ranks sum the gradients of whole encoders; with the distributed optimizer, each sums its shard.
    """
    most = max(size.whole_gradient_bytes for size in sizes)
    if run.tp_size == 1 or not most:
        return 0.0
    return all_reduce_law(calibration, run.tp_size).seconds(most / num_optimizer_shards(run))


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
