"""The report of a dry run: what each pipeline stage holds, its size in bytes, and what crosses each boundary.

Sizes come from the weight table, the placement and the formulas of ``mm.plan.memory``; nothing is measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache, reduce
from itertools import groupby
from operator import add

from mm.config.model import ModelConfig
from mm.config.notes import sorted_notes
from mm.config.run import Run
from mm.device.known import KNOWN_DEVICES
from mm.placement import Message, Placement, StageSpec
from mm.plan.lists import one_stage
from mm.plan.memory import FP32, WIDTHS, ChunkMemory, MicrobatchSizes, StageMemory
from mm.weights.groups import Group, optimizer_groups
from mm.weights.lora import describe, model_adapters, num_adapter_params
from mm.weights.memory import memory_shape
from mm.weights.table import Place, Weight, model_weights, owns, stage_weights, weights_by_place
from mm.weights.trained import GradientPath, freeze_notes, is_frozen

_GIB = 2**30
_PLACES = {
    Place.PATCH_EMBEDDING: "patch embedding",
    Place.VISION_LAYER: "ViT",
    Place.PROJECTOR: "projector",
    Place.EMBEDDING: "embedding",
    Place.LANGUAGE_LAYER: "LLM",
    Place.HEAD: "norm + head",
}


@dataclass(frozen=True)
class StageSize:
    """States of one rank of a stage.  Frozen weights have neither gradients nor optimizer state.

    The two Adam moments are fp32, and so is the copy of weights in bf16 or fp16.  Gradients are fp32 unless they are
    reduced in bf16.
    """

    num_params: int
    num_trainable_params: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    update_bytes: int
    """fp32 copies of bf16 gradients.  They exist only in the update, without activations, and are not states."""

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    def __add__(self, other: "StageSize") -> "StageSize":
        return StageSize(*map(add, astuple(self), astuple(other)))

    def divided(self, count: int) -> "StageSize":
        """The size of one of ``count`` equal stages that hold this together, rounded down."""
        return StageSize(*(number // count for number in astuple(self)))


def chunk_size(run: Run, spec: StageSpec) -> StageSize:
    """Parameters and bytes of ``spec`` on one rank: its tensor-parallel shard, with padding in memory."""
    num_params, num_trainable = _num_params(one_stage(run.model), run.tp_size, spec)
    state_bytes = FP32 * (2 if run.args.precision == "fp32" else 3)
    num_shards = run.dp_size * run.cp_size if run.args.use_distributed_optimizer else 1
    return StageSize(
        num_params=num_params,
        num_trainable_params=num_trainable,
        weight_bytes=num_params * WIDTHS[run.args.precision],
        gradient_bytes=num_trainable * (WIDTHS["bf16"] if run.args.grad_reduce_in_bf16 else FP32),
        optimizer_bytes=-(-num_trainable * state_bytes // num_shards),
        update_bytes=-(-num_trainable * FP32 // num_shards) if run.args.grad_reduce_in_bf16 else 0,
    )


def _num_params(model: ModelConfig, tp_size: int, spec: StageSpec) -> tuple[int, int]:
    """Parameters of ``spec`` on one rank, and how many are trained."""
    sizes = [counts for (place, layer), counts in _params_by_place(model, tp_size).items() if owns(spec, place, layer)]
    copies = [weight for weight in stage_weights(model, spec) if weight.is_tied_copy] if model.language.tied else []
    sizes += [_params_of(copies, model, tp_size)]
    num_params, num_trainable = map(sum, zip(*sizes, strict=True))
    return num_params, num_trainable


@cache
def _params_by_place(model: ModelConfig, tp_size: int) -> Mapping[tuple[Place, int | None], tuple[int, int]]:
    return {place: _params_of(weights, model, tp_size) for place, weights in weights_by_place(model).items()}


def _params_of(weights: Sequence[Weight], model: ModelConfig, tp_size: int) -> tuple[int, int]:
    sizes = [(math.prod(memory_shape(weight, tp_size)), is_frozen(weight, model)) for weight in weights]
    return sum(size for size, _ in sizes), sum(size for size, frozen in sizes if not frozen)


def stage_sizes(run: Run, placement: Placement) -> list[StageSize]:
    """Size of one rank of each stage: the sum over its chunks."""
    return [reduce(StageSize.__add__, (chunk_size(run, placement[stage, chunk]) for chunk in range(run.num_chunks)))
            for stage in range(run.num_stages)]


def num_model_params(run: Run) -> int:
    """Parameters of the whole model, each counted once: no adapters, no padding, no second copy of a tied embedding."""
    return sum(math.prod(weight.shape) for weight in model_weights(run.model.base))


def stage_report(run: Run) -> str:
    """The whole dry-run text: sizes of the run, a table of stages, the boundaries, totals and notes."""
    placement = run.model.placement()
    sizes, notes = stage_sizes(run, placement), sorted_notes((*run.notes, *freeze_notes(run.model)))
    tables = [
        _run_lines(run),
        _stage_table(run, placement),
        _boundary_lines(run, placement),
        _total_lines(run, sizes),
        _memory_table(run, placement, sizes),
        _device_lines(run, placement, sizes),
        _group_lines(run),
        ["Notes:", *(f"  - {note}" for note in notes)] if notes else [],
    ]
    return "\n\n".join("\n".join(table) for table in tables if table)


def _run_lines(run: Run) -> list[str]:
    args, lora = run.args, run.model.lora
    return [
        f"Model     {args.mm_model}: {num_model_params(run):,} parameters",
        *([f"Adapters  {len(model_adapters(run.model))} linear layers, {describe(lora)}: "
           f"{num_adapter_params(run.model):,} parameters; the weights beside them are frozen, which costs their "
           f"{WIDTHS[args.precision]} bytes each, and no gradients, optimizer state or fp32 copies"]
          if lora.is_on else []),
        f"Ranks     {run.world_size} ranks = {_ranks(run)}",
        *([f"Encoder   ViT and projector whole on every tensor-parallel rank; {run.num_encoders} ranks divide the "
           f"images of a microbatch"] if run.model.encodes_whole else []),
        f"Batch     {run.global_batch_size} samples per step = {_microbatches(run)}; at most {args.seq_length} tokens "
        f"per sample",
        f"Training  {_steps(run)} in {args.precision}, loss: mean over the "
        f"{'target token' if args.loss_unit == 'token' else args.loss_unit}s of the global batch, optimizer state "
        f"{'split over the data-parallel ranks' if args.use_distributed_optimizer else 'whole on every rank'}",
    ]


def _steps(run: Run) -> str:
    epochs = run.args.num_train_epochs
    if epochs is None:
        return f"{run.args.train_iters} steps"
    return f"{epochs:g} epochs = {run.args.train_iters or 'an unknown number of'} steps"


def _microbatches(run: Run) -> str:
    if run.num_microbatches is not None:
        return f"micro {run.args.micro_batch_size} x {run.num_microbatches} microbatches x data {run.dp_size}"
    patches = run.data.packing_max_patches
    return (f"packs of at most {run.args.seq_length * run.args.micro_batch_size} tokens"
            f"{f' and {patches} patches' if patches else ''}, as many as it takes, over data {run.dp_size}")


def _ranks(run: Run) -> str:
    context = f" x context {run.cp_size} ({'ring' if run.is_ring else 'Ulysses'})" if run.cp_size > 1 else ""
    return f"tensor {run.tp_size}{context} x pipeline {run.num_stages} x data {run.dp_size}"


def _stage_table(run: Run, placement: Placement) -> list[str]:
    header = ("stage", "holds", "params/rank", "trainable", "weights", "gradients", "optimizer", "total")
    rows: list[tuple[str, ...]] = [header]
    for spec in placement.slots:
        size = chunk_size(run, spec)
        rows.append((
            _name(spec, run), _contents(spec, run.model), f"{size.num_params:,}", f"{size.num_trainable_params:,}",
            _gib(size.weight_bytes), _gib(size.gradient_bytes), _gib(size.optimizer_bytes), _gib(size.total_bytes),
        ))
    return ["Stages (one rank each; GiB of states):", *_aligned(rows)]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """A table whose first two columns are text, the others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if column < 2 else cell.rjust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def _name(spec: StageSpec, run: Run) -> str:
    return str(spec.stage) if run.num_chunks == 1 else f"{spec.stage}, chunk {spec.chunk}"


