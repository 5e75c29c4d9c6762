"""What makes CUDA-shaped code run elsewhere: the declared tables of replaced names.  The only file that patches.

megatron-core is written for CUDA.  On NPU ``torch_npu``'s own ``transfer_to_npu`` redirects it and ``NPU_SHIMS`` adds
what that leaves out; on CPU the table ``CPU_SHIMS`` does all.  ``ADAM_SHIMS`` are for every device.
"""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shim:
    """One replaced name.  ``target`` is "module:attribute"; a test checks that every target exists."""

    target: str
    replacement: object
    reason: str


class _TorchOnCpu(ModuleType):
    """``torch`` as one megatron module sees it on CPU: tensor factories take device="cuda" for the CPU."""

    def __getattr__(self, name: str) -> object:
        found = getattr(torch, name)
        return partial(_on_cpu, found) if name in ("zeros", "ones", "empty", "tensor", "full") else found


def _on_cpu(factory: Callable[..., Tensor], *args: object, device: object = None, **options: object) -> Tensor:
    return factory(*args, device="cpu" if device == "cuda" else device, **options)


class _NoStream:
    """A CUDA stream that is not there: the CPU runs everything in order."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def synchronize(self) -> None: ...


_tensor_type = torch.Tensor.type
_CUDA_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


def _type_as_on_cuda(tensor: Tensor, *args: Any, **options: Any) -> object:
    if args or options:
        return _tensor_type(tensor, *args, **options)
    return _CUDA_NAMES.get(tensor.dtype) or _tensor_type(tensor)


def _npu_type_as_on_cuda(tensor: Tensor, *args: Any, **options: Any) -> object:
    found = _tensor_type(tensor, *args, **options)
    return found.replace("torch.npu.", "torch.cuda.", 1) if isinstance(found, str) else found


def _nothing(*_: object, **__: object) -> None:
    """Each name gets a ``partial`` of its own: torch.compile keeps rules by function and refuses one with two names."""


_FACTORIES = "asks for device='cuda' in a tensor factory"
_STREAMS = "megatron orders work on CUDA streams; the CPU has none"

ADAM_SHIMS: tuple[Shim, ...] = (
    Shim("megatron.core.optimizer:Adam", torch.optim.AdamW,
         "megatron takes TransformerEngine's or apex's Adam where it can be imported; neither clips and guards in its "
         "kernel, and Ascend's apex has no kernel behind it and raises"),
    Shim("megatron.core.optimizer:USING_PYTORCH_OPTIMIZER", True, "goes with the line above"),
    Shim("megatron.core.optimizer.distrib_optimizer:HAVE_APEX_OR_TE", False, "goes with the lines above"),
)
"""Torch's fused AdamW on every machine, whatever is installed beside it: the same arithmetic and the same states."""

CPU_SHIMS: tuple[Shim, ...] = (
    *ADAM_SHIMS,
    Shim("torch.cuda:current_device", lambda: torch.device("cpu"), "used as the device of buffers and weights"),
    Shim("torch.cuda:set_device", partial(_nothing), _STREAMS),
    Shim("torch.cuda:synchronize", partial(_nothing), _STREAMS),
    Shim("torch.cuda:empty_cache", partial(_nothing), "the CPU allocator has no cache to empty"),
    Shim("torch.cuda:current_stream", _NoStream, _STREAMS),
    Shim("torch.cuda:default_stream", _NoStream, _STREAMS),
    Shim("torch.cuda:Stream", _NoStream, _STREAMS),
    Shim("torch.cuda:stream", lambda _: nullcontext(), _STREAMS),
    Shim("torch:Tensor.cuda", lambda tensor, *_, **__: tensor, "tensors are already where they belong"),
    Shim("torch:Tensor.type", _type_as_on_cuda, "the optimizers accept torch.cuda.* type names only"),
    Shim("megatron.core.pipeline_parallel.schedules:torch", _TorchOnCpu("torch"), _FACTORIES),
    Shim("megatron.core.distributed.param_and_grad_buffer:torch", _TorchOnCpu("torch"), _FACTORIES),
    Shim("megatron.core.optimizer.optimizer:torch", _TorchOnCpu("torch"), _FACTORIES),
    Shim("megatron.core.optimizer.grad_scaler:torch", _TorchOnCpu("torch"), _FACTORIES),
)
"""What megatron-core 0.16 needs to run on a CPU, in the order in which it is applied."""

NPU_SHIMS: tuple[Shim, ...] = (
    *ADAM_SHIMS,
    Shim("torch:Tensor.type", _npu_type_as_on_cuda, "the optimizers accept torch.cuda.* type names only"),
)
"""What megatron-core 0.16 needs on an NPU beside ``transfer_to_npu``, which leaves ``Tensor.type`` alone."""

SHIMS = {"cpu": CPU_SHIMS, "npu": NPU_SHIMS, "cuda": ADAM_SHIMS}
"""By kind of device."""


def apply_shims(kind: str) -> None:
    """Patch what megatron needs on a device of ``kind``; before megatron is imported."""
    _import_megatron()
    for shim in SHIMS[kind]:
        module_name, attribute = shim.target.split(":")
        owner: object = importlib.import_module(module_name)
        *parents, name = attribute.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        assert hasattr(owner, name), f"shim target {shim.target} does not exist"
        setattr(owner, name, shim.replacement)


def _import_megatron() -> None:
    """Without torch.compile, with which megatron decorates functions that our kernels replace.

    It would build code for every new shape.  megatron's own switch is too late for what the import of the package
    decorates, and torch.compile alone loads 2.4 s of compiler.
    """
    torch_compile = torch.compile
    torch.compile = lambda function: function
    try:
        importlib.import_module("megatron.core.jit").disable_jit_fuser()
    finally:
        torch.compile = torch_compile
