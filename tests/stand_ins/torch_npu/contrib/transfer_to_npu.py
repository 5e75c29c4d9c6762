"""Stand-in for the module whose import makes CUDA-shaped code run on an NPU.

Like the real one it works at import, on torch alone: what ``torch.npu`` has takes the place of its namesake in
``torch.cuda``, functions that take a device read "cuda" and plain numbers as the NPU, ``Tensor.cuda`` is
``Tensor.npu``, the backend "nccl" becomes "hccl", and ``torch.jit.script`` does nothing.  ``Tensor.type`` stays as it
is.  Code that was imported before it and holds the old functions is not reached; ``LOADED_BEFORE`` tells a test what
that was.
"""

import functools
import sys

import torch
import torch.distributed

import torch_npu

# The real package does these two when torch_npu is imported.  They cannot be undone, and test processes import that.
torch.utils.rename_privateuse1_backend("npu")
if not hasattr(torch.Tensor, "npu"):
    torch.utils.generate_methods_for_privateuse1_backend()

LOADED_BEFORE = frozenset(name.partition(".")[0] for name in sys.modules)

# What torch_npu 2.13's torch_fn_white_list, torch_tensor_fn_white_list and torch_module_fn_white_list name, of torch's
# functions that are in use today.
FACTORIES = (
    "logspace", "randint", "hann_window", "rand", "full_like", "ones_like", "rand_like", "randperm", "arange",
    "frombuffer", "normal", "empty_strided", "empty_like", "scalar_tensor", "tril_indices", "bartlett_window",
    "ones", "sparse_coo_tensor", "randn", "kaiser_window", "tensor", "triu_indices", "as_tensor", "zeros",
    "randint_like", "full", "eye", "empty", "blackman_window", "zeros_like", "range", "randn_like", "linspace",
    "hamming_window", "load", "set_default_device", "get_device_module",
)  # fmt: skip
TENSOR_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "to")
MODULE_METHODS = ("to", "to_empty")
DEVICE_KEYWORDS = ("device", "device_type", "map_location", "device_id")
_init_process_group = torch.distributed.init_process_group


def _on_npu(device):
    if isinstance(device, str):
        return device.replace("cuda", "npu")
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("npu", device.index)
    return device


def _with_npu(function):
    takes_numbers = function.__name__ in MODULE_METHODS

    @functools.wraps(function)
    def call(*args, **kwargs):
        args = [f"npu:{arg}" if takes_numbers and type(arg) is int else _on_npu(arg) for arg in args]
        for name in DEVICE_KEYWORDS:
            given = kwargs.get(name)
            if given is not None:
                kwargs[name] = f"npu:{given}" if type(given) is int else _on_npu(given)
        return function(*args, **kwargs)

    return call


def _wrap(owner, names):
    for name in names:
        setattr(owner, name, _with_npu(getattr(owner, name)))


@functools.wraps(_init_process_group)
def _init_on_hccl(backend=None, *args, **kwargs):
    return _init_process_group("hccl" if backend == "nccl" else backend, *args, **kwargs)


for _name, _function in vars(torch_npu.npu).items():
    if callable(_function) and hasattr(torch.cuda, _name):
        setattr(torch.cuda, _name, _function)
_wrap(torch, FACTORIES)
_wrap(torch.Tensor, TENSOR_METHODS)
_wrap(torch.nn.Module, MODULE_METHODS)
torch.Tensor.cuda = torch.Tensor.npu
torch.nn.Module.cuda = torch.nn.Module.npu
torch.distributed.init_process_group = _init_on_hccl
torch.jit.script = lambda obj, *args, **kwargs: obj
