"""The CPU: torch's own operators, run synchronously on the host.  For demos, tests and CI."""

import resource
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mm.device.attention import PLAIN, Segments, by_length, sdpa
from mm.device.kernels import Fuse, Kernels, eager_kernels, plain_accumulate, rms_norm
from mm.device.platform import Platform, SideStream, torch_profiler
from mm.device.shims import COMMON_SHIMS, Shim


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
    """A ``Kernel``: torch's SDPA by length."""
    return by_length(q, k, v, segments, partial(sdpa, causal=causal))


def _kernels(_: Fuse | None) -> Kernels:
    return Kernels(cpu_attention, PLAIN, rms_norm, *eager_kernels(), plain_accumulate)


# Its runtime


class HostRuntime:
    """A ``Runtime``: tensors are already on the host, and work is done when a call returns."""

    def __init__(self, _: int) -> None:
        """The CPU has no index."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def name(self) -> str:
        return "cpu"

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor

    def host_buffer(self, num_bytes: int) -> Tensor | None:
        return None

    def start_copying_back(self, tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        copy = tensor if into is None else into.copy_(tensor)
        return lambda: copy

    def side_stream(self) -> SideStream:
        return SideStream(None)

    def record_event(self) -> float:
        return time.perf_counter()

    def seconds_of(self, events: Sequence[float]) -> list[float]:
        return list(events)

    def seconds_between(self, events: Sequence[float]) -> list[float]:
        return [after - before for before, after in pairwise(events)]

    def synchronize(self) -> None: ...

    def max_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def random_state(self) -> Tensor | None:
        return None

    def set_random_state(self, state: Tensor) -> None:
        raise AssertionError("the CPU's generator is torch's own")


# What megatron needs on a CPU


class _TorchOnCpu(ModuleType):
    """``torch`` as one megatron module sees it on CPU: tensor factories take device="cuda" for the CPU."""

    def __getattr__(self, name: str) -> object:
        found = getattr(torch, name)
        return partial(_on_cpu, found) if name in ("zeros", "ones", "empty", "tensor", "full") else found


def _on_cpu(factory: Callable[..., Tensor], *args: object, device: object = None, **options: object) -> Tensor:
    return factory(*args, device="cpu" if device == "cuda" else device, **options)


class _NoStream:
    """Stands in for a CUDA stream: the CPU runs everything in order."""

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


def _nothing(*_: object, **__: object) -> None:
    """Each name gets its own ``partial``: torch.compile keeps rules by function and refuses one with two names."""


_FACTORIES = "asks for device='cuda' in a tensor factory"
_STREAMS = "megatron orders work on CUDA streams; the CPU has none"

CPU_SHIMS: tuple[Shim, ...] = (
    *COMMON_SHIMS,
    Shim("torch.cuda:current_device", lambda: torch.device("cpu"), "megatron makes buffers and weights on it"),
    Shim("torch.cuda:set_device", partial(_nothing), _STREAMS),
    Shim("torch.cuda:synchronize", partial(_nothing), _STREAMS),
    Shim("torch.cuda:empty_cache", partial(_nothing), "the CPU allocator has no cache to empty"),
    Shim("torch.cuda:current_stream", _NoStream, _STREAMS),
    Shim("torch.cuda:default_stream", _NoStream, _STREAMS),
    Shim("torch.cuda:Stream", _NoStream, _STREAMS),
    Shim("torch.cuda:stream", lambda _: nullcontext(), _STREAMS),
    Shim("torch:Tensor.cuda", lambda tensor, *_, **__: tensor, "tensors are already where they belong"),
    Shim("torch:Tensor.type", _type_as_on_cuda, "the optimizers accept torch.cuda.* type names only"),
    Shim("megatron.core.distributed.param_and_grad_buffer:torch", _TorchOnCpu("torch"), _FACTORIES),
    Shim("megatron.core.optimizer.optimizer:torch", _TorchOnCpu("torch"), _FACTORIES),
    Shim("megatron.core.optimizer.grad_scaler:torch", _TorchOnCpu("torch"), _FACTORIES),
)
"""What megatron-core needs to run on a CPU, in the order in which it is applied."""


# The platform


CPU = Platform(
    name="cpu",
    backend="gloo",
    fault=lambda: None,
    versions=dict,
    version_findings=lambda _: iter(()),
    device_files="",
    num_devices=lambda: None,
    known_devices=(),
    prepare=lambda _: None,
    shims=CPU_SHIMS,
    deterministic_variables={},
    switches=dict,
    compiles_kernels=False,
    kernels=_kernels,
    sdpa_kv_heads=lambda _, __, num_kv_heads: num_kv_heads,
    adam_obeys_scale=True,
    runtime=HostRuntime,
    profiler=torch_profiler,
    starts_messages_ahead=True,  # gloo waits on the host
    max_message_ctas=None,
)
