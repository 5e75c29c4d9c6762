"""Messages between pipeline stages, whose shapes are known before the step begins.

The communicator reads shapes, and which gradients are needed, from the step's plan: no shapes are exchanged, the loop
never waits for the device, and a boundary that carries nothing sends nothing.  megatron-core's own exchanges a shape
before each message and waits for the device.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mm.batch import Microbatch, StepPlan, samples_text
from mm.config.model import ModelConfig
from mm.parallel.activity import Journal, Work
from mm.parallel.context import Context, row_shard
from mm.parallel.mesh import Mesh
from mm.parallel.pipeline_schedule import Step, max_sent_ahead, stage_receives, stage_steps
from mm.placement import Message
from mm.weights.trained import GradientPath


@dataclass(frozen=True)
class Transfer:
    """One message that this rank sends or receives; its ``shape`` is None if the boundary carries nothing."""

    is_sent: bool
    is_gradient: bool
    microbatch: int
    chunk: int
    boundary: int
    """The slot that receives activations over it, and sends gradients back."""
    peer: int
    peer_stage: int
    shape: tuple[int, int] | None
    samples: tuple[int, ...]

    def text(self, dtype: torch.dtype) -> str:
        verb, way = ("sends", "to") if self.is_sent else ("waits for", "from")
        what = "gradient" if self.is_gradient else "activation"
        shape = "nothing" if self.shape is None else f"{list(self.shape)} {str(dtype).removeprefix('torch.')}"
        return (f"{verb} the {what} of microbatch {self.microbatch} between slots {self.boundary - 1} and "
                f"{self.boundary} {way} rank {self.peer} (stage {self.peer_stage}), {shape}"
                f"{samples_text(self.samples)}")


@dataclass
class Arriving:
    """A posted receive, or a message that carries nothing."""

    due: Transfer
    tensor: Tensor | None
    works: list[dist.Work] = field(default_factory=list)
    """What to wait for; empty where nothing moves."""


class Batch:
    """Messages of one process group that start together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.operations: list[dist.P2POp] = []
        self.transfers: list[tuple[Transfer, Tensor | None]] = []
        """Every message with its tensor, including those that carry nothing."""
        self.group = group
        self._receiving: dict[int, Arriving] = {}

    def send(self, due: Transfer, tensor: Tensor | None) -> None:
        self._add(due, None if tensor is None else tensor.contiguous())

    def receive(self, due: Transfer, tensor: Tensor | None) -> Arriving:
        """``tensor``: to receive into; None if the message carries nothing."""
        arriving = Arriving(due, tensor)
        if self._add(due, tensor):
            self._receiving[len(self.operations) - 1] = arriving
        return arriving

    def _add(self, due: Transfer, tensor: Tensor | None) -> bool:
        """Returns whether anything moves."""
        self.transfers.append((due, tensor))
        if tensor is None or not tensor.numel():
            return False
        self.operations.append(dist.P2POp(dist.isend if due.is_sent else dist.irecv, tensor, due.peer, self.group))
        return True

    def start(self) -> list[tuple[dist.Work, Tensor]]:
        """Start all operations.  Returns the tensors being sent, each with its handle."""
        works = dist.batch_isend_irecv(self.operations) if self.operations else []
        if len(works) < len(self.operations):  # NCCL and HCCL return one for all
            works *= len(self.operations)
        for number, arriving in self._receiving.items():
            arriving.works.append(works[number])
        return [(work, operation.tensor) for number, (work, operation) in enumerate(zip(
            works, self.operations, strict=True)) if number not in self._receiving]


def message_shape(
    message: Message, microbatch: Microbatch, model: ModelConfig, context: Context
) -> tuple[int, int] | None:
    """[rows that this rank holds, width] of what crosses a boundary for one microbatch; None when nothing crosses."""
    if message is Message.NOTHING:
        return None
    if message is Message.HIDDEN_STATES:
        return context.num_tokens(microbatch), model.language.hidden_size
    num_patches = sum(map(math.prod, context.image_grids(microbatch)))
    if not num_patches:
        return None
    if message is Message.PATCHES:
        return None if microbatch.skips_vision else (num_patches, model.vision.hidden_size)
    return num_patches // model.vision.spatial_merge_size**2, model.language.hidden_size