def _contents(spec: StageSpec, model: ModelConfig) -> str:
    """Contents of a slot in words; consecutive layers with the same frozen state are merged."""
    frozen: dict[tuple[Place, int | None], list[bool]] = {}
    adapted: set[tuple[Place, int | None]] = set()
    for weight in stage_weights(model, spec):
        frozen.setdefault((weight.place, weight.layer), []).append(is_frozen(weight, model))
        if weight.is_adapter:
            adapted.add((weight.place, weight.layer))
    words = {at: "" if not any(flags) else " (frozen)" if all(flags) else (
        " (adapters)" if at in adapted else " (partly frozen)") for at, flags in frozen.items()}
    contents: list[str] = []
    for (place, suffix), group in groupby(words.items(), key=lambda item: (item[0][0], item[1])):
        layers = [layer for (_, layer), _ in group if layer is not None]
        span = f" {layers[0]}{f'-{layers[-1]}' if len(layers) > 1 else ''}" if layers else ""
        contents.append(f"{_PLACES[place]}{span}{suffix}")
    return ", ".join(contents) or "nothing (forwards what it receives)"


def _boundary_lines(run: Run, placement: Placement) -> list[str]:
    """What crosses each boundary per microbatch, and when a gradient comes back."""
    vision, language = run.model.vision, run.model.language
    merged = vision.spatial_merge_size**2
    shapes = {
        Message.PATCHES: f"[patches, {vision.hidden_size}]",
        Message.VISUAL_TOKENS: f"[patches / {merged}, {language.hidden_size}]",
        Message.HIDDEN_STATES: f"[tokens, {language.hidden_size}]",
    }
    lines, path = [], GradientPath.of(run.model)
    for before, after in zip(placement.slots, placement.slots[1:], strict=False):
        crossing = f"  {_name(before, run)} -> {_name(after, run)}: {before.sends.value}"
        if before.sends is Message.NOTHING:
            lines.append(crossing)
            continue
        with_images, text_only = (path.comes_back(before, has_images) for has_images in (True, False))
        back = {(True, True): "gradient always", (True, False): "gradient for microbatches with images only",
                (False, False): "no gradient"}[with_images, text_only]
        lines.append(f"{crossing} {shapes[before.sends]} {run.args.precision}; {back}")
    return ["Boundaries (per microbatch):", *lines] if lines else []


