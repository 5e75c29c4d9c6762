"""Runs one step of each case on four ranks and writes what each really sent, received, read back, kept and computed.

Launched by tests/parallel/pipeline/test_p2p.py: ``pipeline_worker DIRECTORY``.  Each rank writes DIRECTORY/RANK.json;
nothing is judged here.  How things are counted: tests/parallel/trace.py.
"""

import dataclasses
import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm.device.device import Device
from tests.parallel.cases import Case
from tests.parallel.messages import recording
from tests.parallel.trace import Trace, counting

if TYPE_CHECKING:
    from mm.parallel.activity import Activity
    from mm.parallel.pipeline.p2p import PipelineCommunicator
    from tests.parallel.parity_worker import Engine

FEW: dict[str, Any] = {"grids": (((1, 4, 6),), (), ((1, 6, 10), (1, 2, 4)), ()), "micro_batch_size": 1}
"""Four microbatches, with images and without by turns, of one sample each."""
CASES = tuple(dataclasses.replace(one, batch="mixed, longer") if one.batch == "mixed" else one for one in (
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
    Case("distributed-overlap-virtual", ((2, 1), (1, 0)), ((0, 0), (1, 3)), dp=2, tied=True, sharding="optim",
         overlap=True, **FEW),
    Case("waits", (2, 2, 0, 0), (0, 0, 2, 2), waits=True),
    Case("virtual-waits", ((1, 1, 1, 1), (0, 0, 0, 0)), ((0, 0, 0, 0), (1, 1, 1, 1)), freeze=("vision",), waits=True),
    Case("frozen-twice", (4, 0), (0, 4), dp=2, freeze=("vision", "projector"), grids=(((1, 2, 2),),) * 24,
         micro_batch_size=1),
    Case("ulysses", (3, 1), (0, 4), cp=2, **FEW),
    Case("ring", (3, 1), (0, 4), cp=2, ring=True, **FEW),
    Case("whole-encoder", (3, 1), (0, 4), tp=2, sequence_parallel=True, whole_encoder=True, **FEW),
))
"""With more microbatches than may be on their way."""


class Coming:
    """A listener that counts messages on their way when a pass of a chunk begins."""

    def __init__(self, trace: Trace, communicator: "PipelineCommunicator") -> None:
        self._trace, self._num_waited = trace, 0
        wait_for = communicator._wait_for

        def counted(arriving: Any) -> Any:
            self._num_waited += bool(arriving.works)
            return wait_for(arriving)

        communicator._wait_for = counted

    def begin(self, activity: "Activity") -> None:
        num_begun = sum(operation["name"] == "recv_" for operation in self._trace.operations)
        kind = activity.work.value
        self._trace.num_coming[kind] = max(self._trace.num_coming.get(kind, 0), num_begun - self._num_waited)

    def end(self, _: "Activity") -> None: ...


def run_case(case: Case) -> dict:
    """One step, after one that is not watched."""
    from mm.parallel import mesh as parallel
    from mm.parallel.pipeline.loop import run_schedule
    from mm.parallel.zero.reduction import finalize
    from mm.run.step import forward_backward
    from tests.parallel import parity_worker
    from tests.tiny import hf_model, hf_tensors

    engine = parity_worker.build(case, hf_tensors(hf_model(case.tied)))
    forward_backward(engine.setup, engine.plan)
    setup, trace, events = engine.setup, Trace([]), []
    trace.num_trained_chunks = sum(any(one.requires_grad for one in chunk.parameters()) for chunk in setup.stage.chunks)
    for model in setup.models:
        model.zero_grad_buffer()
    setup.stage.journal.listeners.append(Coming(trace, setup.communicator))
    with counting(trace, setup.stage), recording(events):
        run_schedule(setup.models, engine.plan, setup.communicator)
        finalize(setup.models, setup.passes, setup.mesh.tied_group)
    found = {
        **{name: value for name, value in vars(trace).items() if name != "in_host_work"},
        "messages": [[type(event).__name__, *dataclasses.astuple(event)] for event in events],
        "num_in_flight": len(setup.communicator._in_flight),
        "refuses_leftovers": _refuses_leftovers(engine) if setup.mesh.pp_rank == 0 else None,
    }
    parallel.stop_mesh()
    return found


