"""The report of a dry run: contents, boundaries and peak memory of the stages, and the cheapest flags that would fit.

The order of these flags is a preference, not measured: exact and nearly free ones first, then those that take time or
round.  Layouts stay as they are; ``mm-plan`` searches for others.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, pairwise

from mm.config.args import Arguments
from mm.config.layers import OffloadConfig, RecomputeConfig
from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.cost.layer_memory import WIDTHS
from mm.cost.memory import MicrobatchSizes
from mm.cost.stage_memory import (
    STATED,
    VISUAL,
    BucketBuffers,
    StageSize,
    activation_bytes_on_host,
    chunk_size,
    longest_microbatches,
    num_model_params,
    peak_bytes,
    peaks,
    stage_memory,
    stage_sizes,
)
from mm.device.device import KNOWN_DEVICES
from mm.errors import counted, sorted_notes
from mm.placement import Message, Placement, StageSpec
from mm.weights.table import Place, stage_weights
from mm.weights.trained import (
    GradientPath,
    Group,
    describe_lora,
    freeze_notes,
    is_frozen,
    model_adapters,
    num_adapter_params,
    optimizer_groups,
)

NEARLY_EQUAL = 0.9
"""Devices whose smallest memory has at least this share of the others' get one answer, for the smallest."""


@dataclass(frozen=True)
class Change:
    """One or more flags that take less memory."""

    flags: str
    applied: Callable[[Run], Run | None]
    """The run with them; None if it has them, or if they do not apply."""


@dataclass(frozen=True)
class Fit:
    """The changes with which a run fits a device; none if no changes are enough."""

    max_bytes: int
    flags: tuple[str, ...]
    peak_bytes: float
    """With these changes; if none are enough, the smallest that any set of changes reaches."""
    host_bytes: int = 0
    """Host memory for the optimizer states and activations of a rank with these changes."""


def _with(run: Run, **fields: object) -> Run:
    return replace(run, args=replace(run.args, **fields))


def _sharded(strategy: str, before: tuple[str, ...]) -> Callable[[Run], Run | None]:
    def applied(run: Run) -> Run | None:
        if run.num_copies == 1 or run.args.sharding not in before:
            return None
        if strategy == "optim_grads_params" and run.num_stages > 1:
            return None
        return _with(run, data_parallel_sharding_strategy=strategy)

    return applied


def _recomputed(recompute: RecomputeConfig) -> Callable[[Run], Run | None]:
    def applied(run: Run) -> Run | None:
        towers = {name: tower for name in ("vision", "language")
                  if (tower := getattr(run.model, name)).recompute == RecomputeConfig()}
        if not towers:
            return None
        changed = {name: replace(tower, recompute=recompute) for name, tower in towers.items()}
        return replace(run, model=replace(run.model, **changed))

    return applied


def _offloaded(run: Run) -> Run | None:
    """Offload the inputs of recomputed layers: all else is computed again sooner than it crosses the host's link."""
    towers = {name: getattr(run.model, name) for name in ("vision", "language")}
    if any(tower.recompute.granularity != "full" or tower.offload != OffloadConfig() for tower in towers.values()):
        return None
    changed = {name: replace(tower, offload=OffloadConfig(activations=True)) for name, tower in towers.items()}
    return replace(run, model=replace(run.model, **changed))


def _in_bf16(suits: Callable[[Arguments], bool], **fields: object) -> Callable[[Run], Run | None]:
    """A change for a run in bf16 whose flags satisfy ``suits``."""
    return lambda run: _with(run, **fields) if run.args.bf16 and suits(run.args) else None


