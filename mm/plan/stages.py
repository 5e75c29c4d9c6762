"""The text of a dry run: what every pipeline stage would hold, how many bytes that is, and what crosses each boundary.

Sizes come from the weight table and the placement; nothing is measured, and activations are not counted.
"""

import math
from dataclasses import dataclass

from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.placement import Message, Placement, StageSpec
from mm.weights.memory import memory_shape
from mm.weights.table import model_weights, stage_weights

_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a weight.  Its gradient, its two Adam moments and, beside a weight in bf16 or fp16, its copy are fp32."""
_GIB = 2**30


@dataclass(frozen=True)
class StageSize:
    """What one rank of a stage holds; frozen weights have neither gradients nor optimizer state."""

    num_params: int
    num_trainable_params: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


def stage_size(run: Run, placement: Placement, spec: StageSpec) -> StageSize:
    """Parameters and bytes of one rank of ``spec``, tensor-parallel cut and padding in memory included."""
    sizes = [(math.prod(memory_shape(weight, run.tp_size)), run.model.is_frozen(weight.part))
             for weight in stage_weights(run.model, spec, placement)]
    num_params = sum(size for size, _ in sizes)
    num_trainable = sum(size for size, is_frozen in sizes if not is_frozen)
    state_bytes = _WIDTHS["fp32"] * (2 if run.args.precision == "fp32" else 3)
    num_shards = run.dp_size if run.args.use_distributed_optimizer else 1
    return StageSize(
        num_params=num_params,
        num_trainable_params=num_trainable,
        weight_bytes=num_params * _WIDTHS[run.args.precision],
        gradient_bytes=num_trainable * _WIDTHS["fp32"],
        optimizer_bytes=-(-num_trainable * state_bytes // num_shards),
    )


def num_model_params(run: Run) -> int:
    """Parameters of the whole model, each once: no padding, no second copy of a tied embedding."""
    return sum(math.prod(weight.shape) for weight in model_weights(run.model))


def stage_report(run: Run) -> str:
    """The whole dry-run text: sizes of the run, a table of stages, the boundaries, totals and notes."""
    placement = run.model.placement()
    sizes = [stage_size(run, placement, spec) for spec in placement.slots]
    parts = [
        _run_lines(run),
        _stage_table(run, placement, sizes),
        _boundary_lines(run, placement),
        _total_lines(run, sizes),
        ["Notes:", *(f"  - {note}" for note in run.notes)] if run.notes else [],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _run_lines(run: Run) -> list[str]:
    args = run.args
    return [
        f"Model     {args.mm_model}: {num_model_params(run):,} parameters",
        f"Ranks     {run.world_size} ranks = tensor {run.tp_size} x pipeline {run.num_stages} x data {run.dp_size}",
        f"Batch     {run.global_batch_size} samples per step = micro {args.micro_batch_size} x {run.num_microbatches} "
        f"microbatches x data {run.dp_size}; at most {args.seq_length} tokens per sample",
        f"Training  {args.train_iters} steps in {args.precision}, loss: mean over the "
        f"{'target token' if args.loss_unit == 'token' else args.loss_unit}s of the global batch, optimizer state "
        f"{'split over the data-parallel ranks' if args.use_distributed_optimizer else 'whole on every rank'}",
    ]


def _stage_table(run: Run, placement: Placement, sizes: list[StageSize]) -> list[str]:
    header = ("stage", "holds", "params/rank", "trainable", "weights", "gradients", "optimizer", "total")
    rows: list[tuple[str, ...]] = [header]
    for spec, size in zip(placement.slots, sizes, strict=True):
        rows.append((
            str(spec.stage), _contents(spec, run.model), f"{size.num_params:,}", f"{size.num_trainable_params:,}",
            _gib(size.weight_bytes), _gib(size.gradient_bytes), _gib(size.optimizer_bytes), _gib(size.total_bytes),
        ))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if column < 2 else cell.rjust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return ["Stages (one rank each; GiB without activations and buffers):", *lines]


def _contents(spec: StageSpec, model: ModelConfig) -> str:
    held = (
        ("patch embedding", "vision", spec.has_patch_embedding),
        (f"ViT {_span(spec.vision_layers)}", "vision", spec.vision_layers),
        ("projector", "projector", spec.has_projector),
        ("embedding", "language", spec.has_embedding),
        (f"LLM {_span(spec.language_layers)}", "language", spec.language_layers),
        ("norm + head", "language", spec.has_head),
    )
    parts = [f"{what} (frozen)" if model.is_frozen(part) else what for what, part, is_held in held if is_held]
    return ", ".join(parts) or "nothing (hands on what it receives)"


def _span(layers: range) -> str:
    return f"{layers.start}-{layers.stop - 1}" if len(layers) > 1 else str(layers.start)


def _boundary_lines(run: Run, placement: Placement) -> list[str]:
    """What each boundary carries per microbatch, and when a gradient comes back over it."""
    vision, language = run.model.vision, run.model.language
    merged = vision.spatial_merge_size**2
    shapes = {
        Message.PATCHES: f"[patches, {vision.hidden_size}]",
        Message.VISUAL_TOKENS: f"[patches / {merged}, {language.hidden_size}]",
        Message.HIDDEN_STATES: f"[tokens, {language.hidden_size}]",
    }
    lines = []
    for before, after in zip(placement.slots, placement.slots[1:], strict=False):
        crossing = f"  {before.stage} -> {after.stage}: {before.sends.value}"
        if before.sends is Message.NOTHING:
            lines.append(crossing)
            continue
        with_images = placement.gradient_flows(before.sends, has_images=True)
        text_only = placement.gradient_flows(before.sends, has_images=False)
        back = {(True, True): "gradient always", (True, False): "gradient for microbatches with images only",
                (False, False): "no gradient"}[with_images, text_only]
        lines.append(f"{crossing} {shapes[before.sends]} {run.args.precision}; {back}")
    return ["Boundaries (per microbatch):", *lines] if lines else []


def _total_lines(run: Run, sizes: list[StageSize]) -> list[str]:
    copies = run.tp_size * run.dp_size
    fullest = max(range(len(sizes)), key=lambda index: sizes[index].total_bytes)
    return [
        f"Largest   stage {fullest} with {_gib(sizes[fullest].total_bytes)} GiB on each rank",
        f"In all    {_gib(copies * sum(size.total_bytes for size in sizes))} GiB on {run.world_size} ranks",
    ]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f}"
