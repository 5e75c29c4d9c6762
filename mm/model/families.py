"""The code that computes the models of each family.

Towers need megatron, so they are imported only when a stage asks for them; data workers ask for arithmetic alone.
"""

from mm.config.model import ModelConfig
from mm.families.qwen2_5_vl import QWEN2_5_VL
from mm.model.arithmetic import Arithmetic
from mm.model.qwen2_5_vl.positions import blocks, image_flops, mrope_positions

_ARITHMETIC = {QWEN2_5_VL.title: Arithmetic(mrope_positions, blocks, image_flops)}


def arithmetic_of(model: ModelConfig) -> Arithmetic:
    """The arithmetic of the model's family."""
    return _ARITHMETIC[model.family.title]


def towers_of(model: ModelConfig):  # type checkers infer Towers, whose import would load megatron here
    """The ``mm.model.towers.Towers`` of the model's family."""
    from mm.model.qwen2_5_vl.language import LanguageModel, language_inputs
    from mm.model.qwen2_5_vl.vision import Projector, VisionEncoder, features_of, last_output, vision_inputs
    from mm.model.towers import Towers

    return {QWEN2_5_VL.title: Towers(VisionEncoder, Projector, LanguageModel, vision_inputs, language_inputs,
                                     features_of, last_output)}[model.family.title]
