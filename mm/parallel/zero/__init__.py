"""Gradients and weights of which each data-parallel rank keeps a shard (ZeRO)."""
