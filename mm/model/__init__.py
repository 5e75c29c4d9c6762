"""Qwen2.5-VL, one pipeline stage at a time."""
