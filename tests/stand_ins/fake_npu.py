"""A device "npu" on the CPU, for tests: tensors that say ``npu:0``, and collectives over them.

The values live in ordinary CPU tensors behind a wrapper, so every operator computes what the CPU computes.  What is
kept of the device is its plumbing: ``.device`` and ``.type()``, a CPU tensor that meets an NPU tensor is refused, every
read of a value by the host is counted, and HCCL takes NPU tensors alone.  ``start`` changes this process for good, so
tests use it in processes of their own, before ``Device.pick``.

What it cannot show: the operators' own arithmetic and speed, streams, and HCCL's own behaviour.
"""

import functools
import importlib
import sys
import traceback
from collections import Counter, deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NPU = torch.device("privateuseone", 0)
"""The one device of a process: torch's engine for devices in Python has no second."""
FOLDER = Path(__file__).parent
HOST_READS: Counter[str] = Counter()
"""Where the host waited for a value of the device: "file:line code", innermost frame outside of torch first."""
COLLECTIVES: Counter[tuple[str, str]] = Counter()
"""(operator, description of the group) of every collective and message on the device."""

IN_FLIGHT: deque[Any] = deque()

READERS = frozenset({
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero",
    "aten::unique", "aten::_unique2", "aten::unique_consecutive",
    "aten::index_fill", "aten::index_fill_",  # an older CANN without aclnnIndexFill reads every index
})  # fmt: skip
"""Operators that wait for the device: their result, or its shape, is known to the host only after it has run."""
INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
"""They wait where an index is a mask."""
MIXING = frozenset({"aten::_to_copy", "aten::copy_"})
"""Copies between host and device, the only operators that may meet both."""
HCCL_DTYPES = frozenset({
    torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip
"""torch_npu's ProcessGroupHCCL knows no others of what a trainer might send."""


class NpuTensor(Tensor):
    """A tensor that says it lies on an NPU; ``raw`` holds its values."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "NpuTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            layout=raw.layout, device=NPU,
        )  # fmt: skip
        tensor.raw = raw
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: "NpuTensor") -> None:
        torch.Tensor.data.__set__(self, value)  # pyright: ignore[reportAttributeAccessIssue]
        self.raw = value.raw

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __reduce_ex__(self, _: object) -> object:
        raise AssertionError("a tensor on the device is never pickled")


class _FakeNpu(TorchDispatchMode):
    """Sends what names the device, such as a factory, to ``_run`` too."""

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        return _run(func, args, kwargs or {})


def start() -> None:
    """Give this process an NPU: the device, the stand-in torch_npu behind it, and HCCL between processes."""
    sys.path.insert(0, str(FOLDER))
    module = importlib.import_module("torch_npu").npu
    del torch.npu  # the next line registers it again, as part of a device
    _setup_privateuseone_for_python_backend("npu", backend_module=module)
    dist.Backend.register_backend("hccl", _gloo_as_hccl, devices=["npu"])
    torch.Tensor.pin_memory = _pinned
    torch.tensor = functools.wraps(torch.tensor)(functools.partial(_tensor, torch.tensor))
    dist.batch_isend_irecv = functools.partial(_as_one_work, dist.batch_isend_irecv)
    _FakeNpu().__enter__()


def _gloo_as_hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _pinned(tensor: Tensor, *_: object) -> Tensor:
    """There is no pinned memory on a CPU; a tensor that went through here may be copied without waiting."""
    assert not isinstance(tensor, NpuTensor), "only memory of the host is pinned"
    return tensor


def _tensor(factory: Any, data: object, *, device: Any = None, **options: Any) -> Tensor:
    """torch makes a tensor from numbers without asking a mode, so it is made on the host and copied."""
    made = factory(data, **options)
    return made if device is None else made.to(device)


class _OneWork:
    """What torch_npu gives for a whole batch of messages.  On a device waiting holds up the stream, never the host."""

    def __init__(self, received: list[dist.Work], sent: list[dist.Work]) -> None:
        self._received, self._sent = received, sent  # a message must live until it has left

    def wait(self) -> None:
        for work in self._received:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in (*self._received, *self._sent))


def _as_one_work(exchange: Any, operations: list[dist.P2POp]) -> list[Any]:
    works = exchange(operations)
    if not isinstance(operations[0].tensor, NpuTensor):
        return works
    parts: tuple[list, list] = [], []
    for operation, work in zip(operations, works, strict=True):
        parts[operation.op is dist.isend].append(work)
    IN_FLIGHT.append(one := _OneWork(*parts))
    while IN_FLIGHT and IN_FLIGHT[0].is_completed():
        IN_FLIGHT.popleft()
    return [one]


def _raw(value: object) -> object:
    if isinstance(value, NpuTensor):
        return value.raw
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "npu" else value


def _run(func: Any, args: tuple, kwargs: dict) -> Any:
    name = func._schema.name
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    wrappers = {id(tensor.raw): tensor for tensor in tensors if isinstance(tensor, NpuTensor)}
    device = kwargs.get("device")
    is_here = bool(wrappers) if device is None else torch.device(device).type == "npu"
    if name.startswith("c10d::"):
        args = _over_gloo(name, args, tensors)
    elif wrappers and name not in MIXING:
        _refuse_mixing(func, tensors)
    if wrappers:
        _count_reads(name, func, args, kwargs, is_here)
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    result = func(*tree_map(_raw, args), **tree_map(_raw, kwargs))
    if name == "aten::_to_copy" and device is None:
        is_here = isinstance(args[0], NpuTensor)

    def wrapped(value: object) -> object:
        if not isinstance(value, Tensor) or isinstance(value, NpuTensor):
            return value
        return wrappers.get(id(value)) if id(value) in wrappers else NpuTensor(value) if is_here else value

    return tree_map(wrapped, result)


def _refuse_mixing(func: Any, tensors: list[Tensor]) -> None:
    """As a device does: only a number, a CPU tensor without dimensions, may meet its tensors."""
    for tensor in tensors:
        if not isinstance(tensor, NpuTensor) and tensor.dim() > 0:
            raise RuntimeError(
                f"{func}: expected all tensors to be on the same device, but one of shape {tuple(tensor.shape)} is on "
                f"{tensor.device} and others are on npu")


def _over_gloo(name: str, args: tuple, tensors: list[Tensor]) -> tuple:
    """The arguments of a collective, with the group of HCCL exchanged for one that takes the wrapped CPU tensors.

    HCCL takes tensors of the NPU, in its dtypes; gloo takes those of the host.
    """
    boxed: Any = next(value for value in args if str(getattr(value, "_type", str)()).endswith(".ProcessGroup"))
    group = dist.ProcessGroup.unbox(boxed)
    is_hccl = dist.get_backend(group) == "hccl"
    for tensor in tensors:
        if isinstance(tensor, NpuTensor) != is_hccl:
            raise RuntimeError(f"{name}: a tensor on {tensor.device} in a group of {dist.get_backend(group)}")
        if is_hccl and tensor.dtype not in HCCL_DTYPES:
            raise RuntimeError(f"{name}: HCCL has no {tensor.dtype}")
    if not is_hccl:
        return args
    COLLECTIVES[name.removeprefix("c10d::"), group.group_desc] += 1
    backend = group._get_backend(torch.device("npu"))
    twin = dist.ProcessGroup(  # pyright: ignore[reportCallIssue]  (rank and size; torch's types lack it)
        group.rank(), group.size())
    twin._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return tuple(twin.boxed() if value is boxed else value for value in args)


def _count_reads(name: str, func: Any, args: tuple, kwargs: dict, is_here: bool) -> None:
    if name in INDEXING:
        reads = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    elif name == "aten::_to_copy":
        reads = not is_here and kwargs.get("device") is not None
    elif name == "aten::copy_":
        reads = not isinstance(args[0], NpuTensor)
    elif name == "aten::repeat_interleave":
        reads = func._overloadname in ("Tensor", "self_Tensor") and kwargs.get("output_size") is None
    else:
        reads = name in READERS
    if not reads:
        return
    frames = [frame for frame in traceback.extract_stack()[::-1] if frame.filename != __file__]
    if any(str(FOLDER) in frame.filename for frame in frames):
        return  # the stand-in of an operator looks at its arguments; the operator itself does not
    where = next((frame for frame in frames if "/torch/" not in frame.filename), frames[0])
    HOST_READS[f"{name} in {Path(where.filename).name}:{where.lineno} {where.line}"] += 1
