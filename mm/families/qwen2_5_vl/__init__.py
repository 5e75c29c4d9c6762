"""The names and constants of Qwen2.5-VL; what it computes is in ``mm.model.qwen2_5_vl``."""
