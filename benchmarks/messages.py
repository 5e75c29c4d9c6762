"""What each pipeline stage starts and waits for in a step, and for how long NCCL's kernels occupy its device meanwhile.

    python -m benchmarks.messages

The schedule, the communicator and every message are those of a run; chunks compute nothing, and say that they do.  One
process takes the place of all stages in turn, with torch's fake process group.  What would come of it under NCCL's
rules is replayed by ``benchmarks.message_replay``.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from benchmarks.message_replay import Compute, Event, Message, Program, Start, Wait, replay
from benchmarks.pipeline import QUICK_MODEL, Case, model_of, stand_in


@dataclass(frozen=True)
class Layout:
    """Layers of each chunk and stage, what is frozen, and the microbatches of a step."""

    vision: tuple[tuple[int, ...], ...]
    language: tuple[tuple[int, ...], ...]
    freeze: tuple[str, ...] = ()
    num_microbatches: int = 4
    text_only: tuple[int, ...] = ()
    """Microbatches without an image."""

    @property
    def num_stages(self) -> int:
        return len(self.vision[0])

    def model(self) -> Any:
        sizes = {"vision_layers": sum(map(sum, self.vision)), "language_layers": sum(map(sum, self.language))}
        return model_of(Case(self.vision, self.language, self.freeze), QUICK_MODEL | sizes)


class Mode(NamedTuple):
    """A kind of step."""

    starts_ahead: bool
    forward_only: bool = False


class Seconds(NamedTuple):
    """How long a stage's passes over one microbatch take."""

    forward: float
    backward: float


class _UnendingWork:
    """A message that has not left until it is waited for."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return False


class _NotedWork:
    """Notes whoever waits for it."""

    def __init__(self, work: Any, note: Callable[[], None]) -> None:
        self._work, self._note = work, note

    def wait(self) -> None:
        self._note()
        self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()


@contextmanager
def recording(events: list[Event]) -> Iterator[None]:
    """Note every batch of messages of this rank's pipeline, and every wait for one."""
    from mm.parallel.transport import Batch

    start = Batch.start

    def noted(batch: Any) -> list[tuple[Any, Any]]:
        messages = tuple(
            Message(due.is_sent, due.peer_stage, (due.is_gradient, due.boundary, due.microbatch, tuple(tensor.shape)))
            for due, tensor in batch.transfers if tensor is not None and tensor.numel())  # fmt: skip
        if not messages:
            return start(batch)
        number = len(events)
        events.append(Start(number, batch.group.group_desc, messages))
        sent = start(batch)

        def with_note(work: Any) -> _NotedWork:
            return _NotedWork(work, lambda: events.append(Wait(number)))

        for arriving in batch._receiving.values():
            arriving.works = [with_note(work) for work in arriving.works]
        return [(with_note(work), tensor) for work, tensor in sent]

    Batch.start = noted
    try:
        yield
    finally:
        Batch.start = start


def programs_of(
    layout: Layout, modes: Sequence[Mode], seconds: Sequence[Seconds] | None = None
) -> dict[Mode, list[Program]]:
    """What every stage does in a step of each mode.  ``seconds``: of each stage; None: 1 forward, 2 backward.

    For a process of its own that is in no process group.
    """
    found: dict[Mode, list[Program]] = {mode: [] for mode in modes}
    for stage in range(layout.num_stages):
        own = Seconds(1.0, 2.0) if seconds is None else seconds[stage]
        for mode, program in _programs_of_stage(layout, stage, modes, own):
            found[mode].append(program)
    return found


