"""A Megatron-style 3D-parallel trainer for Qwen2.5-VL on Ascend NPU, CUDA and CPU."""
