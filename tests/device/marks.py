"""The mark of tests that need CUDA."""

import pytest
import torch

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here, and its kernels need one")
