"""The arithmetic of Qwen2.5-VL, for data and reports."""

from mm.model.arithmetic import Arithmetic
from mm.model.qwen2_5_vl.flops import blocks, image_flops
from mm.model.qwen2_5_vl.positions import mrope_positions

ARITHMETIC = Arithmetic(mrope_positions, blocks, image_flops)
