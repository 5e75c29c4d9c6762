"""Recognizes the published model in a directory without a manifest, by its shapes.

Heads cannot be read off the shapes of fused weights, so only published models are known, and only if every tensor fits.
"""

from contextlib import suppress

from mm.config.model import ModelConfig
from mm.errors import UserError
from mm.families.known import FAMILIES
from mm.formats.hf_config import model_from_hf
from mm.formats.mindspeed import MindSpeedDirectory


def recognize(directory: MindSpeedDirectory) -> ModelConfig | None:
    """The published model, of any family and size, whose tensors are all in ``directory``; None if there is none."""
    for config in (config for family in FAMILIES for config in family.config_json.published.values()):
        model = model_from_hf(config)
        with suppress(UserError):
            if not directory.views(*directory.placed_model(None, "", model))[1]:
                return model
    return None
