"""The loop of a step: every pass of this stage in the order of ``mm.parallel.pipeline_schedule``, with its messages."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor
from torch import Tensor

from mm.batch import Microbatch, StepPlan, encoder_batches_of
from mm.parallel.activity import Journal, Work
from mm.parallel.pipeline.p2p import PipelineCommunicator
from mm.parallel.pipeline_schedule import ChunkPass, Step
from mm.parallel.zero.gradient_shards import ShardedGradients


def run_schedule(
    models: Sequence[DistributedDataParallel], plan: StepPlan, communicator: PipelineCommunicator,
    scale: Callable[[Tensor], Tensor] | None = None, leave: Callable[[int, int], None] | None = None,
) -> Tensor:  # fmt: skip
    """Forward and backward of every microbatch.  ``models`` are the chunks of this rank.

    Returns this rank's sum of weighted token losses as a detached fp32 scalar on the device: zero on ranks without
    the head.  Summed over data-parallel ranks it is the loss of the global batch.  ``scale`` is applied to each loss
    before its backward pass (fp16); ``leave`` is called with microbatch and chunk when the loop is past a backward
    pass, before it waits for anything.
    """
    chunks: list[Any] = [model.module for model in models]  # mm.model.stage.Chunk, which stands above this floor
    total = torch.zeros((), dtype=torch.float32, device=chunks[0].device.torch_device)
    for model in models:
        if model.ddp_config.overlap_param_gather:
            for group in reversed(model.bucket_groups):  # first used, first gathered; the forward hooks wait for them
                group.start_param_sync()
    steps = communicator.begin(plan)
    passes = _Passes(_Forward(models, plan, steps, communicator, forward_only=False), communicator, total, scale, leave)
    with ExitStack() as outer:
        # with overlap, a chunk's gradients are reduced during its last backward pass
        no_sync = [outer.enter_context(ExitStack()) for _ in models]
        for stack, model in zip(no_sync, models, strict=True):
            stack.enter_context(model.no_sync())
        last = {chunk: place for place, (is_forward, (_, chunk)) in enumerate(steps) if not is_forward}
        for place, step in enumerate(steps):
            is_forward, (_, chunk) = step
            if is_forward:
                passes.run_forward(step)
                continue
            if place == last[chunk]:
                no_sync[chunk].close()
            passes.run_backward(step)
    communicator.end()
    passes.forward.end()
    return total


@torch.no_grad()
def run_forward(
    models: Sequence[DistributedDataParallel], plan: StepPlan, communicator: PipelineCommunicator
) -> Tensor:
    """Forward of every microbatch only; weights that are gathered with overlap must have arrived already.

    Returns fp32 [num_microbatches] on the device: each microbatch's sum of token losses over the tokens that this rank
    of the context axis holds; zeros on ranks without the head.
    """
    chunks: list[Any] = [model.module for model in models]
    losses = torch.zeros(len(plan.microbatches), dtype=torch.float32, device=chunks[0].device.torch_device)
    steps = communicator.begin(plan, forward_only=True)
    forward = _Forward(models, plan, steps, communicator, forward_only=True)
    for step in steps:
        _, (microbatch, chunk) = step
        _, output = forward(microbatch, chunk)
        if chunks[chunk].spec.has_head:
            losses[microbatch].copy_(output)
        communicator.give(step, output)
    communicator.end()
    forward.end()
    return losses


class _Forward:

    def __init__(
        self, models: Sequence[DistributedDataParallel], plan: StepPlan, steps: Sequence[Step],
        communicator: PipelineCommunicator, forward_only: bool,
    ) -> None:  # fmt: skip
        self._models, self._communicator, self._forward_only = models, communicator, forward_only
        self.chunks: list[Any] = [model.module for model in models]
        self._inputs = _Inputs(self.chunks, plan, [one for is_forward, one in steps if is_forward], forward_only)
        self.end = self._inputs.end

    def __call__(self, microbatch: int, chunk: int) -> tuple[Tensor | None, Tensor]:
        """What the pass received, and its output."""
        model: Any = self._models[chunk]
        received = self._communicator.take((True, (microbatch, chunk)))
        own = self._inputs.take(microbatch, chunk)
        if isinstance(model, ShardedGradients) and not (self._forward_only and model.weight_shards is None):
            model.start(microbatch, own.images)
        journal: Journal = self.chunks[chunk].journal
        with journal.during(Work.FORWARD, chunk, microbatch):
            output = model(own, received)
        self._inputs.prepare_next()
        return received if received is not None and received.requires_grad else None, output


class _Passes:
    """The passes of a training step: methods, so that nothing of a pass outlives it except what its backward needs."""

    def __init__(
        self, forward: _Forward, communicator: PipelineCommunicator, total: Tensor,
        scale: Callable[[Tensor], Tensor] | None, leave: Callable[[int, int], None] | None,
    ) -> None:  # fmt: skip
        self.forward, self._communicator, self._total = forward, communicator, total
        self._scale, self._leave = scale, leave
        self._kept: dict[ChunkPass, tuple[Tensor | None, Tensor]] = {}

    def run_forward(self, step: Step) -> None:
        _, (microbatch, chunk) = step
        received, output = self.forward(microbatch, chunk)
        self._kept[microbatch, chunk] = received, output
        has_head = self.forward.chunks[chunk].spec.has_head
        if has_head:
            self._total.add_(output.detach())
        self._communicator.give(step, output)
        deallocate_output_tensor(output, not has_head)

    def run_backward(self, step: Step) -> None:
        _, (microbatch, chunk) = step
        gradient, (received, output) = self._communicator.take(step), self._kept.pop((microbatch, chunk))
        if output.requires_grad:
            if gradient is None and self._scale is not None:
                output = self._scale(output)
            with self.forward.chunks[chunk].journal.during(Work.BACKWARD, chunk, microbatch):
                custom_backward(output, gradient)
        if self._leave is not None:
            self._leave(microbatch, chunk)
        self._communicator.give(step, None if received is None else received.grad)


class _Inputs:
    """The inputs of a rank's forward steps besides messages, prepared while the device runs the step before."""

    def __init__(self, chunks: Sequence[Any], plan: StepPlan, passes: Sequence[ChunkPass], sums: bool) -> None:
        """``sums``: see ``mm.model.prepare.Preparation``."""
        self._chunks, self._plan, self._side, self._sums = chunks, plan, chunks[0].side, sums
        self._passes = deque(passes)
        self._prepared: deque[tuple[ChunkPass, Any]] = deque()
        self._encoded_with: dict[int, tuple[Microbatch, ...]] = {}
        for batch in encoder_batches_of(plan.microbatches, chunks[0].model.encoder_batch_size):
            members = tuple(plan.microbatches[number] for number in batch)
            self._encoded_with |= dict.fromkeys(batch, members)

    def take(self, microbatch: int, chunk: int) -> Any:
        """The inputs of the next forward step, ready on the device."""
        if not self._prepared:  # the first: its copy overlaps the last step's update
            self.prepare_next()
        chunk_pass, inputs = self._prepared.popleft()
        assert chunk_pass == (microbatch, chunk), f"{chunk_pass} was prepared for {(microbatch, chunk)}"
        self._side.join()
        self._side.record_event()
        return inputs

    def prepare_next(self) -> None:
        """Call when a forward step is queued, while its inputs are alive (``SideStream.after_event`` requires it)."""
        if self._passes:
            microbatch, chunk = chunk_pass = self._passes.popleft()
            module = self._chunks[chunk]
            with module.journal.during(Work.INPUTS, chunk, microbatch), self._side.after_event():
                inputs = module.prepare(
                    self._plan.microbatches[microbatch], self._plan.totals, self._plan.dropout_seed, self._sums,
                    encoded_with=self._encoded_with.get(microbatch, ()))
                self._prepared.append((chunk_pass, inputs))

    def end(self) -> None:
        assert not self._passes and not self._prepared, "the step ended with forward steps left"
        self._side.record_event()
