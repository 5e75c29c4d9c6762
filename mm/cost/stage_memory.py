"""The memory of one rank's stage: its chunks over the schedule, and the peak with its states, for a run's longest
microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import le

from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.cost.layer_memory import FP32, WIDTHS
from mm.cost.memory import ChunkMemory, MicrobatchSizes
from mm.cost.model_states import StageSize, block_bytes, build_bytes, chunk_size
from mm.cost.workload import one_stage
from mm.model.recompute import SEGMENT_BYTES
from mm.parallel.order import in_flight, max_sent_ahead
from mm.placement import Placement, StageSpec


@dataclass(frozen=True)
class BucketBuffers:
    """Gradients that exist only while a backward pass fills and reduces them, and weights that are whole only while
    they are used."""

    width: int
    """Bytes of one gradient."""
    num_layers: int
    """Layers whose gradients exist at the same time: 1, or 2 with overlapped reduction."""
    weight_width: int = 0
    """Bytes of one weight; 0 if all are always whole."""
    num_open: int = 1
    """Layers whose weights are whole at the same time: 1, or 2 with overlapped gathers."""

    @classmethod
    def of(cls, run: Run) -> "BucketBuffers | None":
        """None if a rank keeps all gradients."""
        if not run.shards_gradients:
            return None
        width = WIDTHS["bf16"] if run.args.grad_reduce_in_bf16 else FP32
        weight_width = WIDTHS[run.args.precision] if run.shards_weights else 0
        return cls(width, 2 if run.args.overlap_grad_reduce else 1, weight_width,
                   2 if run.args.overlap_param_gather else 1)


@dataclass(frozen=True)
class StageMemory:
    """One rank's memory besides its states, over all of its chunks."""

    chunks: tuple[ChunkMemory, ...]

    @classmethod
    def of(
        cls, model: ModelConfig, placement: Placement, stage: int, tp_size: int, precision: str,
        num_pieces: int = 1, ulysses_size: int = 1, keeps_features: bool = False,
    ) -> "StageMemory":  # fmt: skip
        return cls(tuple(ChunkMemory(model, placement, placement[stage, chunk], tp_size, precision, num_pieces,
                                     ulysses_size, keeps_features) for chunk in range(placement.num_chunks)))

    def in_flight(self, rows: MicrobatchSizes, num_microbatches: int) -> tuple[int, ...]:
        """Number of microbatches, by chunk, whose activations are kept at the schedule's peak."""
        return max(self._moments(num_microbatches),
                   key=lambda counts: (self._kept_bytes(rows, counts, num_microbatches), sum(counts)))

    def _moments(self, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
        placement = self.chunks[0].placement
        return _moments(num_microbatches, self.chunks[0].spec.stage, placement.num_stages, placement.num_chunks)

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
        most = max(sum(chunk.host_bytes(rows, count, num_microbatches)
                       for chunk, count in zip(self.chunks, counts, strict=True))
                   for counts in self._moments(num_microbatches))
        return -(-most // SEGMENT_BYTES) * SEGMENT_BYTES

    def logit_bytes(self, rows: MicrobatchSizes) -> int:
        """Bytes of logits, and of the last layer's passing activations."""
        return max(chunk.logit_bytes(rows) + chunk.passing_bytes(rows) for chunk in self.chunks)

    def working_bytes(self, rows: MicrobatchSizes) -> int:
        return max(chunk.working_bytes(rows) for chunk in self.chunks)

    def buffer_bytes(self, buffers: BucketBuffers) -> tuple[int, int, int]:
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
        self, rows: MicrobatchSizes, num_microbatches: int, state_bytes: int, buffers: BucketBuffers | None = None
    ) -> int:
        """Peak: states, all microbatches in flight, messages sent ahead, and either logits or a running layer.

        ``buffers``: those that exist during the backward pass, if the states hold only shards of the gradients.
        """
        held = self.kept_bytes(rows, num_microbatches) + self.ahead_bytes(rows, num_microbatches)
        return state_bytes + held + sum(self.working_parts(rows, buffers))

    def working_parts(self, rows: MicrobatchSizes, buffers: BucketBuffers | None) -> tuple[int, int]:
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


TEXT, VISUAL, STATED = "text", "visual", "stated"


def longest_microbatches(run: Run) -> dict[str, MicrobatchSizes]:
    """One rank's rows of the longest microbatch, in its two extremes.

    One is all text, every token a target.  The other is all visual tokens, which are never targets.  A mixture needs
    memory between the two.  With ``--dry-run-patches``: one microbatch with that many patches, the rest text.

    Ranks that divide the images get whole ones, so a rank may have one more than its share.
    """
    num_tokens, per_token = run.args.seq_length * run.args.micro_batch_size, run.model.vision.spatial_merge_size**2
    data, patch_pixels = run.data, run.model.vision.patch_size**2
    largest_image = data.image_max_pixels // patch_pixels
    if data.attr.videos is not None:  # a video stays whole, like an image
        num_pairs = -(-data.video_maxlen // run.model.vision.temporal_patch_size)
        largest_image = max(largest_image, num_pairs * data.video_max_pixels // patch_pixels)

    def rows(num_patches: int) -> MicrobatchSizes:
        num_text = num_tokens - num_patches // per_token
        share = -(-num_patches // run.num_encoders) + largest_image
        return MicrobatchSizes(-(-num_tokens // run.cp_size), min(num_patches, share), -(-num_text // run.cp_size))

    if run.args.dry_run_patches is not None:
        return {STATED: rows(run.args.dry_run_patches)}
    return {TEXT: rows(0), VISUAL: rows(num_tokens * per_token)}


def stage_memory(run: Run, placement: Placement, stage: int) -> StageMemory:
    return StageMemory(tuple(_chunk_memory(run, placement, placement[stage, chunk])
                             for chunk in range(placement.num_chunks)))


def _chunk_memory(run: Run, placement: Placement, spec: StageSpec) -> ChunkMemory:
    return ChunkMemory(one_stage(run.model), placement, spec, run.tp_size, run.args.precision, run.num_pieces,
                       1 if run.is_ring else run.cp_size, run.args.vision_feature_cache is not None)


def peaks(run: Run, placement: Placement, sizes: Sequence[StageSize]) -> dict[str, int]:
    """Peak bytes of the largest stage, by kind of microbatch."""
    found = stage_peaks(run, placement, sizes)
    return {kind: max(of_stage[kind] for of_stage in found) for kind in found[0]}


def stage_peaks(run: Run, placement: Placement, sizes: Sequence[StageSize]) -> list[dict[str, int]]:
    """Peak bytes of each stage, by kind of microbatch."""
    kinds = longest_microbatches(run)
    return [{kind: peak_bytes(stage_memory(run, placement, stage), rows, run, size) for kind, rows in kinds.items()}
            for stage, size in enumerate(sizes)]


def peak_bytes(memory: StageMemory, rows: MicrobatchSizes, run: Run, size: StageSize) -> int:
    """Peak bytes of a stage: while it computes, in the update or while it is built, whichever is most."""
    in_update = size.total_bytes + size.update_bytes + block_bytes(run, size)
    in_questions = 0
    if run.shards_weights and run.args.eval_generate_interval is not None:  # besides its cache, which is bounded by it
        in_questions = size.total_bytes + size.num_params * WIDTHS[run.args.precision]
    return max(memory.peak_bytes(rows, run.held_microbatches, size.total_bytes, BucketBuffers.of(run)), in_update,
               in_questions, build_bytes(run, size))


def activation_bytes_on_host(run: Run, placement: Placement) -> list[int]:
    """Host memory for the offloaded activations of one rank of each stage, for the kind of microbatch that needs
    most."""
    memories = [stage_memory(run, placement, stage) for stage in range(placement.num_stages)]
    return [max(memory.host_bytes(rows, run.held_microbatches) for rows in longest_microbatches(run).values())
            for memory in memories]


ChunkSizes = dict[StageSpec, tuple[StageSize, ChunkMemory]]
"""States and other memory of each chunk."""


class PeakMemory:
    """The peak memory of a run's stages for many placements with as many stages and chunks."""

    def __init__(self, run: Run, chunks: ChunkSizes | None = None) -> None:
        """``chunks``: those of runs that differ from ``run`` in lists and microbatches only; new ones are added."""
        self._run, self._kinds = run, tuple(longest_microbatches(run).values())
        self._chunks = {} if chunks is None else chunks
        self._peaks: dict[tuple[StageSpec, ...], int] = {}

    def of_stages(self, placement: Placement) -> list[int]:
        """Peak bytes of one rank of each stage, for the kind of microbatch that needs most."""
        return [self._of_stage(placement, stage) for stage in range(placement.num_stages)]

    def _of_stage(self, placement: Placement, stage: int) -> int:
        specs = tuple(placement[stage, chunk] for chunk in range(placement.num_chunks))
        if specs not in self._peaks:
            for spec in specs:
                if spec not in self._chunks:
                    self._chunks[spec] = chunk_size(self._run, spec), _chunk_memory(self._run, placement, spec)
            size = reduce(StageSize.__add__, (self._chunks[spec][0] for spec in specs))
            memory = StageMemory(tuple(self._chunks[spec][1] for spec in specs))
            self._peaks[specs] = max(peak_bytes(memory, rows, self._run, size) for rows in self._kinds)
        return self._peaks[specs]
