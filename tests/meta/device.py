"""The meta device as an accelerator: tensors have shapes and no values, so a step of any size runs in seconds.

``Recorder`` counts what such a step would do on a CUDA device: kernels, bytes, FLOPs, memory and host reads.
``prepare`` makes megatron run there.  It patches the process, so use a separate one, and call it before importing
megatron.
"""

import importlib
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mm.device.cpu import CPU, CPU_SHIMS, HostRuntime
from mm.device.cuda import CUDA
from mm.device.device import Device
from mm.device.kernels import Kernels
from mm.device.pointwise import SUMMED_ROWS
from mm.device.shims import Shim, apply_shims
from tests.meta.kernels import fused_rms_norm, sdpa, varlen_attn

META = torch.device("meta")
PHASES = ("zero", "prepare", "forward", "backward", "update")
"""In order: zeroing the gradients, copies of a microbatch to the device, the two passes, and everything after them.
Recomputation counts as backward."""


# What megatron and torch need


class _TorchOnMeta(types.ModuleType):
    """``torch`` as one megatron module sees it: tensor factories take device="cuda" for the meta device."""

    def __getattr__(self, name: str) -> object:
        found = getattr(torch, name)
        return partial(_on_meta, found) if name in ("zeros", "ones", "empty", "tensor", "full") else found


def _on_meta(factory: Callable[..., Tensor], *args: object, device: object = None, **options: object) -> Tensor:
    return factory(*args, device=META if device == "cuda" else device, **options)


class _Done:
    """A collective or message that has already ended."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


def _own_object(objects: list, own: object, **_: object) -> None:
    objects[:] = [own] * len(objects)


_new_subgroups = dist.new_subgroups_by_enumeration


def fake_subgroups(
    ranks: list[list[int]], timeout: object, _: object, pg_options: object = None, group_desc: str | None = None
) -> tuple:
    """Replaces torch's ``new_subgroups_by_enumeration``, and ignores the requested backend."""
    return _new_subgroups(ranks, timeout, group_desc=group_desc)


META_SHIMS: tuple[Shim, ...] = (
    Shim("torch.cuda:current_device", lambda: META, "used as the device of buffers and weights"),
    *(
        Shim(shim.target, _TorchOnMeta("torch"), "asks for device='cuda' in a tensor factory")
        for shim in CPU_SHIMS
        if shim.target.startswith("megatron.") and shim.target.endswith(":torch")
    ),
    Shim("torch.distributed:new_subgroups_by_enumeration", fake_subgroups,
         "a world of several ranks that is one process has nobody to speak gloo to"),
    Shim("torch.distributed:batch_isend_irecv", lambda operations: [_Done() for _ in operations],
         "torch's fake processes exchange no messages between meta tensors"),
    Shim("megatron.core.distributed.param_and_grad_buffer:_coalescing_manager", lambda *_, **__: nullcontext(_Done()),
         "torch has coalesced collectives for real tensors only; here they run one by one"),
    Shim("torch.distributed:all_gather_object", _own_object,
         "torch's fake processes answer nothing; the optimizer asks whether all ranks have the same groups"),
    Shim("torch.optim.adam:_device_dtype_check_for_fused", lambda *_, **__: None,
         "the fused optimizer knows the devices that have a kernel for it"),
    Shim("torch.nn.functional:scaled_dot_product_attention", sdpa, "one flash kernel on CUDA, several on meta"),
    Shim("torch.nn.attention.varlen:varlen_attn", varlen_attn, "it exists on CUDA only"),
)  # fmt: skip
"""Applied after ``CPU_SHIMS``."""


def prepare() -> None:
    """Patch this process.  Call it once, before megatron is imported."""
    apply_shims(CPU_SHIMS)
    for shim in META_SHIMS:
        module_name, attribute = shim.target.split(":")
        owner: object = importlib.import_module(module_name)
        assert hasattr(owner, attribute), f"shim target {shim.target} does not exist"
        setattr(owner, attribute, shim.replacement)


# The device and its recorder


@dataclass
class Tally:
    """What one operator did in one phase."""

    kernels: int = 0
    num_bytes: float = 0.0
    """Read and written; a tensor that is read twice by one kernel counts once."""
    flops: float = 0.0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.kernels + other.kernels, self.num_bytes + other.num_bytes, self.flops + other.flops)


