"""The memory of one rank's stage: its states, its chunks' activations over the schedule, and the peak of both."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache, reduce
from operator import add, le

from mm.config.args import Arguments
from mm.config.run import Run
from mm.cost.layer_memory import FP32, WIDTHS, params_by_place, params_of
from mm.cost.memory import ChunkMemory, MicrobatchSizes
from mm.cost.workload import one_stage
from mm.device.pointwise import ROUNDED_AT_ONCE
from mm.model.recompute import SEGMENT_BYTES
from mm.parallel.pipeline_schedule import in_flight, max_sent_ahead
from mm.placement import Placement, StageSpec
from mm.weights.table import Place, model_weights, owns, stage_weights
from mm.weights.trained import GradientPath

KEPT_COPY_BYTES = {"fp32": FP32, "remainder": 2, "none": 0}
"""Bytes kept beside a trained weight in 16 bits, by ``Arguments.kept_copy``."""


def num_model_params(run: Run) -> int:
    """Parameters of the whole model, each counted once: no adapters, no padding, no second copy of a tied embedding."""
    return sum(math.prod(weight.shape) for weight in model_weights(run.model.base))


def state_widths(args: Arguments) -> tuple[int, int]:
    """Bytes per trained parameter: those kept beside the weight, and those of both moments."""
    copy_width = KEPT_COPY_BYTES[args.kept_copy] if args.precision != "fp32" else 0
    return copy_width, WIDTHS[args.exp_avg_dtype] + WIDTHS[args.exp_avg_sq_dtype]


def offloaded(sizes: Sequence[int], share: float) -> list[int]:
    """Indices of the weights with states in host memory: the largest first that fit into ``share`` of all elements."""
    left, chosen = round(share * sum(sizes)), list[int]()
    for index in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        if sizes[index] <= left:
            chosen.append(index)
            left -= sizes[index]
    return sorted(chosen)


@dataclass(frozen=True)
class StageSize:
    """States of one rank of a stage.  Frozen weights have neither gradients nor optimizer state."""

    num_params: int
    num_trainable_params: int
    weight_bytes: int
    gradient_bytes: int
    """fp32, unless they are reduced in bf16; shards of gradients are always fp32."""
    copy_bytes: int
    """What is kept beside 16-bit weights: fp32 copies or remainders."""
    moment_bytes: int
    """Adam's two moments."""
    host_bytes: int
    """Copies and moments in host memory; those on the device do not include them."""
    reduced_bytes: int
    """Gradients as they are reduced over the ranks with the same weights."""
    num_buckets: int
    """Layers and other blocks with trained weights; sharded gradients are reduced block by block."""
    whole_gradient_bytes: int
    """Gradients that tensor-parallel ranks also sum, without shards: of encoders that each of them holds whole."""
    update_bytes: int
    """fp32 copies of bf16 gradients, which exist only in the update, without activations."""

    @property
    def optimizer_bytes(self) -> int:
        return self.copy_bytes + self.moment_bytes

    @property
    def total_bytes(self) -> int:
        """All on the device."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    def __add__(self, other: "StageSize") -> "StageSize":
        return StageSize(*map(add, astuple(self), astuple(other)))

    def divided(self, count: int) -> "StageSize":
        """The size of one of ``count`` equal stages that hold this together, rounded down."""
        return StageSize(*(number // count for number in astuple(self)))


def stage_sizes(run: Run, placement: Placement) -> list[StageSize]:
    """Size of one rank of each stage: the sum over its chunks."""
    return [reduce(StageSize.__add__, (chunk_size(run, placement[stage, chunk]) for chunk in range(run.num_chunks)))
            for stage in range(run.num_stages)]


def chunk_size(run: Run, spec: StageSpec) -> StageSize:
    """Parameters and bytes of ``spec`` on one rank: its tensor-parallel shard, with padding in memory."""
    model = one_stage(run.model)
    counts = [one for (place, layer), one in params_by_place(model, run.tp_size).items() if owns(spec, place, layer)]
    copies = [weight for weight in stage_weights(model, spec) if weight.is_tied_copy] if model.language.tied else []
    counts.append(params_of(copies, model, run.tp_size))
    num_params, num_trainable, num_whole = map(sum, zip(*counts, strict=True))
    reduced_width = WIDTHS["bf16"] if run.args.grad_reduce_in_bf16 else FP32
    kept_width = FP32 if run.shards_gradients else reduced_width
    copy_width, moments_width = state_widths(run.args)
    num_shards, host_share = num_optimizer_shards(run), run.args.host_share

    def of_states(width: int, share: float) -> int:
        return math.ceil(num_trainable * width * share / num_shards)

    return StageSize(
        num_params=num_params,
        num_trainable_params=num_trainable,
        weight_bytes=-(-num_params * WIDTHS[run.args.precision] // (num_shards if run.shards_weights else 1)),
        gradient_bytes=-(-num_trainable * kept_width // (num_shards if run.shards_gradients else 1)),
        reduced_bytes=num_trainable * reduced_width,
        num_buckets=sum(one[1] > 0 for one in counts),
        whole_gradient_bytes=num_whole * kept_width,
        copy_bytes=of_states(copy_width, 1 - host_share),
        moment_bytes=of_states(moments_width, 1 - host_share),
        host_bytes=of_states(copy_width + moments_width, host_share),
        update_bytes=-(-num_trainable * FP32 // num_shards) if kept_width < FP32 else 0,
    )



def num_optimizer_shards(run: Run) -> int:
    """Ranks over which the optimizer's states are divided."""
    return run.num_copies if run.args.splits_optimizer else 1


