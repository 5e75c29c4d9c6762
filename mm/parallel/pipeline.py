"""Messages between pipeline stages, of shapes that are known before the step begins.

Our communicator takes the place of megatron-core's: it reads shapes and gradient needs from the step's plan, so there
is no shape exchange and no wait for the device in the loop, and a boundary that carries nothing exchanges nothing.
"""

from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mm.batch import Microbatch, StepPlan
from mm.config.model import ModelConfig
from mm.parallel.mesh import Mesh
from mm.placement import Message


def message_shape(message: Message, microbatch: Microbatch, model: ModelConfig) -> tuple[int, int] | None:
    """[rows, width] of what crosses a boundary for one microbatch; None when nothing crosses."""
    match message:
        case Message.NOTHING:
            return None
        case Message.PATCHES:
            rows, width = microbatch.num_patches, model.vision.hidden_size
        case Message.VISUAL_TOKENS:
            rows, width = microbatch.num_patches // model.vision.spatial_merge_size**2, model.language.hidden_size
        case Message.HIDDEN_STATES:
            rows, width = microbatch.num_tokens, model.language.hidden_size
    return (rows, width) if rows else None


class PipelineCommunicator:
    """Point-to-point messages of one stage, in the form that megatron's schedules call.

    The schedule calls each direction once per microbatch, in order; the communicator counts along.  Tensors without
    a gradient are handed to the schedule as None, because it keeps what it is given for the backward pass; the
    forward step takes every received tensor from ``take``.
    """

    def __init__(self, mesh: Mesh, model: ModelConfig, parallel: TransformerConfig, device: torch.device) -> None:
        self.pp_group = mesh.groups.pp  # the schedule asks for these two by name
        self.config = parallel
        self._placement, self._model = model.placement(), model
        self._dtype, self._device = parallel.pipeline_dtype, device
        spec = self._placement[mesh.pp_rank]
        self._receives, self._sends = spec.receives, spec.sends
        ranks = dist.get_process_group_ranks(self.pp_group)
        self._previous = ranks[mesh.pp_rank - 1] if mesh.pp_rank > 0 else None
        self._next = ranks[mesh.pp_rank + 1] if mesh.pp_rank < mesh.pp_size - 1 else None
        self._inbox: deque[Tensor | None] = deque()
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()
        self._microbatches: dict[str, Iterator[Microbatch]] = {}
        # On NCCL and HCCL the first use of a group must be by all of its ranks, which a message is not.
        dist.all_reduce(torch.zeros(1, device=device), group=self.pp_group)

    def begin(self, plan: StepPlan) -> None:
        """Start a step."""
        assert not self._inbox, "the last step left messages that no forward step took"
        self._microbatches = {
            name: iter(plan.microbatches) for name in ("recv_forward", "send_forward", "recv_backward", "send_backward")
        }

    def end(self) -> None:
        """Wait until everything sent in this step has left."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()

    def take(self) -> Tensor | None:
        """The message that the coming forward step works on; None when its boundary carried nothing."""
        return self._inbox.popleft()

    # The six calls of megatron's schedule.  The arguments we ignore are shapes and whether this is an end stage.

    def recv_forward(self, _: object, __: bool) -> list[Tensor | None]:
        return self._receive_forward(*self._exchange(recv_forward=True))

    def send_forward(self, outputs: list[Tensor], _: bool) -> None:
        self._exchange(output=outputs[0])

    def recv_backward(self, _: object, __: bool) -> list[Tensor | None]:
        return [self._exchange(recv_backward=True)[1]]

    def send_backward(self, gradients: list[Tensor | None], _: bool) -> None:
        self._exchange(gradient=gradients[0], send_backward=True)

    def send_forward_recv_backward(self, outputs: list[Tensor], _: object, __: bool) -> list[Tensor | None]:
        return [self._exchange(output=outputs[0], recv_backward=True)[1]]

    def send_backward_recv_forward(self, gradients: list[Tensor | None], _: object, __: bool) -> list[Tensor | None]:
        return self._receive_forward(*self._exchange(gradient=gradients[0], send_backward=True, recv_forward=True))

    def _receive_forward(self, received: Tensor | None, _: Tensor | None, needs_gradient: bool) -> list[Tensor | None]:
        if needs_gradient:
            assert received is not None
            received.requires_grad_()
        self._inbox.append(received)
        return [received if needs_gradient else None]

    def _exchange(
        self,
        output: Tensor | None = None,
        gradient: Tensor | None = None,
        send_backward: bool = False,
        recv_forward: bool = False,
        recv_backward: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, bool]:
        """Start all parts of one call together, wait for what is received.

        Returns the activation from the previous stage, the gradient from the next, and whether the activation needs
        a gradient.
        """
        operations, sent, activation, output_gradient, needs_gradient = [], [], None, None, False
        if output is not None:
            microbatch = next(self._microbatches["send_forward"])
            if (shape := message_shape(self._sends, microbatch, self._model)) is not None:
                assert output.shape == shape and output.dtype == self._dtype, (output.shape, output.dtype, shape)
                # detach: the schedule frees the output's storage through the tensor that it holds, not through ours
                sent.append(output.detach().contiguous())
                operations.append(dist.P2POp(dist.isend, sent[-1], self._next, self.pp_group))
        if recv_forward:
            microbatch = next(self._microbatches["recv_forward"])
            if (shape := message_shape(self._receives, microbatch, self._model)) is not None:
                activation = torch.empty(shape, dtype=self._dtype, device=self._device)
                operations.append(dist.P2POp(dist.irecv, activation, self._previous, self.pp_group))
                needs_gradient = self._placement.gradient_flows(self._receives, bool(microbatch.image_grids))
        if send_backward:
            microbatch = next(self._microbatches["send_backward"])
            if self._gradient_shape(self._receives, microbatch) is not None:
                assert gradient is not None, "the plan says a gradient flows back, but the backward pass made none"
                sent.append(gradient.contiguous())
                operations.append(dist.P2POp(dist.isend, sent[-1], self._previous, self.pp_group))
        if recv_backward:
            microbatch = next(self._microbatches["recv_backward"])
            if (shape := self._gradient_shape(self._sends, microbatch)) is not None:
                output_gradient = torch.empty(shape, dtype=self._dtype, device=self._device)
                operations.append(dist.P2POp(dist.irecv, output_gradient, self._next, self.pp_group))
        self._run(operations, sent)
        return activation, output_gradient, needs_gradient

    def _gradient_shape(self, message: Message, microbatch: Microbatch) -> tuple[int, int] | None:
        if not self._placement.gradient_flows(message, bool(microbatch.image_grids)):
            return None
        return message_shape(message, microbatch, self._model)

    def _run(self, operations: list[dist.P2POp], sent: list[Tensor]) -> None:
        """Issue as one batch; wait for receives, and keep what is sent alive until it has left.

        With gloo, only waiting for a send shows that it has left.  A neighbour is never more than a pipeline's depth of
        messages behind in either direction, so waiting for one twice that old never holds both sides up.
        """
        while self._in_flight and (
            self._in_flight[0][0].is_completed() or len(self._in_flight) > 4 * self.pp_group.size()
        ):
            self._in_flight.popleft()[0].wait()
        if not operations:
            return
        works = dist.batch_isend_irecv(operations)
        if len(works) != len(operations):  # one work for the whole batch, as NCCL gives
            works[0].wait()
            return
        sending = iter(sent)
        for operation, work in zip(operations, works, strict=True):
            if operation.op is dist.isend:
                self._in_flight.append((work, next(sending)))
            else:
                work.wait()
