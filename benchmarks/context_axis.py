"""What the ranks of the context axis read when a script, and not the loader, makes the microbatches."""

import math
from dataclasses import replace

import torch

from mm.batch import Microbatch
from mm.parallel.context import Context


def own_pixels(microbatch: Microbatch, context: Context) -> Microbatch:
    """``microbatch``, which has the pixels of all images, with those that this rank of the context axis holds."""
    images = context.images(microbatch)
    if len(images) == len(microbatch.image_grids):
        return microbatch
    assert microbatch.pixel_values is not None, "all images have theirs"
    parts = microbatch.pixel_values.split([math.prod(grid) for grid in microbatch.image_grids])
    own = torch.cat([parts[image] for image in images]) if images else None
    return replace(microbatch, pixel_values=own)
