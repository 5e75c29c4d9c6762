"""The computation of Qwen2.5-VL: its layers, its two towers, and the positions of its tokens and patches."""
