"""Devices: the only folder that names cuda, npu and torch_npu."""
