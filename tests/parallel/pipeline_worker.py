"""Runs one step of each case on four ranks and writes what each really sent, received, read back, kept and computed.

Launched by tests/parallel/test_pipeline.py: ``pipeline_worker DIRECTORY``.  Each
rank writes DIRECTORY/RANK.json; nothing is judged here.

Messages are counted below mm and below torch.distributed's Python: torch's dispatcher sees every collective and
point-to-point operation of every process group, with its tensors, whoever started it.
"""

import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mm.device.device import Device
from tests.parallel.cases import Case

FEW: dict[str, Any] = {"grids": (((1, 4, 6),), (), ((1, 6, 10), (1, 2, 4)), ()), "micro_batch_size": 1}
"""Four microbatches, with images and without by turns, of one sample each."""
CASES = (
    Case("mixed", (2, 2, 0, 0), (0, 0, 2, 2)),
    Case("text", (2, 2, 0, 0), (0, 0, 2, 2), batch="text"),
    Case("vision-frozen", (2, 2, 0, 0), (0, 0, 2, 2), freeze=("vision",)),
    Case("vision-and-projector-frozen", (2, 2, 0, 0), (0, 0, 2, 2), freeze=("vision", "projector")),
    Case("language-frozen", (2, 2, 0, 0), (0, 0, 2, 2), freeze=("language",)),
    Case("only-projector", (2, 2, 0, 0), (0, 0, 2, 2), freeze=("vision", "language")),
    Case("nothing-on-the-first", (0, 2, 2, 0), (0, 0, 1, 3)),
    Case("nothing-on-the-last", (4, 0, 0, 0), (1, 3, 0, 0)),
    Case("virtual", ((1, 1, 1, 1), (0, 0, 0, 0)), ((0, 0, 0, 0), (1, 1, 1, 1)), freeze=("vision",)),
    Case("two-microbatches", (2, 2, 0, 0), (0, 0, 2, 2), batch="three samples"),
    Case("first-of-vit-frozen", (2, 2, 0, 0), (0, 0, 2, 2), freeze_layers=("0-1", ""), freeze_modules=("patch_embed",)),
    Case("first-of-llm-frozen", (2, 2, 0, 0), (0, 0, 2, 2), freeze=("vision", "projector"), freeze_layers=("", "0-1"),
         freeze_modules=("word_embeddings",)),
    Case("frozen-recompute", (2, 2, 0, 0), (0, 0, 2, 2), freeze=("vision", "projector"), recompute="uniform"),
    Case("mlp-recompute", (2, 2, 0, 0), (0, 0, 2, 2), recompute="selective mlp"),
    Case("sequence-virtual", ((2, 1), (1, 0)), ((0, 0), (1, 3)), tp=2, sequence_parallel=True, recompute="selective",
         freeze_modules=("norm",), **FEW),
    Case("distributed-overlap-virtual", ((2, 1), (1, 0)), ((0, 0), (1, 3)), dp=2, tied=True, distributed_optimizer=True,
         overlap=True, **FEW),
    Case("waits", (2, 2, 0, 0), (0, 0, 2, 2), waits=True),
    Case("virtual-waits", ((1, 1, 1, 1), (0, 0, 0, 0)), ((0, 0, 0, 0), (1, 1, 1, 1)), freeze=("vision",), waits=True),
    Case("frozen-twice", (4, 0), (0, 4), dp=2, freeze=("vision", "projector"), grids=(((1, 2, 2),),) * 24,
         micro_batch_size=1),
    Case("ulysses", (3, 1), (0, 4), cp=2, **FEW),
    Case("ring", (3, 1), (0, 4), cp=2, ring=True, **FEW),
)

READ_BACK = ("tolist", "numpy", "cpu")
"""Ways in which Python code waits for a device's result that the dispatcher does not see on a CPU; ``item``, ``bool``,
``int`` and ``float`` it does."""
WAITS = ("torch.cuda.synchronize", "torch.cuda.Event.synchronize", "torch.cuda.Stream.synchronize",
         "mm.device.device.Device.synchronize")
