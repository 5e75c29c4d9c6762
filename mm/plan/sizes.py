"""How large the stages of a run are: their states, and their peak memory.

Sizes come from the weight table, the placement and the formulas of ``mm.plan.memory``; nothing is measured.
"""

import math
from dataclasses import astuple, dataclass
from functools import reduce
from operator import add

from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.device.pointwise import ROUNDED_AT_ONCE
from mm.placement import Placement, StageSpec
from mm.plan.layer_memory import FP32, WIDTHS
from mm.plan.lists import one_stage
from mm.plan.memory import ChunkMemory, MicrobatchSizes
from mm.plan.params import params_by_place, params_of
from mm.plan.stage_memory import StageMemory, UnitBuffers
from mm.plan.states import state_widths
from mm.weights.placed import owns, stage_weights
from mm.weights.table import Place, model_weights
from mm.weights.trained import GradientPath


@dataclass(frozen=True)
class StageSize:
    """States of one rank of a stage.  Frozen weights have neither gradients nor optimizer state.

    The copy of weights in bf16 or fp16 is fp32, unless ``--store-param-remainders`` or ``--main-params-dtype`` say
    otherwise, and so are the two Adam moments unless ``--exp-avg-dtype`` and ``--exp-avg-sq-dtype`` do.  Gradients are
    fp32 unless they are reduced in bf16; shards of gradients are always fp32.  ``mm.plan.states`` says which states
    are in host memory: their share of all is within one small weight of what the flags say.
    """

    num_params: int
    num_trainable_params: int
    weight_bytes: int
    gradient_bytes: int
    copy_bytes: int
    """What is kept beside 16-bit weights: fp32 copies or remainders."""
    moment_bytes: int
    """Adam's two moments."""
    host_bytes: int
    """Copies and moments in host memory; those on the device do not include them."""
    reduced_bytes: int
    """Gradients as they are reduced over the ranks with the same weights."""
    num_units: int
    """Layers and other blocks with trained weights, which are reduced one by one if gradients are sharded."""
    whole_gradient_bytes: int
    """Gradients that tensor-parallel ranks also sum, without shards: of encoders that each of them holds whole."""
    update_bytes: int
    """fp32 copies of bf16 gradients.  They exist only in the update, without activations, and are not states."""

    @property
    def optimizer_bytes(self) -> int:
        """The optimizer's states on the device."""
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


def chunk_size(run: Run, spec: StageSpec) -> StageSize:
    """Parameters and bytes of ``spec`` on one rank: its tensor-parallel shard, with padding in memory."""
    num_params, num_trainable, num_whole, num_units = _num_params(one_stage(run.model), run.tp_size, spec)
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
        num_units=num_units,
        whole_gradient_bytes=num_whole * kept_width,
        copy_bytes=of_states(copy_width, 1 - host_share),
        moment_bytes=of_states(moments_width, 1 - host_share),
        host_bytes=of_states(copy_width + moments_width, host_share),
        update_bytes=-(-num_trainable * FP32 // num_shards) if kept_width < FP32 else 0,
    )


def num_optimizer_shards(run: Run) -> int:
    """Ranks over which the optimizer's states are divided."""
    return run.num_copies if run.args.splits_optimizer else 1


def unit_buffers(run: Run) -> UnitBuffers | None:
    """The memory of units while they are used; None if a rank keeps all gradients."""
    if not run.shards_gradients:
        return None
    width = WIDTHS["bf16"] if run.args.grad_reduce_in_bf16 else FP32
    weight_width = WIDTHS[run.args.precision] if run.shards_weights else 0
    return UnitBuffers(width, 2 if run.args.overlap_grad_reduce else 1, weight_width,
                       2 if run.args.overlap_param_gather else 1)


