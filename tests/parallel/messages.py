"""What each pipeline stage starts and waits for in a step, without devices.

The schedule, the communicator and every message are those of a run; chunks compute nothing and only note their passes.
One process takes the place of all stages in turn, with torch's fake process group.  ``tests.parallel.replay`` shows
what would come of it under NCCL's rules.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from tests.parallel.replay import Compute, Event, Message, Program, Start, Wait

VISION = ("vision", "projector")


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
        from tests.tiny import our_config

        return our_config(self.vision, self.language, freeze=self.freeze)


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
    from mm.parallel.pipeline.p2p import Batch

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


def stand_in(chunk: Any, work: Callable[[bool], object]) -> None:
    """Let ``chunk`` call ``work`` in place of each of its forward (True) and backward passes, and send zeros."""
    import torch

    from mm.placement import Message as Content

    class Pass(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            work(True)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            work(False)
            return gradient

    vision, language = chunk.model.vision, chunk.model.language
    trains = any(parameter.requires_grad for parameter in chunk.parameters())

    def forward(inputs: Any, received: torch.Tensor | None) -> torch.Tensor:
        x = torch.zeros((), requires_grad=trains)
        x = Pass.apply(x if received is None else x + received.sum() * 0.0)
        rows = None
        match chunk.spec.sends:
            case Content.PATCHES if inputs.vision is not None:
                rows = len(inputs.vision.plan.positions), vision.hidden_size
            case Content.VISUAL_TOKENS if inputs.vision is not None:
                rows = len(inputs.vision.plan.positions) // vision.spatial_merge_size**2, language.hidden_size
            case Content.HIDDEN_STATES:
                rows = len(inputs.language.cos), language.hidden_size
        return x if rows is None else x + torch.zeros(rows)  # x alone: in place of the loss, or where nothing crosses

    chunk.forward = forward


def programs_of(
    layout: Layout, modes: Sequence[Mode], seconds: Sequence[Seconds] | None = None
) -> dict[Mode, list[Program]]:
    """What every stage does in a step of each mode.  ``seconds`` are by stage; None: 1 forward, 2 backward.

    Call it in a process of its own that is in no process group.
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

    from mm.config import args as flags
    from mm.model.stage import Stage
    from mm.parallel import mesh as parallel
    from mm.parallel.megatron import ddp_config
    from mm.parallel.pipeline.loop import run_forward, run_schedule
    from mm.parallel.pipeline.p2p import PipelineCommunicator
    from tests.meta.device import fake_subgroups

    args = flags.parse(["--lr", "1e-5", "--train-iters", "1", "--seq-length", "1", "--micro-batch-size", "1",
                        "--mm-model", "-", "--mm-data", "-"])  # fmt: skip
    model = layout.model()
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
            communicator = PipelineCommunicator(mesh, model, rank.config, device.torch_device, rank.journal,
                                                starts_ahead=mode.starts_ahead)
            with recording(events):
                (run_forward if mode.forward_only else run_schedule)(models, plan, communicator)
            yield mode, events
    finally:
        parallel.stop()
        dist.batch_isend_irecv, dist.new_subgroups_by_enumeration = originals


def _plan(layout: Layout, model: Any, reads_pixels: bool) -> Any:
    from dataclasses import replace

    from mm.batch import BatchTotals, StepPlan
    from tests.microbatches import random_microbatch

    batch = [random_microbatch(model, [(() if number in layout.text_only else ((1, 4, 4),), 20)], number)
             for number in range(layout.num_microbatches)]
    totals = BatchTotals.of(batch, model.vision)
    return StepPlan(tuple(one if reads_pixels else replace(one, pixel_values=None) for one in batch), totals)
