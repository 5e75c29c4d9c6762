"""Activations that are not kept on the device until the backward pass: computed again, or kept in host memory.

The activations of a layer leave while the next layer runs, and come back during the next layer's backward pass::

    forward        layer 1 | layer 2 | layer 3 |         backward        layer 3 | layer 2 | layer 1
    to the host            | of 1    | of 2    | of 3    to the device   of 2    | of 1    |

So the activations of at most two layers are on the device.  Their values do not change.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mm.checkpoint.pipelined_write import host_segment
from mm.device.device import Device
from mm.model.parallel.sharded_rows import ShardedRows

PAGE_BYTES = 16 << 20
"""Memory is copied in pages: large enough for the speed of the link, and small enough that the last page of a layer
wastes little."""
_ALIGN_BYTES = 512
SEGMENT_BYTES = 16 * PAGE_BYTES
"""Pages are allocated from the host in segments.  A power of two, because torch rounds pinned memory up to one."""

Keep = Callable[[Tensor], Callable[[], Tensor]]
"""Keeps a tensor for the backward pass; the result gives it back."""


def keep_here(tensor: Tensor) -> Callable[[], Tensor]:
    """A ``Keep`` on the device, without the graph: an operation that keeps its output would form a cycle."""
    kept = tensor if tensor.is_leaf else tensor.detach()
    return lambda: kept


def on_pages(start: int, num_bytes: int, page_bytes: int) -> Iterator[tuple[int, slice, slice]]:
    """Divide ``num_bytes`` that begin at byte ``start`` of consecutive pages: for each page its number, the bytes on
    that page, and which of the ``num_bytes`` they are."""
    done = 0
    while done < num_bytes:
        page, at = divmod(start + done, page_bytes)
        count = min(page_bytes - at, num_bytes - done)
        yield page, slice(at, at + count), slice(done, done + count)
        done += count


class HostPages:
    """Pages of host memory, pinned on an accelerator.  A page that is given back is used again."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[Tensor] = []
        self.num_bytes = 0

    def take(self, num_bytes: int) -> list[Tensor]:
        """Enough pages for ``num_bytes``.  Raises UserError if this node has too little memory."""
        count = -(-num_bytes // PAGE_BYTES)
        while len(self._free) < count:
            needs = (f"--cpu-offload-activations keeps the activations of this rank in host memory, so far "
                     f"{self.num_bytes:,} bytes")
            cure = ("give the ranks of this node more memory, offload fewer layers (--cpu-offloading-num-layers), or "
                    "keep only their inputs (--recompute-granularity full)")
            self._free += host_segment(self._device.runtime, SEGMENT_BYTES, needs, cure).split(PAGE_BYTES)
            self.num_bytes += SEGMENT_BYTES
        return [self._free.pop() for _ in range(count)]  # one by one: a dying layer may give pages back meanwhile

    def give_back(self, pages: list[Tensor]) -> None:
        self._free += pages


class _Memory:
    """One block of the device's memory, whole, while it is there: several kept tensors of a dtype may lie in it."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.device = tensor.dtype, tensor.device
        self._storage: torch.UntypedStorage | None = tensor.untyped_storage()  # while it lives, no other has its key
        num_elements = self._storage.nbytes() // tensor.dtype.itemsize
        self.num_bytes = num_elements * tensor.dtype.itemsize
        self._here: Tensor | None = tensor.detach().as_strided((num_elements,), (1,), 0)

    @property
    def block(self) -> Tensor:
        assert self._here is not None, "used between allocation and freeing"
        return self._here

    def tensor(self, start: int, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
        return self.block.as_strided(shape, strides, start)

    def free(self) -> None:
        """The block lives on as long as tensors use it."""
        self._here = self._storage = None

    def allocate(self) -> None:
        self._here = torch.empty(self.num_bytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)

    def pairs(self, pages: list[Tensor], start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of it, and their places on ``pages`` from the byte ``start``."""
        for page, there, here in on_pages(start, self.num_bytes, PAGE_BYTES):
            own = slice(here.start // self.dtype.itemsize, here.stop // self.dtype.itemsize)
            yield self.block[own], pages[page][there].view(self.dtype)


class LayerActivations:
    """What one layer keeps of one microbatch."""

    def __init__(
        self, host: "HostActivations", before: "LayerActivations | None", is_offloaded: bool, shared: tuple[Tensor, ...]
    ) -> None:
        """``before``: those of the layer before, fetched when the backward pass reaches this layer; ``is_offloaded``:
        whether they leave the device; ``shared``: tensors that stay because other layers keep them, too."""
        self._host, self.before, self._is_offloaded = host, before, is_offloaded
        self._shared = {one.untyped_storage()._cdata for one in shared}
        self._memories: dict[tuple[int, torch.dtype], _Memory] = {}
        self.pages: list[Tensor] = []
        self.is_coming = self.is_used = False

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """A ``Keep``: only activations leave; weights, integers, and what other layers share stay on the device."""
        storage, base = tensor.untyped_storage()._cdata, tensor if tensor._base is None else tensor._base
        if (not tensor.is_floating_point() or isinstance(base, nn.Parameter) or storage in self._shared
                or tensor.device != self._host.torch_device or tensor.untyped_storage().nbytes() == 0):
            return keep_here(tensor)
        if not self._is_offloaded:
            kept = keep_here(tensor)
            return lambda: self._used(kept)
        key = storage, tensor.dtype
        if key not in self._memories:
            self._memories[key] = _Memory(tensor)
        memory, where = self._memories[key], (int(tensor.storage_offset()), tensor.shape, tensor.stride())
        return lambda: self._used(lambda: memory.tensor(*where))

    def _used(self, give: Callable[[], Tensor]) -> Tensor:
        self._host.bring(self)
        return give()

    def memories(self) -> list[tuple[_Memory, int]]:
        """All blocks, with their places on consecutive pages."""
        found, start = list[tuple[_Memory, int]](), 0
        for memory in self._memories.values():
            found.append((memory, start))
            start += -(-memory.num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return found

    def forget(self) -> None:
        """Give the pages back, and leave the blocks to the tensors in them: each is freed with the last of them."""
        self._host.pages.give_back(self.pages)
        self.pages = []
        self._memories.clear()

    def __del__(self) -> None:
        """A graph without a backward pass gives its pages back, too."""
        self.forget()


class HostActivations:
    """The activations of one rank in host memory: of all chunks and both towers, so that one layer leaves at a time."""

    def __init__(self, device: Device) -> None:
        self.pages = HostPages(device)
        self._device, self._side, self.torch_device = device, device.runtime.side_stream(), device.torch_device
        self._leaving: LayerActivations | None = None
        self._held: list[Tensor] = []
        """Blocks that are being fetched, kept until the computing stream waits for it: if no tensor uses them any
        longer, the allocator would reuse them while they are written."""

    @contextmanager
    def layer(
        self, before: LayerActivations | None, is_offloaded: bool, shared: tuple[Tensor, ...]
    ) -> Iterator[LayerActivations]:
        """Take what the body, a layer, keeps for its backward pass, and send it away."""
        own = LayerActivations(self, before, is_offloaded, shared)
        with torch.autograd.graph.saved_tensors_hooks(own.keep, lambda kept: kept()):
            yield own
        self.arrived()
        if own.memories():
            self._send(own)
            self._leaving = own

    def arrived(self) -> None:
        """Free the memory of the layer that leaves, once it is in host memory; the computing stream waits for that."""
        if self._leaving is not None:
            self._join()
            for memory, _ in self._leaving.memories():
                memory.free()
            self._leaving = None

    def _join(self) -> None:
        """Make the computing stream wait for all copies."""
        self._side.join()
        self._held.clear()

    def bring(self, own: LayerActivations) -> None:
        """Make sure that ``own`` is on the device for the work that is queued now, and let the layer before come."""
        if own.is_used:
            return
        own.is_used = True
        if own is self._leaving:  # it is still here
            self._join()  # its copy reads blocks that are freed as they are used
            self._leaving = None
            own.forget()
        else:
            self.arrived()
            self._fetch(own)
            self._join()
        if own.before is not None:
            self._fetch(own.before)

    def _send(self, own: LayerActivations) -> None:
        memories = own.memories()
        last, start = memories[-1]
        own.pages = self.pages.take(start + last.num_bytes)
        self._side.record_event()
        with self._side.after_event():
            for memory, start in memories:
                for here, there in memory.pairs(own.pages, start):
                    self._device.runtime.start_copying_back(here, there)

    def _fetch(self, own: LayerActivations) -> None:
        """Let ``own`` come, if it has left and does not come already."""
        if own.is_coming or not own.pages:
            return
        own.is_coming = True
        memories = own.memories()
        for memory, _ in memories:
            memory.allocate()
        self._held += [memory.block for memory, _ in memories]
        self._side.record_event()
        with self._side.after_event():
            for memory, start in memories:
                for here, there in memory.pairs(own.pages, start):
                    here.copy_(there, non_blocking=True)
        own.forget()


@dataclass(frozen=True)
class Remade:
    """The input of a linear layer that is recomputed for the weight's gradient instead of being kept."""

    made: Tensor
    again: Callable[[Tensor], Tensor]
    """Makes it from ``made_from``."""
    made_from: Tensor
    keep: Keep = keep_here
    """How ``made_from``, and what else the linear layer saves, are kept."""


LinearInput = Tensor | Remade


def apply_linear(
    linear: nn.Module, x: LinearInput, sharded: ShardedRows | None = None, keys: Tensor | None = None
) -> Any:
    """Apply ``linear`` to ``x``; if ``x`` is ``Remade``, autograd keeps the function ``again`` instead of the tensor.

    Saved tensors are matched by address and shape; our linear layers save neither other views nor copies of ``made``.
    """
    if isinstance(x, Tensor):
        return linear(x, sharded, keys)
    made, address = x.made, (x.made.data_ptr(), x.made.shape)
    keep, again, to_keep = x.keep, x.again, [x.made_from]

    def keep_saved(saved: Tensor) -> Callable[[], Tensor]:
        """Autograd holds this function as long as what it keeps, so it must not hold tensors then."""
        if (saved.data_ptr(), saved.shape) != address:
            return keep(saved)
        made_from = keep(to_keep[0])
        return lambda: again(made_from())

    with torch.autograd.graph.saved_tensors_hooks(keep_saved, lambda kept: kept()):
        out = linear(made, sharded, keys)
    to_keep.clear()
    return out


def recomputing(modules: Iterable[nn.Module], function: Callable[..., Any], x: Tensor, *others: Any) -> Any:
    """``function(x, *others)``, keeping only its arguments and calling it again in the backward pass.

    ``modules``: those that ``function`` uses.  If neither they nor ``x`` need a gradient, nothing is kept.
    """
    is_trained = any(parameter.requires_grad for module in modules for parameter in module.parameters())
    if torch.is_grad_enabled() and (x.requires_grad or is_trained):
        return checkpoint(function, x, *others, use_reentrant=False, preserve_rng_state=False)
    return function(x, *others)