def block_bytes(run: Run, size: StageSize) -> int:
    """Bytes that the update needs for one block of states in 16 bits or in host memory: the block's states in fp32, and
    temporaries of rounding or splitting one of them.  Of states in host memory, two blocks are on the device at a time.

    Not counted: some int64 numbers per element where rounding is not compiled to one kernel.
    """
    first, second = (WIDTHS[dtype] < FP32 for dtype in (run.args.exp_avg_dtype, run.args.exp_avg_sq_dtype))
    copy = run.args.kept_copy
    salts_and_result = FP32 + WIDTHS["bf16"]
    once_more = max(WIDTHS["bf16"] * second, salts_and_result * (copy == "none"), 2 * FP32 * (copy == "remainder"))
    num_elements = min(ROUNDED_AT_ONCE, -(-size.num_trainable_params // num_optimizer_shards(run)))
    passing = 2 * sum(state_widths(run.args)) if run.args.host_share else 0
    return num_elements * (FP32 * (first + second + (copy != "fp32")) + once_more + passing)


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


def _num_params(model: ModelConfig, tp_size: int, spec: StageSpec) -> tuple[int, int, int, int]:
    """``params_of`` the weights of ``spec``, summed, and the number of its blocks with trained weights."""
    counts = [one for (place, layer), one in params_by_place(model, tp_size).items() if owns(spec, place, layer)]
    copies = [weight for weight in stage_weights(model, spec) if weight.is_tied_copy] if model.language.tied else []
    counts.append(params_of(copies, model, tp_size))
    num_params, num_trainable, num_whole = map(sum, zip(*counts, strict=True))
    return num_params, num_trainable, num_whole, sum(one[1] > 0 for one in counts)


def stage_sizes(run: Run, placement: Placement) -> list[StageSize]:
    """Size of one rank of each stage: the sum over its chunks."""
    return [reduce(StageSize.__add__, (chunk_size(run, placement[stage, chunk]) for chunk in range(run.num_chunks)))
            for stage in range(run.num_stages)]


def num_model_params(run: Run) -> int:
    """Parameters of the whole model, each counted once: no adapters, no padding, no second copy of a tied embedding."""
    return sum(math.prod(weight.shape) for weight in model_weights(run.model.base))


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
            chunks = [self._chunk(placement, spec) for spec in specs]
            size = reduce(StageSize.__add__, (size for size, _ in chunks))
            memory = StageMemory(tuple(chunk for _, chunk in chunks))
            self._peaks[specs] = max(peak_bytes(memory, rows, self._run, size) for rows in self._kinds)
        return self._peaks[specs]

    def _chunk(self, placement: Placement, spec: StageSpec) -> tuple[StageSize, ChunkMemory]:
        if spec not in self._chunks:
            self._chunks[spec] = chunk_size(self._run, spec), _chunk_memory(self._run, placement, spec)
        return self._chunks[spec]


def peaks(run: Run, placement: Placement, sizes: list[StageSize]) -> dict[str, int]:
    """Peak bytes of the largest stage, by kind of microbatch."""
    found = stage_peaks(run, placement, sizes)
    return {kind: max(of_stage[kind] for of_stage in found) for kind in longest_microbatches(run)}


def stage_peaks(run: Run, placement: Placement, sizes: list[StageSize]) -> list[dict[str, int]]:
    """Peak bytes of each stage, by kind of microbatch."""
    kinds = longest_microbatches(run)
    return [{kind: peak_bytes(stage_memory(run, placement, stage), rows, run, size) for kind, rows in kinds.items()}
            for stage, size in enumerate(sizes)]


def activation_bytes_on_host(run: Run, placement: Placement) -> list[int]:
    """Host memory for the offloaded activations of one rank of each stage, for the kind of microbatch that needs
    most."""
    memories = [stage_memory(run, placement, stage) for stage in range(placement.num_stages)]
    return [max(memory.host_bytes(rows, run.held_microbatches) for rows in longest_microbatches(run).values())
            for memory in memories]


def peak_bytes(memory: StageMemory, rows: MicrobatchSizes, run: Run, size: StageSize) -> int:
    """Peak bytes of a stage: while it computes, in the update or while it is built, whichever is most."""
    in_update = size.total_bytes + size.update_bytes + block_bytes(run, size)
    in_questions = 0
    if run.shards_weights and run.args.eval_generate_interval is not None:  # besides its cache, which is bounded by it
        in_questions = size.total_bytes + size.num_params * WIDTHS[run.args.precision]
    return max(memory.peak_bytes(rows, run.held_microbatches, size.total_bytes, unit_buffers(run)), in_update,
               in_questions, build_bytes(run, size))


def build_bytes(run: Run, size: StageSize) -> int:
    """What a stage needs while it is built, if that may be more than it keeps: megatron's distributed optimizer copies
    the trained weights into one buffer beside the gradients, before there are optimizer states."""
    is_copied = run.args.splits_optimizer and not run.shards_gradients
    copied = size.num_trainable_params * WIDTHS[run.args.precision] if is_copied else 0
    return size.weight_bytes + size.gradient_bytes + copied


def stage_memory(run: Run, placement: Placement, stage: int) -> StageMemory:
    return StageMemory(tuple(_chunk_memory(run, placement, placement[stage, chunk])
                             for chunk in range(placement.num_chunks)))


def _chunk_memory(run: Run, placement: Placement, spec: StageSpec) -> ChunkMemory:
    return ChunkMemory(one_stage(run.model), placement, spec, run.tp_size, run.args.precision, run.num_pieces,
                       1 if run.is_ring else run.cp_size, run.args.vision_feature_cache is not None)