"""Calls that wait for the device and read nothing.  The CPU's stand-ins (mm/device/shims.py) have the same names."""


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
    streams: list[list] = field(default_factory=list)
    """What a communicator does in order: ["start", group, messages] and ["wait", message]."""
    in_host_work: bool = False


def watch(trace: Trace) -> "TorchDispatchMode":  # noqa: F821
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
def layers_counted(trace: Trace, stage: "Stage") -> Iterator[None]:  # noqa: F821
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
def counting(trace: Trace, stage: "Stage") -> Iterator[None]:  # noqa: F821
    """Count runs of layers, tensors that are kept, and those that Python reads back but in ``prepare`` of each chunk,
    which works on host tensors.

    (That ``prepare`` reads nothing back from the device either is shown on the meta device, in test_pipeline.py.)
    """
    import torch

    def on_host(prepare: Callable) -> Callable:
        def host_work(*args):
            trace.in_host_work = True
            try:
                return prepare(*args)
            finally:
                trace.in_host_work = False

        return host_work

    def keep(tensor):
        trace.num_kept += 1
        return tensor

    for chunk in stage.chunks:
        chunk.prepare = on_host(chunk.prepare)
    try:
        with (layers_counted(trace, stage), reads_counted(trace, lambda: not trace.in_host_work), watch(trace),
              torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)):
            yield
    finally:
        for chunk in stage.chunks:
            del chunk.prepare


def message(due: Any) -> list:
    return [due.is_gradient, due.boundary, due.microbatch]


@contextmanager
def in_order(trace: Trace) -> Iterator[None]:
    """Note which messages start together, in which group."""
    from mm.parallel.transport import Batch

    start = Batch.start

    def noted(batch: Any) -> Any:
        moved = [[due.is_sent, due.peer_stage, *message(due)] for due, tensor in batch.transfers
                 if tensor is not None and tensor.numel()]
        if moved:
            trace.streams.append(["start", batch.group.group_name, moved])
        return start(batch)

    Batch.start = noted
    try:
        yield
    finally:
        Batch.start = start


class Coming:
    """A listener that counts messages on their way when a pass of a chunk begins."""

    def __init__(self, trace: Trace, communicator: "PipelineCommunicator") -> None:  # noqa: F821
        self._trace, self._num_waited = trace, 0
        wait_for = communicator._wait_for

        def counted(arriving: Any) -> Any:
            self._num_waited += bool(arriving.works)
            if arriving.works:
                trace.streams.append(["wait", message(arriving.due)])
            return wait_for(arriving)

        communicator._wait_for = counted

    def begin(self, activity: "Activity") -> None:  # noqa: F821
        num_begun = sum(operation["name"] == "recv_" for operation in self._trace.operations)
        kind = activity.work.value
        self._trace.num_coming[kind] = max(self._trace.num_coming.get(kind, 0), num_begun - self._num_waited)

    def end(self, _: "Activity") -> None: ...  # noqa: F821


def run_case(case: Case) -> dict:
    """One step, after one that is not watched."""
    from mm.parallel import mesh as parallel
    from mm.parallel.schedule import run_schedule
    from mm.training.step import forward_backward
    from tests.parallel import parity_worker
    from tests.tiny import hf_model, hf_tensors

    engine = parity_worker.build(case, hf_tensors(hf_model(case.tied)))
    forward_backward(engine.parts, engine.plan)
    parts, trace = engine.parts, Trace([])
    trace.num_trained_chunks = sum(any(one.requires_grad for one in chunk.parameters()) for chunk in parts.stage.chunks)
    for model in parts.models:
        model.zero_grad_buffer()
    parts.stage.journal.listener = Coming(trace, parts.communicator)
    with counting(trace, parts.stage), in_order(trace):
        run_schedule(parts.models, engine.plan, parts.communicator, parts.mesh)
    found = {
        **{name: value for name, value in vars(trace).items() if name != "in_host_work"},
        "num_in_flight": len(parts.communicator._in_flight),
        "refuses_leftovers": _refuses_leftovers(engine) if parts.mesh.pp_rank == 0 else None,
    }
    parallel.stop_mesh()
    return found


