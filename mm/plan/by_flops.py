"""A calibration without a device: every FLOP takes one unit of time.

Good for ratios, such as how evenly the stages are used; not for times.  Messages, collectives and the update are free,
and so is what "selective" recomputes.
"""

from mm.config.model import ModelConfig
from mm.model.flops import block_backwards
from mm.plan.calibration import BlockKey, BlockLaws, Calibration, Machine, MeasuredBlock
from mm.plan.costs import WHOLE_LAYER, Cutting, block_keys, forward_laws
from mm.plan.laws import Law
from mm.plan.lists import one_stage

FREE = Law(0.0, 0.0)


def calibration_by_flops(model: ModelConfig, cutting: Cutting, precision: str) -> Calibration:
    """The laws of every block of ``model``."""
    forward, found = forward_laws(one_stage(model)), dict[BlockKey, MeasuredBlock]()
    for has_images in (False, True):
        backwards = block_backwards(one_stage(model), has_images)
        for place, key in block_keys(model, cutting, has_images).items():
            # Tensor-parallel ranks share a block that is cut; one of a whole encoder runs on each rank alone.
            law = forward[place] * (cutting.tp_size // key.tp_size)
            again = law if key.recompute == WHOLE_LAYER else FREE
            backward = law * backwards[place].num_forward + again
            found[key] = MeasuredBlock(key, BlockLaws(law, backward), error=0.0)
    machine = Machine("any device, by FLOPs", precision, 1, {})
    sums = {2: FREE}
    return Calibration(machine, "", tuple(found.values()), 0.0, None, step=FREE, message=FREE, all_reduce=sums)
