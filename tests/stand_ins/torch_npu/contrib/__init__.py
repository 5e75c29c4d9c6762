"""Extras of torch_npu that are imported by name only."""
