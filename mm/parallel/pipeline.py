"""Messages between pipeline stages, whose shapes are known before the step begins.

Our communicator replaces megatron-core's.  It reads shapes, and which gradients are needed, from the step's plan: no
shapes are exchanged, the loop never waits for the device, and a boundary that carries nothing sends nothing.
"""

import math
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mm.batch import Microbatch, StepPlan
from mm.config.model import ModelConfig
from mm.parallel.activity import Journal, Work
from mm.parallel.checked import MessageError, Transfer, difference
from mm.parallel.context import Context
from mm.parallel.mesh import Mesh
from mm.parallel.order import ChunkPass, backward_order, forward_order, max_sent_ahead
from mm.parallel.pieces import piece_of
from mm.parallel.transport import Arriving, Batch, Handle
from mm.placement import Message, StageSpec
from mm.weights.trained import GradientPath


def message_shape(
    message: Message, microbatch: Microbatch, model: ModelConfig, context: Context
) -> tuple[int, int] | None:
    """[rows, width] of what crosses a boundary for one microbatch; None when nothing crosses.

    Only the rows that this rank holds (``Context``).  A shape with no rows is still a message, but nothing is
    sent for it.
    """
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


def piece_shape(
    message: Message, shape: tuple[int, int] | None, model: ModelConfig, rank: int, num_ranks: int
) -> tuple[int, int] | None:
    """The shape of this tensor-parallel rank's piece of a message under sequence parallelism.

    A piece with no rows is still a message, but nothing is sent for it.  With whole encoders, a rank's images are not
    cut.
    """
    if shape is None or (model.encodes_whole and message is not Message.HIDDEN_STATES):
        return shape
    here = piece_of(shape[0], model.vision.spatial_merge_size**2 if message is Message.PATCHES else 1, rank, num_ranks)
    return here.stop - here.start, shape[1]


