"""One step through the pipeline's schedule: forward and backward of every microbatch, then the gradients' reduction
(``mm.parallel.reduction``); or forward alone, for validation.

megatron-core's schedules run the loop, over our communicator.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from torch import Tensor

from mm.batch import Microbatch, StepPlan, encoder_batches_of
from mm.parallel.activity import Journal, Work
from mm.parallel.megatron import settings_of_schedule
from mm.parallel.mesh import Mesh
from mm.parallel.order import ChunkPass, forward_order, group_size
from mm.parallel.pipeline import PipelineCommunicator
from mm.parallel.sharded import ShardedGradients


def run_schedule(
    models: Sequence[DistributedDataParallel], plan: StepPlan, communicator: PipelineCommunicator, mesh: Mesh
) -> Tensor:
    """Forward and backward of every microbatch, then gradient reduction.  ``models`` are the chunks of this rank.

    Returns this rank's sum of weighted token losses as a detached fp32 scalar on the device: zero on ranks without
    the head.  Summed over data-parallel ranks it is the loss of the global batch.
    """
    chunks: list[Any] = [model.module for model in models]  # mm.model.stage.Chunk, which stands above this floor
    total = torch.zeros((), dtype=torch.float32, device=chunks[0].device.torch_device)
    for model in models:
        if model.ddp_config.overlap_param_gather:
            for group in reversed(model.bucket_groups):  # first used, first gathered; the forward hooks wait for them
                group.start_param_sync()
    _run(models, plan, communicator, mesh, lambda _, loss: total.add_(loss))
    return total


@torch.no_grad()
def run_forward(
    models: Sequence[DistributedDataParallel], plan: StepPlan, communicator: PipelineCommunicator, mesh: Mesh
) -> Tensor:
    """Forward of every microbatch only; weights that are gathered with overlap must have arrived already.

    Returns fp32 [num_microbatches] on the device: each microbatch's sum of token losses over the tokens that this rank
    of the context axis holds; zeros on ranks without the head.
    """
    chunks: list[Any] = [model.module for model in models]
    losses = torch.zeros(len(plan.microbatches), dtype=torch.float32, device=chunks[0].device.torch_device)
    _run(models, plan, communicator, mesh, lambda number, loss: losses[number].copy_(loss), forward_only=True)
    return losses


def _run(
    models: Sequence[DistributedDataParallel], plan: StepPlan, communicator: PipelineCommunicator, mesh: Mesh,
    keep_loss: Callable[[int, Tensor], object], forward_only: bool = False,
) -> None:
    """megatron's schedule for this layout; ``keep_loss`` is given each microbatch's number and loss."""
    chunks: list[Any] = [model.module for model in models]
    journal: Journal = chunks[0].journal
    num_microbatches = len(plan.microbatches)
    inputs = _Inputs(chunks, plan, forward_order(num_microbatches, mesh.pp_size, len(chunks)), forward_only)

    def forward_step(
        numbers: Iterator[int], wrapped: DistributedDataParallel
    ) -> tuple[Tensor, object]:
        chunk: Any = wrapped.module
        number = next(numbers)
        place = chunk.spec.chunk, number
        received = communicator.take(number, chunk.spec.chunk) if mesh.pp_size > 1 else None
        own = inputs.take(number, chunk.spec.chunk)
        if isinstance(wrapped, ShardedGradients) and not (forward_only and wrapped.weight_shards is None):
            wrapped.start(number, own.images)
        with journal.during(Work.FORWARD, *place):
            output = wrapped(own, received)
        inputs.prepare_next()
        journal.follow_backward(output, *place)
        if chunk.spec.has_head:
            keep_loss(number, output.detach())
        return output, _loss_is_output

    arguments: dict[str, Any] = {
        "forward_step_func": forward_step,
        "data_iterator": [iter(range(num_microbatches)) for _ in models],
        "model": list(models),
        "num_microbatches": num_microbatches,
        "seq_length": 1,  # shapes come from the plan
        "micro_batch_size": 1,
        "pg_collection": mesh.groups,
        "forward_only": forward_only,
    }
    interleaves = len(models) > 1
    size = group_size(num_microbatches, mesh.pp_size) if interleaves else None
    with settings_of_schedule(chunks[0].config, size, interleaves and communicator.starts_ahead, forward_only):
        if mesh.pp_size == 1:
            forward_backward_no_pipelining(**arguments)
        else:
            communicator.begin(plan, forward_only)
            schedule = (forward_backward_pipelining_with_interleaving if interleaves
                        else forward_backward_pipelining_without_interleaving)
            arguments["p2p_communicator"] = communicator  # has only the methods that the schedules call
            schedule(**arguments)
            communicator.end()
    inputs.end()


class _Inputs:
    """The inputs of a rank's forward steps, besides messages: prepared while the device runs the step before."""

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
        self._side.mark()
        return inputs

    def prepare_next(self) -> None:
        """Called when a forward step is queued, while its inputs are alive (``SideQueue.behind_mark`` requires it)."""
        if self._passes:
            microbatch, chunk = chunk_pass = self._passes.popleft()
            module = self._chunks[chunk]
            with module.journal.during(Work.INPUTS, chunk, microbatch), self._side.behind_mark():
                inputs = module.prepare(
                    self._plan.microbatches[microbatch], self._plan.totals, self._plan.dropout_seed, self._sums,
                    encoded_with=self._encoded_with.get(microbatch, ()))
                self._prepared.append((chunk_pass, inputs))

    def end(self) -> None:
        assert not self._passes and not self._prepared, "the step ended with forward steps left"
        self._side.mark()


def _loss_is_output(output: Tensor) -> tuple[Tensor, Tensor, dict]:
    """megatron's loss function: the stage's output is already the loss, divided by the global batch's total."""
    return output, torch.zeros((), dtype=torch.int, device=output.device), {}