def runs_ahead(case: Case) -> bool:
    """A step in which the last stage begins only when the first, to which no gradient comes back, has done its part.

    It would never end if the first had to wait for the last.
    """
    import torch.distributed as dist

    from mm.parallel import mesh as parallel
    from mm.training.step import forward_backward
    from tests.parallel import parity_worker
    from tests.tiny import hf_model, hf_tensors

    engine = parity_worker.build(case, hf_tensors(hf_model(case.tied)))
    communicator, mesh = engine.parts.communicator, engine.parts.mesh
    store, key = dist.distributed_c10d._get_default_store(), "the first stage has done its part"
    take, end = communicator.take, communicator.end

    def take_late(microbatch: int, chunk: int) -> object:
        store.wait([key])
        return take(microbatch, chunk)

    def end_and_tell() -> None:
        store.set(key, "")
        end()

    if mesh.pp_rank == 0:
        communicator.end = end_and_tell
    elif mesh.pp_rank == mesh.pp_size - 1:
        communicator.take = take_late
    forward_backward(engine.parts, engine.plan)
    parallel.stop_mesh()
    return len(engine.plan.microbatches) > mesh.pp_size


def runs_to_its_limit(case: Case) -> dict | None:
    """A step in which the last stage begins only when the first, to which no gradient comes back, waits for it.

    What the first stage then found: the limit, and the most sent messages that it kept at a time.
    """
    import torch.distributed as dist

    from mm.parallel import mesh as parallel
    from mm.training.step import forward_backward
    from tests.parallel import parity_worker
    from tests.tiny import hf_model, hf_tensors

    engine = parity_worker.build(case, hf_tensors(hf_model(case.tied)))
    communicator, mesh = engine.parts.communicator, engine.parts.mesh
    store = dist.distributed_c10d._get_default_store()
    key, most = f"first stage {mesh.dp_rank} waits, or has done its part", 0
    take, run, end = communicator.take, communicator._run, communicator.end

    def take_late(microbatch: int, chunk: int) -> object:
        store.wait([key])
        return take(microbatch, chunk)

    def run_and_count(*batches: Any) -> None:
        nonlocal most
        if len(communicator._in_flight) > communicator._most_in_flight:
            store.set(key, "")
        run(*batches)
        most = max(most, len(communicator._in_flight))

    def end_and_tell() -> None:
        store.set(key, "")
        end()

    if mesh.pp_rank == 0:
        communicator._run, communicator.end = run_and_count, end_and_tell
    else:
        communicator.take = take_late
    forward_backward(engine.parts, engine.plan)
    found = {"limit": communicator._most_in_flight, "most": most} if mesh.pp_rank == 0 else None
    parallel.stop_mesh()
    return found


def _refuses_leftovers(engine: "Engine") -> bool:  # noqa: F821
    """Whether a step that ends before all of its messages were exchanged is refused."""
    communicator = engine.parts.communicator
    communicator.begin(engine.plan)
    try:
        communicator.end()
    except AssertionError as error:
        return "the step ended with messages left: ['" in str(error)
    return False


def count_known_reads() -> int:
    """What the counter says of a program that reads five times and waits four times."""
    import torch

    class NoStage:
        chunks = ()

    trace, x = Trace([]), torch.ones(1)
    with counting(trace, NoStage()):
        for read in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu):
            read(x)
        torch.nonzero(x)
        torch.equal(x, x)
        torch.cuda.synchronize()
        torch.cuda.current_stream().synchronize()
        Device.pick("cpu").synchronize()
        with suppress(AttributeError):  # a CPU makes no event: the call fails after it was counted
            torch.cuda.Event.synchronize(None)
    return trace.num_read_back


def main(directory: str) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    found = {case.name: run_case(case) for case in CASES}
    found["num_known_reads"] = count_known_reads()
    found["runs_ahead"] = runs_ahead(next(case for case in CASES if case.name == "vision-and-projector-frozen"))
    found["runs_to_its_limit"] = runs_to_its_limit(next(case for case in CASES if case.name == "frozen-twice"))
    (Path(directory) / f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    Device.pick("cpu")
    main(sys.argv[1])
