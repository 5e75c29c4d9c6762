"""A calibration that follows the measured steps of a run, where they determine it."""

from dataclasses import replace

import numpy as np

from mm.plan.calibration import BlockLaws, Calibration, MeasuredBlock
from mm.plan.costs import Cutting, block_keys, laws_of
from mm.plan.differences import UPDATE, Comparison
from mm.plan.predict import Predictor
from mm.weights.table import VISION_PLACES


def refined(predictor: Predictor, found: Comparison) -> Calibration:
    """The predictor's calibration with the fitted factors of ``found``.

    Laws of the run's own blocks are scaled by kind and direction, and so is the law of the update; the host's work
    between passes becomes the measured one.  Messages and collectives stay as they are: in a run, their time cannot be
    told from waits.
    """
    run, calibration = predictor.run, predictor.calibration
    forward, backward = np.array([one.values for one in found.factors])
    blocks = dict(calibration.by_key)
    for has_images in (False, True):
        keys = block_keys(run.model, Cutting(run.tp_size, run.args.sequence_parallel), has_images)
        for place, key in keys.items():
            if has_images or place[0] not in VISION_PLACES:  # otherwise nothing passes them
                laws, kind = laws_of(key, calibration), found.kinds.by_place[place]
                error = blocks[key].error if key in blocks else calibration.error
                blocks[key] = MeasuredBlock(
                    key, BlockLaws(laws.forward * forward[kind], laws.backward * backward[kind]), error)
    update = found.parts[UPDATE]
    return replace(
        calibration, blocks=tuple(blocks.values()),
        pipeline_pass=calibration.chunk_pass + found.between if run.num_stages > 1 else calibration.pipeline_pass,
        step=calibration.step * (update.measured / update.predicted) if update.predicted > 0 else calibration.step)
