"""The code that computes the models of each family.

Towers need megatron, so they are imported only when a stage asks for them; data workers ask for arithmetic alone.
"""

from mm.config.model import ModelConfig
from mm.families.qwen2_5_vl.family import QWEN2_5_VL
from mm.model.arithmetic import Arithmetic
from mm.model.qwen2_5_vl.arithmetic import ARITHMETIC


def arithmetic_of(model: ModelConfig) -> Arithmetic:
    """The arithmetic of the model's family."""
    return {QWEN2_5_VL.title: ARITHMETIC}[model.family.title]


def towers_of(model: ModelConfig):  # type checkers infer Towers, whose import would load megatron here
    """The ``mm.model.towers.Towers`` of the model's family."""
    from mm.model.qwen2_5_vl.towers import TOWERS

    return {QWEN2_5_VL.title: TOWERS}[model.family.title]