def _programs_of_stage(
    layout: Layout, stage: int, modes: Sequence[Mode], seconds: Seconds
) -> Iterator[tuple[Mode, Program]]:
    from mm.device.device import Device

    device = Device.pick("cpu")
    import torch.distributed as dist
    from megatron.core.distributed import DistributedDataParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from benchmarks.meta_device import fake_subgroups
    from mm.config import flags
    from mm.model.stage import Stage
    from mm.parallel import mesh as parallel
    from mm.parallel.megatron import bind, ddp_config
    from mm.parallel.pipeline import PipelineCommunicator
    from mm.parallel.schedule import run_forward, run_schedule

    args = flags.parse(["--lr", "1e-5", "--train-iters", "1", "--seq-length", "1", "--micro-batch-size", "1",
                        "--mm-model", "-", "--mm-data", "-"])  # fmt: skip
    model, none = layout.model(), partial(_do_nothing)
    plan = _plan(layout, model, reads_pixels=stage == 0)
    originals = dist.batch_isend_irecv, dist.new_subgroups_by_enumeration
    dist.batch_isend_irecv, dist.new_subgroups_by_enumeration = lambda _: [_UnendingWork()], fake_subgroups
    dist.init_process_group("fake", store=FakeStore(), rank=stage, world_size=layout.num_stages)
    try:
        mesh = parallel.build_mesh(model, 1, timedelta(minutes=1))
        rank = Stage(model, mesh, "fp32", device)
        for mode in modes:
            events: list[Event] = []

            def note(is_forward: bool, events: list[Event] = events) -> None:
                events.append(Compute((seconds.forward if is_forward else seconds.backward) / len(layout.vision)))

            for chunk in rank.chunks:
                stand_in(chunk, note)
            models = [DistributedDataParallel(rank.config, ddp_config(args), chunk) for chunk in rank.chunks]
            optimizer: Any = None  # for the loss scale of fp16 alone
            bind(rank.config, models, optimizer, none)
            communicator = PipelineCommunicator(mesh, model, rank.config, device.torch_device, rank.journal,
                                                starts_ahead=mode.starts_ahead)
            with recording(events):
                (run_forward if mode.forward_only else run_schedule)(models, plan, communicator, mesh)
            yield mode, events
    finally:
        parallel.stop()
        dist.batch_isend_irecv, dist.new_subgroups_by_enumeration = originals


def _do_nothing(*_: object, **__: object) -> None: ...


def _plan(layout: Layout, model: Any, reads_pixels: bool) -> Any:
    from dataclasses import replace

    from benchmarks.one_device import random_microbatch
    from mm.batch import BatchTotals, StepPlan

    batch = [random_microbatch(model, [(() if number in layout.text_only else ((1, 4, 4),), 20)], number)
             for number in range(layout.num_microbatches)]
    totals = BatchTotals.of(batch, model.vision)
    return StepPlan(tuple(one if reads_pixels else replace(one, pixel_values=None) for one in batch), totals)


VISION = ("vision", "projector")
MESSAGE_SECONDS = 0.01
"""How long one message takes; the forward pass of an even stage takes 1."""
CASES = {
    # name: layout, and seconds of each stage; frozen stages have no backward pass
    "PP 2, 7B's list, ViT frozen": (
        Layout(((2, 0),), ((1, 3),), VISION, 12), [Seconds(1.0, 1.2), Seconds(0.95, 1.9)]),
    "PP 4, everything trained": (Layout(((1, 1, 0, 0),), ((0, 0, 1, 1),), (), 16), [Seconds(1.0, 2.0)] * 4),
    "PP 8, ViT frozen on a stage of its own": (
        Layout(((2, *(0,) * 7),), ((0, *(1,) * 7),), VISION, 32), [Seconds(1.0, 2.0)] * 8),
}


def main() -> None:
    print("| layout | messages | time of a step | computing with a message kernel beside it, by stage |")
    print("| --- | --- | --- | --- |")
    for name, (layout, seconds) in CASES.items():
        modes = Mode(starts_ahead=True), Mode(starts_ahead=False)
        programs = programs_of(layout, modes, seconds)
        results = [replay(programs[mode], MESSAGE_SECONDS) for mode in modes]
        assert not any(result.stuck for result in results)
        for result, what in zip(results, ("ahead", "when wanted"), strict=True):
            shares = ", ".join(f"{share:.0%}" for share in result.occupied)
            print(f"| {name} | {what} | {result.seconds / results[-1].seconds:.4f} | {shares} |")


if __name__ == "__main__":
    sys.exit(main())
