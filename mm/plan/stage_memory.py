"""Formulas for the memory of one rank's stage besides its states: its chunks, over the schedule.

Pure arithmetic; ``mm.plan.memory`` has the formulas of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import le

from mm.config.model import ModelConfig
from mm.model.host_activations import SEGMENT_BYTES
from mm.parallel.order import in_flight, max_sent_ahead
from mm.placement import Placement
from mm.plan.memory import ChunkMemory, MicrobatchSizes


@dataclass(frozen=True)
class UnitBuffers:
    """Gradients that exist only while a backward pass fills and reduces them (``mm.parallel.sharded``), and weights
    that are whole only while they are used (``mm.parallel.weight_shards``)."""

    width: int
    """Bytes of one gradient."""
    num_layers: int
    """Layers whose gradients exist at the same time: 1, or 2 with overlapped reduction."""
    weight_width: int = 0
    """Bytes of one weight; 0 if all are always whole."""
    num_open: int = 1
    """Layers whose weights are whole at the same time: 1, or 2 with overlapped gathers."""


@dataclass(frozen=True)
class StageMemory:
    """One rank's memory besides its states, over all of its chunks."""

    chunks: tuple[ChunkMemory, ...]

    @classmethod
    def of(
        cls, model: ModelConfig, placement: Placement, stage: int, tp_size: int, precision: str,
        num_pieces: int = 1, ulysses_size: int = 1, keeps_features: bool = False,
    ) -> "StageMemory":  # fmt: skip
        specs = [placement[stage, chunk] for chunk in range(placement.num_chunks)]
        return cls(tuple(
            ChunkMemory(model, placement, spec, tp_size, precision, num_pieces, ulysses_size, keeps_features)
            for spec in specs))

    def in_flight(self, rows: MicrobatchSizes, num_microbatches: int) -> tuple[int, ...]:
        """Number of microbatches, by chunk, whose activations are kept at the schedule's peak."""
        placement = self.chunks[0].placement
        moments = _moments(num_microbatches, self.chunks[0].spec.stage, placement.num_stages, placement.num_chunks)
        return max(moments, key=lambda counts: (self._kept_bytes(rows, counts, num_microbatches), sum(counts)))

    def _kept_bytes(self, rows: MicrobatchSizes, counts: Sequence[int], num_microbatches: int) -> int:
        """Bytes of activations with ``counts`` microbatches in flight."""
        return sum(chunk.kept_bytes(rows, count, num_microbatches)
                   for chunk, count in zip(self.chunks, counts, strict=True))

    def kept_bytes(self, rows: MicrobatchSizes, num_microbatches: int) -> int:
        """Bytes of activations at the schedule's peak, and of what is already allocated for the next microbatch."""
        counts = self.in_flight(rows, num_microbatches)
        is_last = sum(counts) == num_microbatches * len(self.chunks)
        coming = 0 if is_last else max(chunk.coming_bytes(rows, num_microbatches) for chunk in self.chunks)
        return self._kept_bytes(rows, counts, num_microbatches) + coming

    def host_bytes(self, rows: MicrobatchSizes, num_microbatches: int) -> int:
        """Bytes of activations in host memory, in whole segments, at the moment of the schedule with most of them."""
        placement = self.chunks[0].placement
        moments = _moments(num_microbatches, self.chunks[0].spec.stage, placement.num_stages, placement.num_chunks)
        most = max(sum(chunk.host_bytes(rows, count, num_microbatches)
                       for chunk, count in zip(self.chunks, counts, strict=True)) for counts in moments)
        return -(-most // SEGMENT_BYTES) * SEGMENT_BYTES

    def logit_bytes(self, rows: MicrobatchSizes) -> int:
        """Bytes of logits, and of the last layer's passing activations."""
        return max(chunk.logit_bytes(rows) + chunk.passing_bytes(rows) for chunk in self.chunks)

    def working_bytes(self, rows: MicrobatchSizes) -> int:
        return max(chunk.working_bytes(rows) for chunk in self.chunks)

    def buffer_bytes(self, buffers: UnitBuffers) -> tuple[int, int, int]:
        """Bytes of the gradients and weights that exist with logits, with a running layer, and with the word embedding.
        """
        chunks, width, num_layers = self.chunks, buffers.width, buffers.num_layers
        weight_width, num_open = buffers.weight_width, buffers.num_open
        at_layers = (_at_a_layer(one, num_layers) for one in chunks)
        at_embedding = (one.embedding_gradients + one.layer_gradients * (num_layers - 1) for one in chunks
                        if one.embedding_gradients)
        opened = (max(one.head_weights + one.layer_weights * (num_open - 1) for one in chunks),
                  max(one.layer_weights * num_open for one in chunks),
                  max(one.embedding_weights + one.layer_weights * (num_open - 1) for one in chunks))
        return (width * max(one.head_gradients for one in chunks) + weight_width * opened[0],
                width * max(at_layers) + weight_width * opened[1],
                max(width * max(at_embedding, default=0), weight_width * opened[2]))

    def ahead_bytes(self, rows: MicrobatchSizes, num_microbatches: int) -> int:
        """Bytes of messages that a slow next stage has not received: the most that may be in flight, and the next."""
        placement = self.chunks[0].placement
        most = max_sent_ahead(placement.num_stages, placement.num_chunks) + 1
        messages = [one for chunk in self.chunks for one in [chunk.ahead_bytes(rows)] * min(num_microbatches, most)]
        return sum(sorted(messages)[-most:])

    def peak_bytes(
        self, rows: MicrobatchSizes, num_microbatches: int, state_bytes: int, buffers: UnitBuffers | None = None
    ) -> int:
        """Peak: states, all microbatches in flight, messages sent ahead, and either logits or a running layer.

        ``buffers``: those that exist during the backward pass, if the states hold only shards of the gradients.
        """
        held = self.kept_bytes(rows, num_microbatches) + self.ahead_bytes(rows, num_microbatches)
        return state_bytes + held + sum(self.working_parts(rows, buffers))

    def working_parts(self, rows: MicrobatchSizes, buffers: UnitBuffers | None) -> tuple[int, int]:
        """The most that logits, a running layer or the word embedding need: bytes of their own work, and of gradients
        and weights that exist only then."""
        at_logits, at_layer, at_embedding = (0, 0, 0) if buffers is None else self.buffer_bytes(buffers)
        moments = (self.logit_bytes(rows), at_logits), (self.working_bytes(rows), at_layer), (0, at_embedding)
        return max(moments, key=sum)


def _at_a_layer(chunk: ChunkMemory, num_layers: int) -> int:
    """Elements whose gradients exist during the backward pass of a layer: its own, and with overlapped reduction those
    of the unit before, which may be the output layer.  A tied output layer keeps its gradients until the end."""
    if chunk.shares_embedding:
        return chunk.layer_gradients * num_layers + chunk.head_gradients
    return chunk.layer_gradients + max(chunk.layer_gradients, chunk.head_gradients) * (num_layers - 1)


@cache
def _moments(num_microbatches: int, stage: int, num_stages: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Microbatches in flight, by chunk, at the moments of the schedule; without moments at which no chunk has more than
    at some other moment."""
    found = dict.fromkeys(in_flight(num_microbatches, stage, num_stages, num_chunks))
    return tuple(one for one in found if not any(
        other != one and all(map(le, one, other)) for other in found))
