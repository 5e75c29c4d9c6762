"""Qwen2.5-VL as it is computed: its layers, its two towers, and where its tokens and patches lie."""