_NO_KERNEL = frozenset({
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "_unsafe_view",
    "_reshape_alias", "detach", "alias", "lift_fresh", "set_", "resize_",
})  # fmt: skip
_WRITE_ONLY = frozenset({"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"})
"""In-place operators that do not read what they overwrite."""
_UNSCALED = "grads"
"""The gradients of a fused optimizer, which it writes only when it also takes a loss scale."""
_READ_ROWS = frozenset({"index", "index_select", "embedding", "gather"})
"""These read only as much of their first argument as they write."""


class Recorder(TorchDispatchMode):
    """Counts the operators on the meta device while it is active, by phase and name, and follows live memory.

    A ``_foreach`` or fused optimizer operator counts as one kernel; CUDA launches one for some dozens of tensors.
    Collectives are counted apart: with one rank they do nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tallies: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)
        self.host_reads: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.collective_bytes: Counter[str] = Counter()
        """Bytes of the largest tensor of each collective: all rows of a gather or a reduce-scatter."""
        self.num_copies = 0
        """Tensors copied from the host."""
        self.live_bytes = self.peak_bytes = 0
        self.in_flight_bytes: int | None = None
        """Kept for backward passes when the first of them begins."""
        self._bytes_before = 0
        self._storages: dict[int, int] = {}
        self._held: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._stage_phase, self._counts = "zero", True

    @property
    def phase(self) -> str:
        in_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
        return "backward" if in_backward else self._stage_phase

    def start(self) -> None:
        """Count from here on.  Earlier tensors count as live memory, but not as kept for the backward pass."""
        self.tallies.clear()
        self.host_reads.clear()
        self.collectives.clear()
        self.collective_bytes.clear()
        self.num_copies, self.in_flight_bytes = 0, None
        for key, storage in self._held.items():  # Adam may have taken the memory of fp32 copies away
            self.live_bytes += storage.nbytes() - self._storages[key]
            self._storages[key] = storage.nbytes()
        self.peak_bytes = self._bytes_before = self.live_bytes

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Count operators outside backward passes as ``phase``, and later ones as "update"."""
        self._stage_phase = phase
        yield
        self._stage_phase = "update"

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` from tensors to tensors that CUDA compiles into one kernel, counted as one kernel.

        A result without rows is a sum over rows: the kernel writes partial sums in fp32, and a second kernel adds them.
        """

        @wraps(function)
        def one_kernel(*args: Any, **kwargs: Any) -> Any:
            self._counts = False
            try:
                out = function(*args, **kwargs)
            finally:
                self._counts = True
            self._watch(_tensors(out))
            inputs, outputs = _tensors((args, kwargs)), _tensors(out)
            sums = [tensor for tensor in outputs if tensor.ndim < 2 <= inputs[0].ndim]
            partial_sums = sum(4 * tensor.numel() for tensor in sums) * -(-len(inputs[0]) // SUMMED_ROWS)
            written = sum(_size(tensor) for tensor in outputs) - sum(map(_size, sums)) + partial_sums
            self._count(function.__name__, sum(map(_size, inputs)) + written, 0.0)
            for one in sums:
                self._count("sum", partial_sums / len(sums) + _size(one), 0.0)
            return out

        return one_kernel

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a host tensor on the device; its ``on_host`` is the original, from which lengths can be read."""
        self.num_copies += 1
        copied: Any = torch.empty_like(tensor, device=META)
        copied.on_host = tensor
        return copied

    def read(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of a device tensor on the host, filled with ones; counts a wait of the host."""
        self.host_reads[self.phase] += 1
        return torch.ones(tensor.shape, dtype=dtype or tensor.dtype)

    def __torch_dispatch__(self, func: Any, _: Any, args: Sequence = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        inputs = _tensors((args, kwargs))
        if self.in_flight_bytes is None and self.phase == "backward":
            self.in_flight_bytes = self.live_bytes - self._bytes_before
        if name == "_local_scalar_dense" and inputs[0].is_meta:
            return self.read(inputs[0]).item()
        if name == "_to_copy" and inputs[0].is_meta and kwargs.get("device", META).type == "cpu":
            return self.read(inputs[0], kwargs.get("dtype"))
        # torch 2.11 cannot run this operator on meta tensors; with `out` given there is nothing to make
        out = kwargs["out"] if func is torch.ops.aten.addmm.dtype_out else func(*args, **kwargs)
        outputs = _tensors(out)
        if func.namespace == "c10d":
            self.collectives[name] += 1
            self.collective_bytes[name] += max((one.nbytes for one in (*inputs, *outputs)), default=0)
        elif self._counts and any(tensor.is_meta for tensor in (*inputs, *outputs)):
            self._watch(outputs)
            if not (func.is_view or name in _NO_KERNEL or _does_nothing(name, args, outputs)):
                self._count(name, _traffic(func, args, kwargs, outputs), _flops(func, args))
        return out

    def _count(self, name: str, num_bytes: float, flops: float) -> None:
        key = (self.phase, name)
        self.tallies[key] += Tally(1, num_bytes, flops)

    def _watch(self, tensors: list[Tensor]) -> None:
        """Track the memory of new tensors until it is freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if tensor.is_meta and key not in self._storages:
                self._storages[key], self._held[key] = storage.nbytes(), storage
                self.live_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live_bytes -= self._storages.pop(key)


class MetaRuntime(HostRuntime):
    """Behaves like a CUDA device, but its tensors have no values."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    @property
    def torch_device(self) -> torch.device:
        return META

    def copy(self, tensor: Tensor) -> Tensor:
        return self.recorder.copy(tensor)

    def start_copying_back(self, tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """A copy for which nothing waits here, if there is memory for it, else one that is read: one wait."""
        copy = self.recorder.read(tensor) if into is None else into
        return lambda: copy


def meta_device(recorder: Recorder) -> Device:
    """A CUDA device without values."""
    platform = replace(CPU, name="meta", backend="fake", runtime=lambda _: MetaRuntime(recorder))
    return Device(platform, 0, kernels(recorder))


def kernels(recorder: Recorder) -> Kernels:
    """CUDA's operators, built in this place only; compiled kernel functions go through ``Recorder.fuse``."""
    return replace(CUDA.kernels(recorder.fuse), rms_norm=lambda x, weight, _: fused_rms_norm(x, weight)[0])


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors in an operator's arguments or results.  torch's own function for any tree took 11% of a trace."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [tensor for one in tree for tensor in _tensors(one)]


def _size(tensor: Tensor) -> int:
    """Bytes that a kernel touches; a broadcast tensor is as large as its memory."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _flops(func: Any, args: Sequence) -> float:
    """FLOPs of a matrix product, whose factors are the last two tensors, or of our own operators, which have them as an
    argument; 0 for all others.

    torch's table of formulas fails for a product with ``out_dtype``.
    """
    if func._schema.name.partition("::")[2].rstrip("_") in ("mm", "addmm", "bmm", "baddbmm"):
        *_, left, right = _tensors(args)
        return 2.0 * left.numel() * right.shape[-1]
    names = [argument.name for argument in func._schema.arguments]
    return args[names.index("flops")] if "flops" in names else 0.0


def _does_nothing(name: str, args: Sequence, outputs: list[Tensor]) -> bool:
    """Nothing to write, or a tensor copied onto itself, which ``x[:n] -= y`` ends with and torch leaves out."""
    if name == "copy_":
        to, source = args[:2]
        where = [(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()) for t in (to, source)]
        return where[0] == where[1]
    return bool(outputs) and all(tensor.numel() == 0 for tensor in outputs)


def _traffic(func: Any, args: Sequence, kwargs: dict, outputs: list[Tensor]) -> float:
    """Bytes read and written, according to the arguments in the operator's schema."""
    name, changed, total = func._schema.name.partition("::")[2], set(), 0.0
    for index, argument in enumerate(func._schema.arguments):
        tensors = _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
        size = sum(map(_size, tensors))
        if name == "index_put_" and index == 0:  # it touches the rows that it adds to, no others
            changed |= {tensor.untyped_storage()._cdata for tensor in tensors}
            total += 2 * _size(args[2])
            continue
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed |= {tensor.untyped_storage()._cdata for tensor in tensors}
            is_read_or_written_only = argument.is_out or name in _WRITE_ONLY or argument.name == _UNSCALED
            total += size if is_read_or_written_only else 2 * size
        elif index == 0 and name in _READ_ROWS:
            total += sum(map(_size, outputs))
        else:
            total += size
    return total + sum(_size(t) for t in outputs if t.untyped_storage()._cdata not in changed)

