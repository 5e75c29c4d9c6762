"""What computes a model: the functions and modules of its family.

There is one family so far.  Another one is told apart here by ``model.family``.
"""

from typing import Any

from mm.config.model import ModelConfig
from mm.model.arithmetic import Arithmetic
from mm.model.qwen2_5_vl.arithmetic import ARITHMETIC


def arithmetic_of(_: ModelConfig) -> Arithmetic:
    """What the family of a model says of its batches."""
    return ARITHMETIC


def towers_of(_: ModelConfig) -> Any:
    """What a stage of a model is made of: ``mm.model.towers.Towers``."""
    from mm.model.qwen2_5_vl.towers import TOWERS  # imports megatron, which data workers do without

    return TOWERS