def _total_lines(run: Run, sizes: list[StageSize]) -> list[str]:
    copies = run.tp_size * run.cp_size * run.dp_size
    fullest = max(range(len(sizes)), key=lambda index: sizes[index].total_bytes)
    return [
        f"Largest   stage {fullest} with {_gib(sizes[fullest].total_bytes)} GiB on each rank",
        f"Total     {_gib(copies * sum(size.total_bytes for size in sizes))} GiB on {run.world_size} ranks",
    ]


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


class PeakMemory:
    """The peak memory of a run's stages for many placements with as many stages and chunks."""

    def __init__(self, run: Run) -> None:
        self._run, self._kinds = run, tuple(longest_microbatches(run).values())
        self._chunks: dict[StageSpec, tuple[StageSize, ChunkMemory]] = {}
        self._peaks: dict[tuple[StageSpec, ...], int] = {}

    def of_stages(self, placement: Placement) -> list[int]:
        """Peak bytes of one rank of each stage, with the kind of microbatch that needs most."""
        return [self._of_stage(placement, stage) for stage in range(placement.num_stages)]

    def _of_stage(self, placement: Placement, stage: int) -> int:
        specs = tuple(placement[stage, chunk] for chunk in range(placement.num_chunks))
        if specs not in self._peaks:
            chunks = [self._chunk(placement, spec) for spec in specs]
            size = reduce(StageSize.__add__, (size for size, _ in chunks))
            memory = StageMemory(tuple(chunk for _, chunk in chunks))
            self._peaks[specs] = max(_peak_bytes(memory, rows, self._run, size) for rows in self._kinds)
        return self._peaks[specs]

    def _chunk(self, placement: Placement, spec: StageSpec) -> tuple[StageSize, ChunkMemory]:
        if spec not in self._chunks:
            self._chunks[spec] = chunk_size(self._run, spec), _chunk_memory(self._run, placement, spec)
        return self._chunks[spec]


def peaks(run: Run, placement: Placement, sizes: list[StageSize]) -> dict[str, int]:
    """Peak bytes of the largest stage, by kind of microbatch."""
    memories = [_memory(run, placement, stage) for stage in range(len(sizes))]
    return {kind: max(_peak_bytes(memory, rows, run, size) for memory, size in zip(memories, sizes, strict=True))
            for kind, rows in longest_microbatches(run).items()}


def _peak_bytes(memory: StageMemory, rows: MicrobatchSizes, run: Run, size: StageSize) -> int:
    """Peak bytes of a stage: while it computes or in the update, whichever is more."""
    return max(memory.peak_bytes(rows, run.held_microbatches, size.total_bytes), size.total_bytes + size.update_bytes)


def _memory(run: Run, placement: Placement, stage: int) -> StageMemory:
    return StageMemory(tuple(_chunk_memory(run, placement, placement[stage, chunk])
                             for chunk in range(placement.num_chunks)))


def _chunk_memory(run: Run, placement: Placement, spec: StageSpec) -> ChunkMemory:
    return ChunkMemory(one_stage(run.model), placement, spec, run.tp_size, run.args.precision, run.num_pieces,
                       1 if run.is_ring else run.cp_size, run.args.vision_feature_cache is not None)


