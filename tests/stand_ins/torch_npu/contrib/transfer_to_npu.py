"""Stand-in for the module whose import makes CUDA-shaped code run on an NPU.

Like the real one it works at import, on torch alone: what ``torch.npu`` has takes the place of its namesake in
``torch.cuda``, the backend "nccl" becomes "hccl", and ``torch.jit.script`` does nothing.  Code that was imported
before it and holds the old functions is not reached; ``LOADED_BEFORE`` tells a test what that was.
"""

import functools
import sys

import torch
import torch.distributed

import torch_npu

# The real package does this when torch_npu is imported.  It cannot be undone, and test processes import that.
torch.utils.rename_privateuse1_backend("npu")

LOADED_BEFORE = frozenset(name.partition(".")[0] for name in sys.modules)
_init_process_group = torch.distributed.init_process_group


@functools.wraps(_init_process_group)
def _init_on_hccl(backend=None, *args, **kwargs):
    return _init_process_group("hccl" if backend == "nccl" else backend, *args, **kwargs)


for _name, _function in vars(torch_npu.npu).items():
    if callable(_function) and hasattr(torch.cuda, _name):
        setattr(torch.cuda, _name, _function)
torch.distributed.init_process_group = _init_on_hccl
torch.jit.script = lambda obj, *args, **kwargs: obj
