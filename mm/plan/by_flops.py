"""A calibration without a device: every FLOP takes one unit of time, whatever does it.

Good for ratios, such as how evenly the stages are used; not for times.  Messages, collectives and the update are free,
and so is what "selective" recomputes.
"""

from collections.abc import Iterator
from dataclasses import replace

from mm.batch import NO_SAMPLES
from mm.config.model import ModelConfig
from mm.model.flops import BlockPlace, block_backwards, blocks
from mm.plan.calibration import BlockKey, BlockLaws, Calibration, Machine, MeasuredBlock
from mm.plan.costs import COUNTS, WHOLE_LAYER, Cutting, block_keys
from mm.plan.laws import Law

FREE = Law(0.0, 0.0)


def calibration_by_flops(model: ModelConfig, cutting: Cutting, precision: str) -> Calibration:
    """The laws of every block of ``model``."""
    forward, found = dict(_forward_laws(model)), dict[BlockKey, MeasuredBlock]()
    for has_images in (False, True):
        backwards = block_backwards(model, has_images)
        for place, key in block_keys(model, cutting, has_images).items():
            # All tensor-parallel ranks work on a block that is cut, but each on its own images with a whole encoder.
            law = _times(forward[place], cutting.tp_size // key.tp_size)
            again = law if key.recompute == WHOLE_LAYER else FREE
            backward = _times(law, backwards[place].num_forward) + again
            found[key] = MeasuredBlock(key, BlockLaws(law, backward), error=0.0)
    machine = Machine("any device, by FLOPs", precision, 1, {})
    sums = {2: FREE}
    return Calibration(machine, "", tuple(found.values()), 0.0, None, step=FREE, message=FREE, all_reduce=sums)


def _forward_laws(model: ModelConfig) -> Iterator[tuple[BlockPlace, Law]]:
    """FLOPs of each block for each of its rows and pairs; they are linear in both."""
    of_one = [blocks(model, replace(NO_SAMPLES, **{name: 1})) for name in COUNTS]
    for same in zip(*of_one, strict=True):
        per_row = [one.forward / one.rows for one in same if one.rows > 0 and not one.pairs]
        per_pair = [one.forward / one.pairs for one in same if one.pairs > 0 and not one.rows]
        yield (same[0].place, same[0].layer), Law(0.0, (per_row or [0.0])[0], (per_pair or [0.0])[0])


def _times(law: Law, factor: int) -> Law:
    return Law(law.fixed * factor, law.per_row * factor, law.per_pair * factor)