def step_with_a_late_last_stage(
    case: Case, watch_first: Callable[["PipelineCommunicator", Callable[[], None]], None]
) -> "Engine":
    """A step in which the last stage begins only when the first, to which no gradient comes back, lets it.

    The first lets it when it has done its part; ``watch_first``, called on the first stage before the step, gets its
    communicator and a function that lets the last begin sooner.
    """
    import torch.distributed as dist

    from mm.parallel import mesh as parallel
    from mm.run.step import forward_backward
    from tests.parallel import parity_worker
    from tests.tiny import hf_model, hf_tensors

    engine = parity_worker.build(case, hf_tensors(hf_model(case.tied)))
    communicator, mesh = engine.setup.communicator, engine.setup.mesh
    store, key = dist.distributed_c10d._get_default_store(), f"the last stage may begin: {case.name} {mesh.dp_rank}"
    take, end = communicator.take, communicator.end

    def let_begin() -> None:
        store.set(key, "")

    def take_late(step: object) -> object:
        store.wait([key])
        return take(step)

    def end_and_let_begin() -> None:
        let_begin()
        end()

    if mesh.pp_rank == 0:
        communicator.end = end_and_let_begin
        watch_first(communicator, let_begin)
    elif mesh.pp_rank == mesh.pp_size - 1:
        communicator.take = take_late
    forward_backward(engine.setup, engine.plan)
    parallel.stop_mesh()
    return engine


def runs_ahead(case: Case) -> bool:
    """A step that would never end if the first stage had to wait for the last before it has done its part."""
    engine = step_with_a_late_last_stage(case, lambda *_: None)
    return len(engine.plan.microbatches) > engine.setup.mesh.pp_size


def runs_to_its_limit(case: Case) -> dict | None:
    """A step in which the last stage begins only when the first waits for it, or has done its part.

    What the first stage then found: the limit, and the most sent messages that it kept at a time.
    """
    most = 0

    def count(communicator: "PipelineCommunicator", let_last_begin: Callable[[], None]) -> None:
        run = communicator._run

        def run_and_count(*batches: Any) -> None:
            nonlocal most
            if len(communicator._in_flight) > communicator._most_in_flight:
                let_last_begin()
            run(*batches)
            most = max(most, len(communicator._in_flight))

        communicator._run = run_and_count

    setup = step_with_a_late_last_stage(case, count).setup
    return {"limit": setup.communicator._most_in_flight, "most": most} if setup.mesh.pp_rank == 0 else None


def _refuses_leftovers(engine: "Engine") -> bool:
    """Whether a step that ends before all of its messages were exchanged is refused."""
    communicator = engine.setup.communicator
    communicator.begin(engine.plan)
    try:
        communicator.end()
    except AssertionError as error:
        return "the step ended with passes or messages left: [(" in str(error)
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
        Device.pick("cpu").runtime.synchronize()
        with suppress(AttributeError):  # a CPU makes no event: the call fails after it was counted
            torch.cuda.Event.synchronize(None)
    return trace.num_read_back


def main(directory: str) -> None:
    from datetime import timedelta

    import psutil
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    dist.barrier()
    before = psutil.Process().num_threads()
    found = {case.name: run_case(case) for case in CASES}
    gc.collect()  # the last engine refers to its groups
    found["num_more_threads"] = psutil.Process().num_threads() - before
    found["num_known_reads"] = count_known_reads()
    found["runs_ahead"] = runs_ahead(next(case for case in CASES if case.name == "vision-and-projector-frozen"))
    found["runs_to_its_limit"] = runs_to_its_limit(next(case for case in CASES if case.name == "frozen-twice"))
    (Path(directory) / f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    Device.pick("cpu")
    main(sys.argv[1])
