"""The only file that knows cuda, npu and cpu: backend, kernels, memory, and the shims megatron-core needs.

megatron-core is written for CUDA.  On NPU ``torch_npu``'s own ``transfer_to_npu`` redirects it; on CPU the declared
table ``CPU_SHIMS`` does.  Nothing else in the project patches anything.  ``Device.pick`` must run before megatron is
imported, because some of its modules look at the device while they are imported.
"""

import importlib
import importlib.util
import os
import resource
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from mm.device.attention import Kernel, cpu_attention, cuda_attention, npu_attention
from mm.errors import UserError


@dataclass(frozen=True)
class Kernels:
    """The operators that differ between devices, as plain functions."""

    attention: Kernel
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [..., n], weight [n], epsilon): statistics in fp32."""
    swiglu: Callable[[Tensor], Tensor]
    """x [..., 2n] = [gate; up] -> silu(gate) * up [..., n]."""


@dataclass(frozen=True)
class Device:
    """One kind of accelerator (or the CPU), and this process's place on it."""

    kind: str
    """"cuda", "npu" or "cpu"."""
    index: int
    backend: str
    """torch.distributed backend for tensors on this device."""
    kernels: Kernels

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def name(self) -> str:
        """The device's own name, as its driver says it."""
        return "cpu" if self.kind == "cpu" else getattr(torch, self.kind).get_device_name(self.index)

    @classmethod
    def pick(cls, wanted: str = "auto") -> "Device":
        """Choose npu, cuda or cpu (in this order when ``wanted`` is "auto") and prepare megatron for it.

        Raises ``UserError`` when the wanted device is not usable here.
        """
        kind = _usable_kind(wanted)
        index = int(os.environ.get("LOCAL_RANK", "0"))
        if kind == "npu":
            importlib.import_module("torch_npu.contrib.transfer_to_npu")
            torch.npu.set_device(index)
            _apply(_common_shims())
            return cls("npu", index, "hccl", Kernels(npu_attention, _npu_rms_norm, _npu_swiglu))
        if kind == "cuda":
            torch.cuda.set_device(index)
            _apply(_common_shims())
            return cls("cuda", index, "nccl", Kernels(cuda_attention, _rms_norm, _swiglu))
        _apply(CPU_SHIMS + _common_shims())
        return cls("cpu", 0, "gloo", Kernels(cpu_attention, _rms_norm, _swiglu))

    def max_memory_bytes(self) -> int:
        """Peak memory of this process: allocated on the device, or resident on the CPU."""
        if self.kind == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return getattr(torch, self.kind).max_memory_allocated()

    def synchronize(self) -> None:
        """Wait for the device; used around timings only, never in the pipeline loop."""
        if self.kind != "cpu":
            getattr(torch, self.kind).synchronize()


def _usable_kind(wanted: str) -> str:
    if wanted not in ("auto", "npu", "cuda", "cpu"):
        raise UserError(f"--device is {wanted!r}; expected auto, npu, cuda or cpu")
    has_npu = importlib.util.find_spec("torch_npu") is not None
    if wanted == "npu" and not has_npu:
        raise UserError("--device npu: torch_npu is not installed; install the torch_npu of your torch version")
    if wanted == "npu" or (wanted == "auto" and has_npu):
        importlib.import_module("torch_npu")
        if torch.npu.is_available():
            return "npu"
        if wanted == "npu":
            raise UserError("--device npu: torch_npu sees no NPU; source Ascend's set_env.sh and check npu-smi info")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device; check nvidia-smi and that torch is a CUDA build")
    return "cuda" if wanted in ("auto", "cuda") and torch.cuda.is_available() else "cpu"


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up of x = [gate; up], keeping x alone and writing both gradients into one buffer.

    Autograd's own form keeps silu(gate) too and joins the two gradients by a copy.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        x_gradient = torch.empty_like(x)
        gate_gradient, up_gradient = x_gradient.chunk(2, dim=-1)
        torch.mul(F.silu(gate), gradient, out=up_gradient)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=gate_gradient)
        return x_gradient


def _swiglu(x: Tensor) -> Tensor:
    return _SwiGLU.apply(x)


def _npu_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    torch_npu = importlib.import_module("torch_npu")
    return torch_npu.npu_rms_norm(x, weight, epsilon=epsilon)[0]


