"""What one rank exchanges in a step besides the pipeline: bytes to other ranks with the same weights, and to its host.

Pure arithmetic; nothing is measured.  A reduce-scatter or an all-gather sends all bytes but a rank's own share, and an
all-reduce is both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mm.config.run import Run
from mm.plan.layer_memory import WIDTHS
from mm.plan.memory import MicrobatchSizes
from mm.plan.sizes import StageSize, gathered_params, num_optimizer_shards
from mm.plan.stage_memory import StageMemory


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one rank in a step."""

    gradient_bytes: int
    """Sent while gradients are summed."""
    weight_bytes: int
    """Sent while weights are gathered."""
    host_bytes: int
    """Sent to host memory; as many come back."""

    @classmethod
    def of(
        cls, run: Run, size: StageSize, memory: StageMemory, kinds: Sequence[MicrobatchSizes], num_microbatches: int
    ) -> "StepBytes":
        """For a rank of the stage with this ``size`` and ``memory``.  ``kinds``: the longest microbatches; the one that
        sends most to the host counts.  Every microbatch is assumed to have images."""
        activations = max(sum(chunk.offloaded_bytes(rows) for chunk in memory.chunks) for rows in kinds)
        gradients, weights = _of_copies(run, size, num_microbatches)
        return cls(gradients + _of_encoders(run, size), weights, size.host_bytes + num_microbatches * activations)


def _of_encoders(run: Run, size: StageSize) -> int:
    """Tensor-parallel ranks all-reduce the gradients of whole encoders; with sharded states, each its shard."""
    return 2 * size.whole_gradient_bytes // num_optimizer_shards(run) * (run.tp_size - 1) // run.tp_size


def _of_copies(run: Run, size: StageSize, num_microbatches: int) -> tuple[int, int]:
    def sent(num_bytes: int) -> int:
        return num_bytes * (run.num_copies - 1) // run.num_copies

    if not run.args.splits_optimizer:
        return 2 * sent(size.reduced_bytes), 0
    reduced = sent(size.reduced_bytes) * (num_microbatches if run.shards_gradients else 1)
    width = WIDTHS[run.args.precision]
    if run.shards_weights:
        return reduced, num_microbatches * sent(width * sum(gathered_params(run)))
    return reduced, sent(width * size.num_trainable_params)
