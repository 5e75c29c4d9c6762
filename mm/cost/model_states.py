"""What one rank of a stage holds between steps: weights, gradients and optimizer states, from the weight table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache, reduce
from operator import add

from mm.config.args import Arguments
from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.cost.layer_memory import FP32, WIDTHS
from mm.cost.workload import one_stage
from mm.device.pointwise import ROUNDED_AT_ONCE
from mm.placement import Placement, StageSpec
from mm.weights.shard import memory_shape
from mm.weights.table import Place, Weight, model_weights, owns, stage_weights, weights_by_place
from mm.weights.trained import GradientPath, is_frozen

KEPT_COPY_BYTES = {"fp32": FP32, "remainder": 2, "none": 0}
"""Bytes kept beside a trained weight in 16 bits, by ``Arguments.kept_copy``."""


@cache
def params_by_place(model: ModelConfig, tp_size: int) -> Mapping[tuple[Place, int | None], tuple[int, int, int]]:
    """``params_of`` of each block, by its place and layer."""
    return {place: params_of(weights, model, tp_size) for place, weights in weights_by_place(model).items()}


def params_of(weights: Sequence[Weight], model: ModelConfig, tp_size: int) -> tuple[int, int, int]:
    """Numbers of parameters on one rank, with padding: of ``weights``; of those that are trained; and of trained ones
    that belong to a whole encoder."""
    found = [(math.prod(memory_shape(weight, tp_size)), not is_frozen(weight, model), weight.is_whole)
             for weight in weights]
    return (sum(size for size, _, _ in found), sum(size for size, is_trained, _ in found if is_trained),
            sum(size for size, is_trained, is_whole in found if is_trained and is_whole))


def num_model_params(run: Run) -> int:
    """Parameters of the whole model, each counted once: no adapters, no padding, no second copy of a tied embedding."""
    return sum(math.prod(weight.shape) for weight in model_weights(run.model.base))


def state_widths(args: Arguments) -> tuple[int, int]:
    """Bytes per trained parameter: those kept beside the weight, and those of both moments."""
    copy_width = KEPT_COPY_BYTES[args.kept_copy] if args.precision != "fp32" else 0
    return copy_width, WIDTHS[args.exp_avg_dtype] + WIDTHS[args.exp_avg_sq_dtype]


def offloaded(sizes: Sequence[int], share: float) -> list[int]:
    """Indices, in order, of the weights whose states are in host memory, given the ``sizes`` of all in elements.

    The largest are taken first, each if it still fits into ``share`` of all elements.
    """
    left = round(share * sum(sizes))
    chosen: list[int] = []
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


def stage_sizes(run: Run, placement: Placement) -> list[StageSize]:
    """Size of one rank of each stage: the sum over its chunks."""
    return [reduce(StageSize.__add__, (chunk_size(run, placement[stage, chunk]) for chunk in range(run.num_chunks)))
            for stage in range(run.num_stages)]


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


def _num_params(model: ModelConfig, tp_size: int, spec: StageSpec) -> tuple[int, int, int, int]:
    """``params_of`` the weights of ``spec``, summed, and the number of its blocks with trained weights."""
    counts = [one for (place, layer), one in params_by_place(model, tp_size).items() if owns(spec, place, layer)]
    copies = [weight for weight in stage_weights(model, spec) if weight.is_tied_copy] if model.language.tied else []
    counts.append(params_of(copies, model, tp_size))
    num_params, num_trainable, num_whole = map(sum, zip(*counts, strict=True))
    return num_params, num_trainable, num_whole, sum(one[1] > 0 for one in counts)


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


def build_bytes(run: Run, size: StageSize) -> int:
    """What a stage needs while it is built, if that may be more than it keeps: megatron's distributed optimizer copies
    the trained weights into one buffer beside the gradients, before there are optimizer states."""
    is_copied = run.args.splits_optimizer and not run.shards_gradients
    copied = size.num_trainable_params * WIDTHS[run.args.precision] if is_copied else 0
    return size.weight_bytes + size.gradient_bytes + copied