class PipelineCommunicator:
    """Point-to-point messages of one stage, in the form that megatron's schedules call.

    The schedules' calls do not name a microbatch and chunk; the communicator knows them from the order of the calls.
    The schedule gets None for a tensor without a gradient, because it keeps what it gets for the backward pass; the
    forward step gets every received tensor from ``take``.

    With ``starts_ahead``, a send also posts the next receive of the same kind, so that message arrives while this stage
    computes.  Activations and gradients each have a group, which runs its batches in order.  An early receive delays
    nothing: the next send in that group depends on what it receives.
    """

    def __init__(
        self, mesh: Mesh, model: ModelConfig, parallel: TransformerConfig, device: torch.device, journal: Journal,
        checks: bool = False, starts_ahead: bool = True,
    ) -> None:
        """``checks``: sender and receiver compare the header of each message; no receive is then posted early."""
        self.starts_ahead = starts_ahead and not checks
        self.leave: Callable[[int, int], None] = lambda *_: None
        """Called with microbatch and chunk when the schedule is past a backward pass, before it waits for anything."""
        # The schedule asks for these by name, for the last four from megatron-core 0.17 on.
        self.pp_group = mesh.groups.pp
        self.config = parallel
        self.virtual_pipeline_model_parallel_size = parallel.virtual_pipeline_model_parallel_size
        self.current_stage, self.total_stages = mesh.pp_rank, mesh.pp_size
        self.is_pp_first_stage, self.is_pp_last_stage = mesh.pp_rank == 0, mesh.pp_rank == mesh.pp_size - 1
        self._gradient_group, self._context = mesh.gradient_group, mesh.context
        self._journal, self._checks = journal, checks
        self._model, self._gradient_path = model, GradientPath.of(model)
        self._dtype = parallel.pipeline_dtype
        self._like = torch.empty(0, dtype=self._dtype, device=device)
        placement = model.placement()
        self._specs = [placement[mesh.pp_rank, chunk] for chunk in range(model.num_chunks)]
        self._num_stages = placement.num_stages
        self._cut = (mesh.tp_rank, mesh.tp_size) if parallel.sequence_parallel else None
        ranks = dist.get_process_group_ranks(self.pp_group)  # the last stage's next is the first, with the next chunk
        self._previous, self._next = ranks[mesh.pp_rank - 1], ranks[(mesh.pp_rank + 1) % mesh.pp_size]
        self._inbox: dict[ChunkPass, Arriving] = {}
        self._activations: deque[Tensor | None] = deque()
        """What the schedule gets for each receive: the tensor if it needs a gradient, else None."""
        self._gradients: deque[Arriving] = deque()
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()
        self._microbatches: tuple[Microbatch, ...] = ()
        self._expected: dict[str, deque[ChunkPass]] = {}
        self._has_turned = False
        self._most_in_flight = 0
        self._latest: tuple[Transfer, ...] = ()
        # NCCL and HCCL require that all ranks of a group take part in its first use; a message has only two.
        context = [mesh.context.group] if mesh.cp_size > 1 else []  # where a ring's ranks send each other keys
        for group in dict.fromkeys((self.pp_group, self._gradient_group, *context)):
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def begin(self, plan: StepPlan, forward_only: bool = False) -> None:
        """Start a step."""
        num_chunks, num_stages = len(self._specs), self.pp_group.size()
        forward = forward_order(len(plan.microbatches), num_stages, num_chunks)
        backward = [] if forward_only else backward_order(forward)
        # The last stage's activations go to the first stage as the next chunk's, and gradients back the same way.
        around = [(microbatch, chunk + 1) for microbatch, chunk in forward if chunk + 1 < num_chunks]
        around_back = [(microbatch, chunk - 1) for microbatch, chunk in backward if chunk > 0]
        self._microbatches = plan.microbatches
        self._expected = {
            "recv_forward": deque(around if self.is_pp_first_stage else forward),
            "send_forward": deque(forward),
            "recv_backward": deque(around_back if self.is_pp_last_stage else backward),
            "send_backward": deque(backward),
        }
        self._has_turned = False
        self._most_in_flight = num_stages if forward_only else max_sent_ahead(num_stages, num_chunks)

    def end(self) -> None:
        """Wait until every send of this step is done; nothing may be left to receive or to take."""
        left = [name for name, passes in self._expected.items() if passes]
        is_empty = not (left or self._inbox or self._activations or self._gradients)
        assert is_empty, f"the step ended with messages left: {left}, {list(self._inbox)}, {list(self._gradients)}"
        if self._in_flight:
            with self._journal.during(Work.EXCHANGE):
                while self._in_flight:
                    self._in_flight.popleft()[0].wait()

    def take(self, microbatch: int, chunk: int) -> Tensor | None:
        """The message for the next forward step; None if its boundary carries nothing."""
        is_start = self.is_pp_first_stage and chunk == 0
        return None if is_start else self._wait_for(self._inbox.pop((microbatch, chunk)))

    # The calls of megatron's schedule without chunks.  The arguments that we ignore are shapes.

    def recv_forward(self, _: object, is_first_stage: bool) -> "Tensor | list[Tensor | None] | None":
        return self._answer(None if is_first_stage else self._next_activation())

    def send_forward(self, outputs: list[Tensor], _: bool) -> None:
        self._start(outputs[0], send_forward=True, recv_forward=self._asks_ahead("recv_forward"))

    def recv_backward(self, _: object, is_last_stage: bool) -> "Tensor | list[Tensor | None] | None":
        return self._answer(None if is_last_stage else self._next_gradient())

    def send_backward(self, gradients: list[Tensor | None], _: bool) -> None:
        self._start(None, gradients[0], send_backward=True, recv_backward=self._asks_ahead("recv_backward"))

    def send_forward_recv_backward(
        self, outputs: list[Tensor], _: object, is_last_stage: bool
    ) -> list[Tensor | None]:
        self._start(outputs[0], send_forward=True, recv_forward=self._asks_ahead("recv_forward"),
                    recv_backward=self._must_ask("recv_backward"))  # fmt: skip
        return [self._next_gradient()]

    def send_backward_recv_forward(
        self, gradients: list[Tensor | None], _: object, is_first_stage: bool
    ) -> list[Tensor | None]:
        self._start(None, gradients[0], send_backward=True, recv_backward=self._asks_ahead("recv_backward"),
                    recv_forward=self._must_ask("recv_forward"))  # fmt: skip
        return [self._next_activation()]

    def _must_ask(self, call: str) -> bool:
        """Whether there is a next message of this kind whose receive has not been posted yet."""
        has_begun = self._activations if call == "recv_forward" else self._gradients
        return not has_begun and bool(self._expected[call])

    def _asks_ahead(self, call: str) -> bool:
        return self.starts_ahead and self._must_ask(call)

    def _next_activation(self) -> Tensor | None:
        if self._must_ask("recv_forward"):
            self._start(recv_forward=True)
        return self._activations.popleft() if self._activations else None

    def _next_gradient(self) -> Tensor | None:
        if self._must_ask("recv_backward"):
            self._start(recv_backward=True)
        return self._wait_for(self._gradients.popleft()) if self._gradients else None

    # The calls of megatron's schedule with chunks: after a forward step, after a backward step, and after one of each.
    # The schedule says whether to receive.  With ``overlap_p2p_comm`` it gets handles to wait for; activations have
    # none, because ``take`` waits for them.
    # ``_has_turned``: (1) the last call of the warm-up already asks for the first gradient; (2) it is the first of the
    # step's calls that could send one: ``send_backward_recv_backward`` with overlap, the call below it without;
    # (3) no backward step has run yet, so that first call sends no gradient, and all later calls do.

    def send_forward_recv_forward(
        self, output: Tensor | None, recv_prev: bool, tensor_shape: object, overlap_p2p_comm: bool = False
    ) -> "Tensor | tuple[Tensor | None, dict[str, Handle]] | None":
        self._start(output, send_forward=True, recv_forward=recv_prev)
        arriving = self._activations.popleft() if recv_prev else None
        return (arriving, {}) if overlap_p2p_comm else arriving

    def send_backward_recv_backward(
        self, gradient: Tensor | None, recv_next: bool, tensor_shape: object, overlap_p2p_comm: bool = False
    ) -> "Tensor | tuple[Tensor | None, dict[str, Handle]] | None":
        """With overlap, the first call of a step ends the warm-up and sends nothing (see ``_has_turned`` above)."""
        has_turned = self._has_turned or not overlap_p2p_comm
        self._has_turned = True
        self._start(None, gradient, send_backward=has_turned, recv_backward=recv_next)
        if not overlap_p2p_comm:
            return self._wait_for(self._gradients.popleft()) if recv_next else None
        if not recv_next:
            return None, {}
        arriving = self._gradients.popleft()
        return arriving.tensor, {"recv_next": Handle(partial(self._wait_for, arriving))}

    def send_forward_backward_recv_forward_backward(
        self, output: Tensor | None, gradient: Tensor | None, recv_prev: bool, recv_next: bool, tensor_shape: object
    ) -> tuple[Tensor | None, Tensor | None]:
        """Without overlap, the first call of a step ends the warm-up and sends no gradient."""
        has_turned, self._has_turned = self._has_turned, True
        self._start(
            output, gradient, send_forward=True, send_backward=has_turned, recv_forward=recv_prev,
            recv_backward=recv_next,
        )  # fmt: skip
        arriving = self._activations.popleft() if recv_prev else None
        return arriving, self._wait_for(self._gradients.popleft()) if recv_next else None

    def _answer(self, tensor: Tensor | None) -> "Tensor | list[Tensor | None] | None":
        """``tensor`` in the form that the schedule expects: in a list for the schedule without chunks."""
        return [tensor] if len(self._specs) == 1 else tensor

    def _start(
        self,
        output: Tensor | None = None,
        gradient: Tensor | None = None,
        send_forward: bool = False,
        send_backward: bool = False,
        recv_forward: bool = False,
        recv_backward: bool = False,
    ) -> None:
        """Start all parts of one call together; receives go to ``_inbox``, ``_activations`` and ``_gradients``."""
        if send_backward:
            self.leave(*self._expected["send_backward"][0])
        activations, gradients, arrived = Batch(self.pp_group), Batch(self._gradient_group), None
        if send_forward:
            due = self._due("send_forward")
            if due.shape is not None:
                assert output is not None and output.shape == due.shape and output.dtype == self._dtype, (output, due)
            # detach: the schedule frees the output's storage through its own tensor, not through ours
            activations.send(due, None if due.shape is None or output is None else output.detach())
        if recv_forward:
            due = self._due("recv_forward")
            spec, microbatch = self._at((due.microbatch, due.chunk))
            self._inbox[due.microbatch, due.chunk] = received = activations.receive(due, self._room_for(due))
            arrived = received.tensor if self._gradient_path.leaves(spec, bool(microbatch.image_grids)) else None
            self._activations.append(arrived)
        if send_backward:
            due = self._due("send_backward")
            assert due.shape is None or gradient is not None, "a gradient flows back, but the backward pass made none"
            gradients.send(due, None if due.shape is None else gradient)
        if recv_backward:
            due = self._due("recv_backward")
            self._gradients.append(gradients.receive(due, self._room_for(due)))
        self._latest = tuple(due for batch in (activations, gradients) for due, _ in batch.transfers)
        with self._journal.during(Work.EXCHANGE):
            if self._checks:
                self._check(activations, gradients)
            self._run(activations, gradients)
        if arrived is not None:
            arrived.requires_grad_()

    def _room_for(self, due: Transfer) -> Tensor | None:
        return None if due.shape is None else self._like.new_empty(due.shape)

    def _wait_for(self, arriving: Arriving) -> Tensor | None:
        """Wait for a message and return it: on an accelerator the stream waits, on the CPU the host."""
        if arriving.works:
            self._latest = (arriving.due,)
            with self._journal.during(Work.EXCHANGE, arriving.due.chunk, arriving.due.microbatch):
                for work in arriving.works:
                    work.wait()
        return arriving.tensor

    def latest_messages(self) -> list[str]:
        """The messages of the latest exchange, as text for a report."""
        return [due.text(self._dtype) for due in self._latest if due.shape is not None]

    def _due(self, call: str) -> Transfer:
        """The next message of one of the four kinds."""
        microbatch, chunk = chunk_pass = self._expected[call].popleft()
        spec, contents = self._at(chunk_pass)
        is_sent, is_gradient = call.startswith("send"), call.endswith("backward")
        is_before = is_sent == is_gradient  # the boundary before the chunk, else the one after it
        message, step = (spec.receives, -1) if is_before else (spec.sends, 1)
        crosses = not is_gradient or (
            self._gradient_path.leaves(spec, bool(contents.image_grids)) if is_before else
            self._gradient_path.comes_back(spec, bool(contents.image_grids)))
        return Transfer(
            is_sent,
            is_gradient,
            microbatch,
            chunk,
            boundary=chunk * self._num_stages + spec.stage + (not is_before),
            peer=self._previous if is_before else self._next,
            peer_stage=(spec.stage + step) % self._num_stages,
            shape=self._shape(message, contents) if crosses else None,
            samples=contents.samples,
        )

    def _check(self, *batches: Batch) -> None:
        """Exchange a header for each message and compare; raises MessageError.

        Boundaries that carry nothing have a header too; the two ends of the model have none.
        """
        ends, headers, received = (0, self._num_stages * len(self._specs)), [], []
        for batch in batches:
            headers.append(Batch(batch.group))
            for due, tensor in batch.transfers:
                if due.boundary not in ends:
                    expected = due.header(tensor)
                    found = self._like.new_tensor(expected, dtype=torch.int64)
                    if due.is_sent:
                        headers[-1].send(due, found)
                    else:
                        received.append((headers[-1].receive(due, found), expected, found))
        self._run(*headers)
        stage = self._specs[0].stage
        for arriving, *_ in received:
            self._wait_for(arriving)
        problems = [difference(arriving.due, stage, expected, found.tolist()) for arriving, expected, found in received]
        if found := [problem for problem in problems if problem]:
            raise MessageError("\n".join(found))

    def _at(self, chunk_pass: ChunkPass) -> tuple[StageSpec, Microbatch]:
        microbatch, chunk = chunk_pass
        return self._specs[chunk], self._microbatches[microbatch]

    def _shape(self, message: Message, microbatch: Microbatch) -> tuple[int, int] | None:
        shape = message_shape(message, microbatch, self._model, self._context)
        return piece_shape(message, shape, self._model, *self._cut) if self._cut else shape

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
