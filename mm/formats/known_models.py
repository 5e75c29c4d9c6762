"""Published models: which of them a directory without a manifest holds, by its shapes.

Heads cannot be read off the shapes of fused weights, so only these models are known, and only when every tensor fits.
"""

from collections.abc import Iterator
from contextlib import suppress

from mm.config.model import ModelConfig
from mm.errors import UserError
from mm.families.known import FAMILIES
from mm.formats.hf_config import model_from_hf
from mm.formats.mindspeed import MindSpeedDirectory


def published_models() -> Iterator[ModelConfig]:
    """Every published size of every family, on one stage."""
    for family in FAMILIES:
        yield from map(model_from_hf, family.config_json.published.values())


def recognize(directory: MindSpeedDirectory) -> ModelConfig | None:
    """The published model whose every tensor is in ``directory``; None when there is none."""
    for model in published_models():
        with suppress(UserError):
            if not directory.views(*directory.placed_model(None, "", model))[1]:
                return model
    return None