def _npu_swiglu(x: Tensor) -> Tensor:
    torch_npu = importlib.import_module("torch_npu")
    return torch_npu.npu_swiglu(x, dim=-1)


# --- Shims: what makes CUDA-shaped code run elsewhere -------------------------------------------------------------


@dataclass(frozen=True)
class Shim:
    """One replaced name.  ``target`` is "module:attribute"; a test checks that every target exists."""

    target: str
    replacement: object
    reason: str


class _TorchOnCpu(ModuleType):
    """``torch`` as one megatron module sees it on CPU: tensor factories take device="cuda" for the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in ("zeros", "ones", "empty", "tensor", "full"):
            setattr(self, name, self._on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    @staticmethod
    def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def create(*args: object, device: object = None, **options: object) -> Tensor:
            return factory(*args, device="cpu" if device == "cuda" else device, **options)

        return create


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


def _type_as_on_cuda(tensor: Tensor, *args: object, **options: object) -> object:
    if args or options:
        return _tensor_type(tensor, *args, **options)
    return _CUDA_NAMES.get(tensor.dtype) or _tensor_type(tensor)


def _foreach_l2_norm(_chunk: int, _noop: Tensor, tensor_lists: list[list[Tensor]], *_: object) -> tuple[Tensor, None]:
    norms = torch._foreach_norm([tensor.float() for tensor in tensor_lists[0]])
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def _nothing(*_: object, **__: object) -> None: ...


_FACTORIES = "asks for device='cuda' in a tensor factory"
_STREAMS = "megatron orders work on CUDA streams; the CPU has none"

CPU_SHIMS: tuple[Shim, ...] = (
    Shim("torch.cuda:current_device", lambda: torch.device("cpu"), "used as the device of buffers and weights"),
    Shim("torch.cuda:set_device", _nothing, _STREAMS),
    Shim("torch.cuda:synchronize", _nothing, _STREAMS),
    Shim("torch.cuda:empty_cache", _nothing, "the CPU allocator has no cache to empty"),
    Shim("torch.cuda:current_stream", _NoStream, _STREAMS),
    Shim("torch.cuda:default_stream", _NoStream, _STREAMS),
    Shim("torch.cuda:Stream", _NoStream, _STREAMS),
    Shim("torch.cuda:stream", lambda _: nullcontext(), _STREAMS),
    Shim("torch:Tensor.cuda", lambda tensor, *_, **__: tensor, "tensors are already where they belong"),
    Shim("torch:Tensor.type", _type_as_on_cuda, "the optimizers accept torch.cuda.* type names only"),
    Shim("megatron.core.pipeline_parallel.schedules:torch", _TorchOnCpu(), _FACTORIES),
    Shim("megatron.core.distributed.param_and_grad_buffer:torch", _TorchOnCpu(), _FACTORIES),
    Shim("megatron.core.optimizer.clip_grads:torch", _TorchOnCpu(), _FACTORIES),
    Shim("megatron.core.optimizer.optimizer:torch", _TorchOnCpu(), _FACTORIES),
    Shim("megatron.core.optimizer.grad_scaler:torch", _TorchOnCpu(), _FACTORIES),
)
"""What megatron-core 0.16 needs to run on a CPU, in the order in which it is applied."""

COMMON_SHIMS: tuple[Shim, ...] = (
    Shim(
        "megatron.core.optimizer.clip_grads:l2_norm_impl",
        _foreach_l2_norm,
        "megatron's fallback without apex takes one norm, and one host-device sync, per tensor",
    ),
)
"""Replacements of slow fallbacks, on every device, where the packages with the fast forms are absent."""


def _common_shims() -> tuple[Shim, ...]:
    has_fast_forms = any(importlib.util.find_spec(name) is not None for name in ("transformer_engine", "amp_C"))
    return () if has_fast_forms else COMMON_SHIMS


def _apply(shims: tuple[Shim, ...]) -> None:
    if any(shim.target.startswith("megatron.") for shim in shims):
        # torch.compile builds C++ for every new shape; our kernels replace the functions megatron decorates with it.
        importlib.import_module("megatron.core.jit").disable_jit_fuser()
    for shim in shims:
        module_name, attribute = shim.target.split(":")
        owner: object = importlib.import_module(module_name)
        *parents, name = attribute.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        assert hasattr(owner, name), f"shim target {shim.target} does not exist"
        setattr(owner, name, shim.replacement)
