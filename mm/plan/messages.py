"""How many bytes cross the boundaries between stages."""

from typing import TypeVar

import numpy as np

from mm.config.model import ModelConfig
from mm.placement import Message

Rows = TypeVar("Rows", int, np.ndarray)


def message_bytes(message: Message, num_patches: Rows, num_tokens: Rows, model: ModelConfig, width: int) -> Rows:
    """Bytes that cross a boundary for one microbatch; of all tensor-parallel ranks together if they cut the rows.

    ``width``: bytes per element.  The counts are numbers, or arrays with an entry for each microbatch.
    """
    vision, language = model.vision, model.language
    return {
        Message.NOTHING: 0 * num_tokens,
        Message.PATCHES: num_patches * vision.hidden_size,
        Message.VISUAL_TOKENS: num_patches // vision.spatial_merge_size**2 * language.hidden_size,
        Message.HIDDEN_STATES: num_tokens * language.hidden_size,
    }[message] * width
