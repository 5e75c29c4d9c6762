"""Counts what a step really sent, read back, kept and computed; for workers of tests, and nothing is judged here.

Messages are counted below mm and below torch.distributed's Python: torch's dispatcher sees every collective and
point-to-point operation of every process group, with its tensors, whoever started it.
"""

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

    from mm.model.stage import Stage

READ_BACK = ("tolist", "numpy", "cpu")
"""Ways in which Python code waits for a device's result that the dispatcher does not see on a CPU; ``item``, ``bool``,
``int`` and ``float`` it does."""
WAITS = ("torch.cuda.synchronize", "torch.cuda.Event.synchronize", "torch.cuda.Stream.synchronize",
         "mm.device.cpu.HostRuntime.synchronize")
"""Calls that wait for the device and read nothing.  The CPU's stand-ins (mm/device/cpu.py) have the same names."""


@dataclass
class Trace:
    """What happened during one step on this rank."""

    operations: list[dict]
    """Every operation of a process group, in order."""
    num_read_back: int = 0
    num_trained_chunks: int = 0
    num_kept: int = 0
    """Tensors that autograd saved for a backward pass, but those that selective recompute and checkpoints forget."""
    num_backward_operators: int = 0
    num_weight_products: int = 0
    """Products that add a weight's gradient to its buffer."""
    num_vision_layer_runs: int = 0
    num_language_layer_runs: int = 0
    num_coming: dict[str, int] = field(default_factory=dict)
    """By kind of work: the most messages that had begun to come, and were not waited for, when one began."""
    in_host_work: bool = False


def watch(trace: Trace) -> "TorchDispatchMode":
    """A mode that notes process-group operations, and operators whose result the host must wait for."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    in_backward = torch._C._current_graph_task_id
    waiting = (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten._unique2)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator.namespace == "c10d":
                tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
                name = operator._schema.name.partition("::")[2]
                peer = args[2] if name in ("send", "recv_") else None
                num_bytes = sum(t.numel() * t.element_size() for t in tensors)
                trace.operations.append({"name": name, "peer": peer, "bytes": num_bytes})
            elif operator.overloadpacket in waiting and not trace.in_host_work:
                trace.num_read_back += 1
            if in_backward() != -1:
                trace.num_backward_operators += 1
                trace.num_weight_products += operator.overloadpacket is aten.addmm_
            return operator(*args, **(kwargs or {}))

    return Watch()


@contextmanager
def reads_counted(trace: Trace, counts: Callable[[], bool]) -> Iterator[None]:
    """Count tensors that Python reads back while ``counts`` says so, and each of ``WAITS`` at any time."""
    import torch

    def counted(original: Callable, applies: Callable[[], bool]) -> Callable:
        def call(*args, **kwargs):
            trace.num_read_back += applies()
            return original(*args, **kwargs)

        return call

    paths = [path.rpartition(".") for path in WAITS]
    counters = [(torch.Tensor, name, counts) for name in READ_BACK]
    counters += [(pkgutil.resolve_name(owner), name, lambda: True) for owner, _, name in paths]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in counters]
    for (owner, name, applies), (*_, original) in zip(counters, originals, strict=True):
        setattr(owner, name, counted(original, applies))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


@contextmanager
def layers_counted(trace: Trace, stage: "Stage") -> Iterator[None]:
    """Count how often layers of each tower run."""

    def count_vision(*_) -> None:
        trace.num_vision_layer_runs += 1

    def count_language(*_) -> None:
        trace.num_language_layer_runs += 1

    hooks = [layer.register_forward_pre_hook(count) for chunk in stage.chunks for attribute, stack, count in (
        ("image_encoder", "encoder.blocks", count_vision), ("text_decoder", "decoder", count_language))
        if hasattr(chunk, attribute)
        for layer in getattr(chunk, attribute).get_submodule(stack).layers.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def counting(trace: Trace, stage: "Stage") -> Iterator[None]:
    """Count runs of layers, tensors that are kept, and those that Python reads back but in ``prepare`` of each chunk,
    which works on host tensors.

    (That ``prepare`` reads nothing back from the device either is shown on the meta device, in test_pipeline.py.)
    """
    import torch

    def on_host(prepare: Callable) -> Callable:
        def host_work(*args, **named):
            trace.in_host_work = True
            try:
                return prepare(*args, **named)
            finally:
                trace.in_host_work = False

        return host_work

    def keep(tensor):
        trace.num_kept += 1
        return tensor

    preparations = [chunk.prepare for chunk in stage.chunks]
    for chunk, prepare in zip(stage.chunks, preparations, strict=True):
        chunk.prepare = on_host(prepare)
    try:
        with (layers_counted(trace, stage), reads_counted(trace, lambda: not trace.in_host_work), watch(trace),
              torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)):
            yield
    finally:
        for chunk, prepare in zip(stage.chunks, preparations, strict=True):
            chunk.prepare = prepare