def _memory_table(run: Run, placement: Placement, sizes: list[StageSize]) -> list[str]:
    """Peak memory of each stage, and its parts."""
    header = ("stage", "tokens", "in flight", "states", "activations", "sent ahead", "logits", "a layer's work",
              "peak")
    rows: list[tuple[str, ...]] = [header]
    kinds = longest_microbatches(run)
    for stage, size in enumerate(sizes):
        memory = _memory(run, placement, stage)
        for kind, held in kinds.items():
            count = run.held_microbatches
            bytes_of = (size.total_bytes, memory.kept_bytes(held, count), memory.ahead_bytes(held, count),
                        memory.logit_bytes(held), memory.working_bytes(held), _peak_bytes(memory, held, run, size))
            num_in_flight = "+".join(map(str, memory.in_flight(held, count)))
            rows.append((str(stage), kind, num_in_flight, *map(_gib, bytes_of)))
    return [
        "Peak memory (one rank each; GiB; computed, not measured):",
        *_aligned(rows),
        *_microbatch_lines(run, kinds),
        "The peak includes the logits or a layer's work, whichever is larger.  Sent ahead: the most messages that a",
        "slow next stage can leave waiting.  Not counted: the driver, communication buffers and fragmentation.",
    ]


def _microbatch_lines(run: Run, kinds: dict[str, MicrobatchSizes]) -> list[str]:
    """The microbatches that the memory is computed for."""
    num_tokens = run.args.seq_length * run.args.micro_batch_size
    start = f"Each microbatch in flight is assumed to have {num_tokens:,} tokens (--seq-length x --micro-batch-size):"
    if STATED in kinds:
        lines = [start,
                 f"{run.args.dry_run_patches:,} patches (--dry-run-patches), the rest text, every token a target."]
    else:
        num_patches = num_tokens * run.model.vision.spatial_merge_size**2
        lines = [start, f"all text, every token a target, or all visual ({num_patches:,} patches); a mixture needs",
                 "an amount in between."]
    if run.num_encoders > 1:
        held = kinds.get(STATED, kinds.get(VISUAL))
        assert held is not None, "kinds has one of the two"
        axes = " and ".join(["context-parallel"] * (run.cp_size > 1) + ["tensor-parallel"] * run.model.encodes_whole)
        lines += [f"Each {axes} rank holds {held.num_tokens:,} of the tokens and at most "
                  f"{held.num_patches:,} patches: its share, and one",
                  "image of image_max_pixels, because images stay whole."]
    return lines


def _device_lines(run: Run, placement: Placement, sizes: list[StageSize]) -> list[str]:
    """Which known devices have enough memory."""
    found = peaks(run, placement, sizes)
    ordered = sorted(found.items(), key=lambda item: item[1])
    (least_kind, least), (worst_kind, worst) = ordered[0], ordered[-1]
    names: dict[int, list[str]] = {}
    for known in KNOWN_DEVICES:
        if known.memory_bytes is not None:
            names.setdefault(known.memory_bytes, []).append(known.label)
    fits, partly, small = [], [], []
    for size, alike in sorted(names.items(), reverse=True):
        device = f"{', '.join(alike)} ({_gib(size)} GiB"
        if size >= worst:
            fits.append(f"{device}, {_gib(size - worst)} left)")
        else:
            (partly if size >= least else small).append(f"{device})")
    return [
        f"Peak      {_gib(worst)} GiB a rank" + (
            f" when microbatches are all {worst_kind}, {_gib(least)} when {least_kind}" if len(found) > 1 else ""),
        *(f"Fits      {device}" for device in fits),
        *(f"In part   {device}: enough for all {least_kind}, not for all {worst_kind}" for device in partly),
        *([f"Too small {', '.join(small)}"] if small else []),
    ]


def _group_lines(run: Run) -> list[str]:
    """Optimizer groups, if there are more than the usual two, with and without weight decay."""
    args, groups = run.args, optimizer_groups(run.args, run.model)
    if {Group(args.lr, args.weight_decay), Group(args.lr, 0.0)} >= groups.keys():
        return []
    rows: list[tuple[str, ...]] = [("learning rate", "weight decay", "tensors", "params", "parts")]
    for group, weights in groups.items():
        num_params = sum(math.prod(weight.shape) for weight in weights)
        rows.append((f"{group.max_lr:g}", f"{group.weight_decay:g}", str(len(weights)), f"{num_params:,}",
                     ", ".join(dict.fromkeys(weight.part for weight in weights))))
    return ["Optimizer groups (maximum learning rates):", *_aligned(rows)]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f}"