CHANGES = (
    Change("--data-parallel-sharding-strategy optim", _sharded("optim", ("no_shard",))),
    Change("--store-param-remainders", _in_bf16(lambda args: args.kept_copy == "fp32", store_param_remainders=True)),
    Change("--recompute-granularity selective", _recomputed(RecomputeConfig("selective"))),
    Change("--data-parallel-sharding-strategy optim_grads", _sharded("optim_grads", ("no_shard", "optim"))),
    Change("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", _in_bf16(
        lambda args: "fp32" in (args.exp_avg_dtype, args.exp_avg_sq_dtype),
        exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")),
    Change("--data-parallel-sharding-strategy optim_grads_params",
           _sharded("optim_grads_params", ("no_shard", "optim", "optim_grads"))),
    Change("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
           _recomputed(RecomputeConfig("full", "uniform", 1))),
    Change("--cpu-offload-activations", _offloaded),
    Change("--optimizer-cpu-offload --optimizer-offload-fraction 1",
           lambda run: None if run.args.host_share == 1.0 else _with(
               run, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)),
    Change("--grad-reduce-in-bf16", _in_bf16(lambda args: not args.grad_reduce_in_bf16, grad_reduce_in_bf16=True)),
    Change("--main-params-dtype bf16", _in_bf16(lambda args: args.kept_copy == "fp32", main_params_dtype="bf16")),
)
"""The cheapest first.  A change is tried only if all cheaper ones together are not enough."""


def cheapest_fits(run: Run, memories: Iterable[int]) -> list[Fit]:
    """The cheapest changes with which ``run`` fits each of ``memories`` (bytes) that is too small, largest first.

    Nearly equal memories get one answer, for the smallest of them.
    """
    @cache
    def peak(changes: int) -> float:
        one = changed(run, changes)
        return math.inf if one is None else peak_of(one)

    small, distinct = sorted({one for one in memories if one < peak(0)}), list[int]()
    for one in small:
        if not distinct or one * NEARLY_EQUAL > distinct[-1]:
            distinct.append(one)
    found, every = list[Fit](), range(1 << len(CHANGES))
    for max_bytes in reversed(distinct):
        changes = next((one for one in every if peak(one) <= max_bytes), 0)
        flags = tuple(one.flags for bit, one in enumerate(CHANGES) if changes >> bit & 1)
        fitting = changed(run, changes)
        assert fitting is not None, "it has a peak"
        found.append(Fit(max_bytes, flags, peak(changes), _host_bytes(fitting)) if changes else
                     Fit(max_bytes, (), min(map(peak, every))))
    return found


def changed(run: Run, changes: int) -> Run | None:
    """``run`` with a set of changes (bit n: ``CHANGES[n]``); None if they conflict."""
    for bit, change in enumerate(CHANGES):
        if changes >> bit & 1:
            other = change.applied(run)
            if other is None:
                return None
            run = other
    return run


def peak_of(run: Run) -> int:
    """Memory of the fullest rank."""
    placement = run.model.placement()
    return max(peaks(run, placement, stage_sizes(run, placement)).values())


def _host_bytes(run: Run) -> int:
    placement = run.model.placement()
    states, activations = stage_sizes(run, placement), activation_bytes_on_host(run, placement)
    return max(size.host_bytes + num_bytes for size, num_bytes in zip(states, activations, strict=True))


_GIB = 2**30
_NUM_FITS = 3
"""Sizes of devices for which the report says how the run would fit."""
_PLACES = {Place.PATCH_EMBEDDING: "patch embedding", Place.VISION_LAYER: "ViT", Place.PROJECTOR: "projector",
           Place.EMBEDDING: "embedding", Place.LANGUAGE_LAYER: "LLM", Place.HEAD: "norm + head"}  # fmt: skip


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
        ["Not here yet, but needed to train:", *(f"  - {one}" for one in run.missing)] if run.missing else [],
        ["Notes:", *(f"  - {note}" for note in notes)] if notes else [],
    ]
    return "\n\n".join("\n".join(table) for table in tables if table)


def _run_lines(run: Run) -> list[str]:
    args, lora = run.args, run.model.lora
    return [
        f"Model     {args.mm_model}: {num_model_params(run):,} parameters",
        *([f"Adapters  {len(model_adapters(run.model))} linear layers, {describe_lora(lora)}: "
           f"{num_adapter_params(run.model):,} parameters; the weights beside them are frozen, which costs their "
           f"{WIDTHS[args.precision]} bytes each, and no gradients, optimizer state or fp32 copies"]
          if lora.is_on else []),
        f"Ranks     {counted(run.world_size, 'rank')} = {_ranks(run)}",
        *([f"Encoder   ViT and projector whole on every tensor-parallel rank; {run.num_encoders} ranks divide the "
           f"images of a microbatch"] if run.model.encodes_whole else []),
        *([f"Images    of {run.model.encoder_batch_size} consecutive microbatches pass the ViT together"]
          if run.model.encoder_batch_size > 1 else []),
        f"Batch     {counted(run.global_batch_size, 'sample')} per step = {_microbatches(run)}; at most "
        f"{args.seq_length} tokens per sample",
        f"Training  {_steps(run)} in {args.precision}, loss: mean over the "
        f"{'target token' if args.loss_unit == 'token' else args.loss_unit}s of the global batch, optimizer state"
        f"{_SHARDED[args.sharding]}{_optimizer_state(args)}",
    ]


_SHARDED = {"no_shard": " whole on every rank", "optim": " split over the data-parallel ranks",
            "optim_grads": " and gradients split over the data-parallel ranks",
            "optim_grads_params": ", gradients and weights split over the data-parallel ranks"}  # fmt: skip


def _optimizer_state(args: Arguments) -> str:
    dtypes = {"first": args.exp_avg_dtype, "second": args.exp_avg_sq_dtype}
    rounded = [f"the {name} in {dtype}" for name, dtype in dtypes.items() if dtype != "fp32"]
    copies = {"fp32": "", "remainder": ", 16 bits beside each weight in place of an fp32 copy",
              "none": ", no fp32 copies of weights"}  # fmt: skip
    found = (f", moments: {' and '.join(rounded)}" if rounded else "") + copies[args.kept_copy]
    return found + (f", {100 * args.host_share:.3g}% of the optimizer states in host memory" if args.host_share else "")


def _steps(run: Run) -> str:
    epochs = run.args.num_train_epochs
    if epochs is None:
        return counted(run.args.train_iters, "step")
    return f"{epochs:g} epoch{'s' * (epochs != 1)} = {run.args.train_iters or 'an unknown number of'} steps"


def _microbatches(run: Run) -> str:
    if run.num_microbatches is not None:
        number = counted(run.num_microbatches, "microbatch", "microbatches")
        return f"micro {run.args.micro_batch_size} x {number} x data {run.dp_size}"
    patches = run.data.packing_max_patches
    return (f"packs of at most {run.args.seq_length * run.args.micro_batch_size} tokens"
            f"{f' and {patches} patches' if patches else ''}, as many as it takes, over data {run.dp_size}")


def _ranks(run: Run) -> str:
    context = f" x context {run.cp_size} ({'ring' if run.is_ring else 'Ulysses'})" if run.cp_size > 1 else ""
    return f"tensor {run.tp_size}{context} x pipeline {run.num_stages} x data {run.dp_size}"


def _stage_table(run: Run, placement: Placement) -> list[str]:
    is_on_host = run.args.host_share > 0
    header = ("stage", "holds", "params/rank", "trainable", "weights", "gradients", "copies", "moments", "total",
              *["on the host"] * is_on_host)
    rows: list[tuple[str, ...]] = [header]
    for spec in placement.slots:
        size = chunk_size(run, spec)
        kinds = (size.weight_bytes, size.gradient_bytes, size.copy_bytes, size.moment_bytes, size.total_bytes,
                 *[size.host_bytes] * is_on_host)
        rows.append((_name(spec, run), _contents(spec, run.model), f"{size.num_params:,}",
                     f"{size.num_trainable_params:,}", *map(_gib, kinds)))
    return ["Stages (one rank each; GiB of states):", *_aligned(rows)]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """A table whose first two columns are text, the others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) if column < 2 else cell.rjust(width)
                      for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]


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
    shapes = {
        Message.PATCHES: f"[patches, {vision.hidden_size}]",
        Message.VISUAL_TOKENS: f"[patches / {vision.spatial_merge_size**2}, {language.hidden_size}]",
        Message.HIDDEN_STATES: f"[tokens, {language.hidden_size}]",
    }
    lines, path = [], GradientPath.of(run.model)
    for before, after in pairwise(placement.slots):
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
        f"Total     {_gib(copies * sum(size.total_bytes for size in sizes))} GiB on {counted(run.world_size, 'rank')}",
    ]


def _memory_table(run: Run, placement: Placement, sizes: list[StageSize]) -> list[str]:
    """Peak memory of each stage, and its parts."""
    buffers, offloads = BucketBuffers.of(run), run.model.offloads_activations
    header = ("stage", "tokens", "in flight", "states", "activations", "sent ahead", "logits", "a layer's work",
              *["open buckets"] * (buffers is not None), "peak", *["on the host"] * offloads)
    rows: list[tuple[str, ...]] = [header]
    kinds = longest_microbatches(run)
    for stage, size in enumerate(sizes):
        memory = stage_memory(run, placement, stage)
        for kind, held in kinds.items():
            count = run.held_microbatches
            bytes_of = (size.total_bytes, memory.kept_bytes(held, count), memory.ahead_bytes(held, count),
                        memory.logit_bytes(held), memory.working_bytes(held),
                        *([memory.working_parts(held, buffers)[1]] if buffers else []),
                        peak_bytes(memory, held, run, size), *[memory.host_bytes(held, count)] * offloads)
            num_in_flight = "+".join(map(str, memory.in_flight(held, count)))
            rows.append((str(stage), kind, num_in_flight, *map(_gib, bytes_of)))
    return [
        "Peak memory (one rank each; GiB; computed, not measured):",
        *_aligned(rows),
        *_microbatch_lines(run, kinds),
        "The peak includes the logits or a layer's work, whichever is larger.  Sent ahead: the most messages that a",
        "slow next stage can leave waiting.  Not counted: the driver, communication buffers and fragmentation.",
        *(["Open buckets: gradients, and weights in shards, of the layers that are used at that moment."]
          if buffers else []),
        *(["On the host: offloaded activations.  The columns of logits and of a layer's work include those that are",
           "on the device at that moment."] if offloads else []),
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
    """Which known devices have enough memory, and what would make the run fit the largest of the others."""
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
        *map(_fit_line, cheapest_fits(run, names)[:_NUM_FITS]),
    ]


def _fit_line(fit: Fit) -> str:
    """The cheapest change with which the run fits."""
    if fit.flags:
        flags = " ".join(fit.flags)
        on_host = f", and {_gib(fit.host_bytes)} GiB of host memory a rank" if fit.host_bytes else ""
        return f"To fit    {_gib(fit.max_bytes)} GiB: add {flags}; the peak is then {_gib(fit.peak_bytes)}{on_host}"
    return (f"To fit    {_gib(fit.max_bytes)} GiB: flags are not enough, with all of them the peak is "
            f"{_gib(fit.peak_bytes)}; divide the weights over more ranks, as mm-plan suggests")


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


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f}"
