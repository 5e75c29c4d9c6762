"""Qwen2.5-VL: its names and constants.  What it computes is in ``mm.model.qwen2_5_vl``."""