def shard_shape(
    message: Message, shape: tuple[int, int] | None, model: ModelConfig, rank: int, num_ranks: int
) -> tuple[int, int] | None:
    """The shape of a tensor-parallel rank's shard under sequence parallelism; images of whole encoders stay whole."""
    if shape is None or (model.encodes_whole and message is not Message.HIDDEN_STATES):
        return shape
    here = row_shard(shape[0], model.vision.spatial_merge_size**2 if message is Message.PATCHES else 1, rank, num_ranks)
    return here.stop - here.start, shape[1]


class PipelineCommunicator:
    """The messages of one stage, when ``mm.parallel.pipeline_schedule`` says.  Activations and gradients each have a
    group, which runs its batches in order."""

    def __init__(
        self, mesh: Mesh, model: ModelConfig, parallel: TransformerConfig, device: torch.device, journal: Journal,
        starts_ahead: bool = True,
    ) -> None:
        self._starts_ahead = starts_ahead
        self._stage, self._num_stages, self._num_chunks = mesh.pp_rank, mesh.pp_size, model.num_chunks
        self._activation_group, self._gradient_group = mesh.groups.pp, mesh.gradient_group
        self._context, self._journal = mesh.context, journal
        self._model, self._gradient_path = model, GradientPath.of(model)
        self._dtype = parallel.pipeline_dtype
        self._like = torch.empty(0, dtype=self._dtype, device=device)
        placement = model.placement()
        self._specs = [placement[mesh.pp_rank, chunk] for chunk in range(model.num_chunks)]
        self._tp_shard = (mesh.tp_rank, mesh.tp_size) if parallel.sequence_parallel else None
        ranks = dist.get_process_group_ranks(mesh.groups.pp)  # the last stage's next is the first, with the next chunk
        self._previous, self._next = ranks[mesh.pp_rank - 1], ranks[(mesh.pp_rank + 1) % mesh.pp_size]
        self._microbatches: tuple[Microbatch, ...] = ()
        self._steps: list[Step] = []
        self._receives: list[list[Step]] = []
        """By number of the step before which they begin."""
        self._number = 0
        """Passes of the step that have ended; also the place of the next one in ``_steps``."""
        self._inbox: dict[Step, Arriving] = {}
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()
        self._most_in_flight = 0
        self._latest: tuple[Transfer, ...] = ()
        # NCCL and HCCL require that all ranks of a group take part in its first use; a message has only two.
        context = [mesh.context.group] if mesh.cp_size > 1 else []  # where a ring's ranks send each other keys
        for group in dict.fromkeys((self._activation_group, self._gradient_group, *context)):
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def begin(self, plan: StepPlan, forward_only: bool = False) -> list[Step]:
        """Start a step: returns its passes on this stage, in their order."""
        sizes = len(plan.microbatches), self._stage, self._num_stages, self._num_chunks
        self._microbatches, self._number = plan.microbatches, 0
        self._steps = stage_steps(*sizes, forward_only)
        self._receives = stage_receives(self._steps, *sizes[1:], self._starts_ahead)
        self._most_in_flight = self._num_stages if forward_only else max_sent_ahead(self._num_stages, self._num_chunks)
        self._start(None)
        return self._steps

    def take(self, step: Step) -> Tensor | None:
        """The message for the next pass: an activation, or the gradient of its output.  None if its boundary carries
        nothing.  An activation whose gradient is sent back requires one."""
        arriving = self._inbox.pop(step, None)
        if arriving is None:
            return None  # the model's first input, or the loss
        tensor = self._wait_for(arriving)
        is_forward, (microbatch, chunk) = step
        if tensor is not None and is_forward and self._gives_back(microbatch, chunk):
            tensor.requires_grad_()
        return tensor

    def give(self, step: Step, made: Tensor | None) -> None:
        """Send what a pass has made, its output or the gradient of its input, and begin to receive what comes next."""
        assert step == self._steps[self._number], f"{step} ends in place of {self._steps[self._number]}"
        self._number += 1
        self._start(step, made)

    def end(self) -> None:
        """Wait until every send of this step is done; nothing may be left to receive or to take."""
        left = self._steps[self._number :]
        assert not (left or self._inbox), f"the step ended with passes or messages left: {left}, {list(self._inbox)}"
        self._microbatches = ()  # they may hold pixels
        if self._in_flight:
            with self._journal.during(Work.EXCHANGE):
                while self._in_flight:
                    self._in_flight.popleft()[0].wait()

    def latest_messages(self) -> list[str]:
        """Those of the latest exchange, for a report."""
        return [due.text(self._dtype) for due in self._latest if due.shape is not None]

    def _start(self, step: Step | None, made: Tensor | None = None) -> None:
        """Start together what ``step`` sends and all that is due to be received now."""
        batches = {True: Batch(self._activation_group), False: Batch(self._gradient_group)}
        if step is not None and (due := self._due(step, is_sent=True)) is not None:
            sent = None
            if due.shape is not None:
                assert made is not None and (made.shape, made.dtype) == (due.shape, self._dtype), (made, due)
                sent = made.detach()  # the loop frees the output's storage through its own tensor, not through ours
            batches[step[0]].send(due, sent)
        for awaited in self._receives[self._number]:
            if (due := self._due(awaited, is_sent=False)) is not None:
                room = None if due.shape is None else self._like.new_empty(due.shape)
                self._inbox[awaited] = batches[awaited[0]].receive(due, room)
        if transfers := tuple(due for batch in batches.values() for due, _ in batch.transfers):
            self._latest = transfers
            with self._journal.during(Work.EXCHANGE):
                self._run(*batches.values())

    def _wait_for(self, arriving: Arriving) -> Tensor | None:
        """Wait for a message and return it: on an accelerator the stream waits, on the CPU the host."""
        if arriving.works:
            self._latest = (arriving.due,)
            with self._journal.during(Work.EXCHANGE, arriving.due.chunk, arriving.due.microbatch):
                for work in arriving.works:
                    work.wait()
        return arriving.tensor

    def _due(self, step: Step, is_sent: bool) -> Transfer | None:
        """The message that a pass sends or waits for; None at the ends of the model."""
        is_forward, (microbatch, chunk) = step
        spec, contents = self._specs[chunk], self._microbatches[microbatch]
        is_before = is_sent != is_forward  # the boundary before the chunk, else the one after it
        boundary = chunk * self._num_stages + self._stage + (not is_before)
        if boundary in (0, self._num_stages * self._num_chunks):
            return None
        message = spec.receives if is_before else spec.sends
        crosses = is_forward or (self._gives_back(microbatch, chunk) if is_before else
                                 self._gradient_path.comes_back(spec, bool(contents.image_grids)))
        return Transfer(
            is_sent, not is_forward, microbatch, chunk, boundary, peer=self._previous if is_before else self._next,
            peer_stage=(self._stage + (-1 if is_before else 1)) % self._num_stages,
            shape=self._shape(message, contents) if crosses else None, samples=contents.samples)

    def _gives_back(self, microbatch: int, chunk: int) -> bool:
        """Whether the gradient of a chunk's input is sent to the stage before."""
        return self._gradient_path.leaves(self._specs[chunk], bool(self._microbatches[microbatch].image_grids))

    def _shape(self, message: Message, microbatch: Microbatch) -> tuple[int, int] | None:
        shape = message_shape(message, microbatch, self._model, self._context)
        return shard_shape(message, shape, self._model, *self._tp_shard) if self._tp_shard else shape

    def _run(self, *batches: Batch) -> None:
        """Start each batch; wait for the oldest sends only while more than ``_most_in_flight`` are in flight.

        A send keeps its tensor alive until it is done; gloo reports that only to a wait.  The wait cannot deadlock:

        1. A neighbour that sends gradients back is behind by at most half the limit (``max_sent_ahead``), so it has
           already asked for the message that this stage waits for.
        2. A neighbour that sends none can fall behind further.  This stage then waits for it.  It never waits for this
           stage, only for earlier steps of the schedule: other stages' messages and other replicas' reductions.
        3. In a forward-only step with chunks the stages form a ring: the last sends to the first.  The first asks for
           a message ``num_stages`` - 1 messages later, which is within the limit of ``num_stages``.
        """
        limit = self._most_in_flight
        while self._in_flight and (self._in_flight[0][0].is_completed() or len(self._in_flight) > limit):
            self._in_flight.popleft()[0].wait()
        for batch in batches:
            self._in_flight += batch.start()