def gathered_params(run: Run) -> list[int]:
    """If weights are sharded: the parameters of each gather in the two passes of a microbatch with images.

    Each layer and other block is gathered for its forward pass, and again for its backward pass if it has one.  The
    output layer stays open between the two, and the word embedding's backward pass reads no weights.
    """
    model = one_stage(run.model)
    path, sizes = GradientPath.of(model), params_by_place(model, run.tp_size)
    found: list[int] = []
    for (place, layer), (num_params, _, _) in sizes.items():
        if place is Place.HEAD and model.language.tied:
            num_params, _, _ = sizes[Place.EMBEDDING, None]
        is_again = place not in (Place.EMBEDDING, Place.HEAD) and path.flows_through(place, layer)
        found += [num_params] * (1 + is_again)
    return found


def block_bytes(run: Run, size: StageSize) -> int:
    """Bytes that the update needs for one block of states in 16 bits or in host memory.

    These are the block's states in fp32, and temporaries of rounding or splitting one of them.  Of states in host
    memory, two blocks are on the device at a time.
    """
    first, second = (WIDTHS[dtype] < FP32 for dtype in (run.args.exp_avg_dtype, run.args.exp_avg_sq_dtype))
    copy = run.args.kept_copy
    salts_and_result = FP32 + WIDTHS["bf16"]
    once_more = max(WIDTHS["bf16"] * second, salts_and_result * (copy == "none"), 2 * FP32 * (copy == "remainder"))
    num_elements = min(ROUNDED_AT_ONCE, -(-size.num_trainable_params // num_optimizer_shards(run)))
    passing = 2 * sum(state_widths(run.args)) if run.args.host_share else 0
    return num_elements * (FP32 * (first + second + (copy != "fp32")) + once_more + passing)


def build_bytes(run: Run, size: StageSize) -> int:
    """Bytes that a stage needs while it is built: megatron's distributed optimizer copies the trained weights."""
    is_copied = run.args.splits_optimizer and not run.shards_gradients
    copied = size.num_trainable_params * WIDTHS[run.args.precision] if is_copied else 0
    return size.weight_bytes + size.gradient_bytes + copied


@dataclass(frozen=True)
class BucketBuffers:
    """Sharded gradients and weights that are whole at a time: widths in bytes, and numbers of layers."""

    width: int
    """Bytes of one gradient."""
    num_layers: int
    """Layers whose gradients are whole at a time: 1, or 2 with overlapped reduction."""
    weight_width: int = 0
    """Bytes of one weight; 0 if all are always whole."""
    num_open: int = 1
    """Layers whose weights are whole at a time: 1, or 2 with overlapped gathers."""

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
        """Bytes of whole gradients and weights at the logits, at a running layer, and at the word embedding."""
        chunks, width, weight_width = self.chunks, buffers.width, buffers.weight_width
        more_layers, more_open = buffers.num_layers - 1, buffers.num_open - 1
        at_embedding = (one.embedding.trained + one.layer.trained * more_layers for one in chunks
                        if one.embedding.trained)
        return (width * max(one.head.trained for one in chunks)
                + weight_width * max(one.head.total + one.layer.total * more_open for one in chunks),
                width * max(_at_a_layer(one, buffers.num_layers) for one in chunks)
                + weight_width * max(one.layer.total * buffers.num_open for one in chunks),
                max(width * max(at_embedding, default=0),
                    weight_width * max(one.embedding.total + one.layer.total * more_open for one in chunks)))

    def ahead_bytes(self, rows: MicrobatchSizes, num_microbatches: int) -> int:
        """Bytes of messages that a slow next stage has not received: the most that may be in flight, and the next."""
        placement = self.chunks[0].placement
        most = max_sent_ahead(placement.num_stages, placement.num_chunks) + 1
        messages = [one for chunk in self.chunks for one in [chunk.ahead_bytes(rows)] * min(num_microbatches, most)]
        return sum(sorted(messages)[-most:])

    def peak_bytes(
        self, rows: MicrobatchSizes, num_microbatches: int, state_bytes: int, buffers: BucketBuffers | None = None
    ) -> int:
        """Peak: states, microbatches in flight, messages sent ahead, and logits, a running layer or buckets."""
        held = self.kept_bytes(rows, num_microbatches) + self.ahead_bytes(rows, num_microbatches)
        return state_bytes + held + sum(self.working_parts(rows, buffers))

    def working_parts(self, rows: MicrobatchSizes, buffers: BucketBuffers | None) -> tuple[int, int]:
        """The most that logits, a running layer or the word embedding need: bytes of their work, and of buckets."""
        at_logits, at_layer, at_embedding = (0, 0, 0) if buffers is None else self.buffer_bytes(buffers)
        moments = (self.logit_bytes(rows), at_logits), (self.working_bytes(rows), at_layer), (0, at_embedding)
        return max(moments, key=sum)


def _at_a_layer(chunk: ChunkMemory, num_layers: int) -> int:
    """Elements whose gradients exist during the backward pass of a layer.

    With overlapped reduction, those of the bucket before are among them, which may be the output layer.  A tied output
    layer keeps its gradients until the end.
    """
    if chunk.shares_embedding:
        return chunk.layer.trained * num_layers + chunk.head.trained
    return chunk.layer.trained + max(chunk.layer.trained, chunk.head.trained) * (num_layers - 1)


@cache
def _moments(num_microbatches: int, stage: int, num_stages: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Microbatches in flight, by chunk, at the moments of the schedule that no other moment exceeds in every chunk."""
    found = dict.fromkeys(in_flight(num_microbatches, stage, num_stages, num_chunks))
    return tuple(one for one in found if not any(
        other != one and all(map(le, one, other)) for other in found))


TEXT, VISUAL, STATED = "text", "visual", "stated"


def longest_microbatches(run: Run) -> dict[str, MicrobatchSizes]:
    """One rank's rows of the longest microbatch in its two extremes, or of one with ``--dry-run-patches``.

    One extreme is all text, every token a target; the other all visual tokens, which are never targets.  A mixture
    needs memory between the two.  Ranks that divide the images get whole ones, so one may have one more than its share.
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
    """Host memory for the offloaded activations of a rank of each stage, for the microbatches that need most."""
    return [max(stage_memory(run, placement, stage).host_bytes(rows, run.held_microbatches)
                for rows in longest_microbatches(run).values()) for stage in range(placement.num_stages)]


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
