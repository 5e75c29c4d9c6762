"""The report of ``mm-plan`` without a command."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mm.config.run import Run
from mm.device.platform import KnownDevice
from mm.errors import counted
from mm.plan.lists import Lists
from mm.plan.search import Planned, SearchResult
from mm.report import Report, Table

MIN_SPEEDUP = 1.01
"""Least speedup for which the report advises a change."""
_HEAD = ("", "TP", "CP", "PP", "VPP", "DP", "MBS", "samples", "encoder", "recompute", "step, s", "90% interval",
         "tok/s/device", "MFU", "waits", "GiB")


@dataclass(frozen=True)
class LayoutPlan:
    """What the report shows."""

    run: Run
    """The run as given."""
    device: KnownDevice | None
    calibration: str
    """The source of the predictions."""
    found: SearchResult
    seconds: float
    """Duration of the search."""
    present: Planned | None
    """None if the run's own layout is not legal, which ``present_problems`` then explains."""
    present_problems: tuple[str, ...]
    max_bytes: int | None


def layout_report(plan: LayoutPlan) -> Report:
    """What to do and what it is based on, then the layouts and the memory of the best."""
    best = plan.found.ranking[0]
    rows = [_row(str(number), one, plan) for number, one in enumerate(plan.found.ranking, 1)]
    rows += [] if plan.present is None else [_row("now", plan.present, plan)]
    title = "Layouts: all train on the same samples in each step, with the same loss and gradients"
    model = Path(plan.run.args.mm_model).name
    return Report(
        f"Layouts for {counted(plan.run.world_size, 'rank')} and {model}", tuple(_facts(plan, best)),
        (Table(title, _HEAD, tuple(rows)),))


def _facts(plan: LayoutPlan, best: Planned) -> Iterator[tuple[str, str]]:
    yield "Advice", _advice(plan, best)
    yield "Based on", plan.calibration
    tokens, patches = map(best.workload.mean, ("num_tokens", "num_patches"))
    yield "Data", (f"{counted(best.run.global_batch_size, 'sample')} per step: {tokens:,.0f} tokens and {patches:,.0f} "
                   f"patches, the mean of {counted(len(best.workload.steps), 'step')}")
    vision, language = Lists.of(best.run.model).values()
    yield "ViT", f"layout 1: image_encoder.vision_encoder.pipeline_num_layers: {vision}"
    yield "LLM", f"layout 1: text_decoder.pipeline_num_layers: {language}"
    yield "Searched", (
        f"{counted(plan.found.num_considered, 'layout')} in {plan.seconds:.1f} s; no layout that fits can take less "
        f"than {plan.found.least:.4g} s, whatever its lists, so layout 1 is at most "
        f"{best.step.seconds / plan.found.least - 1:.1%} slower than the best possible")
    if plan.run.args.shards_weights:
        yield "Stages", ("only layouts with one pipeline stage: optim_grads_params works with no more; give "
                         "--data-parallel-sharding-strategy optim_grads to search the others")
    of_stages = ", ".join(f"{num_bytes / 2**30:.1f}" for num_bytes in best.stage_bytes)
    yield "Memory", f"layout 1: {of_stages} GiB on a rank of each stage"
    if plan.max_bytes is not None:
        yield "Limit", (f"{plan.max_bytes / 2**30:.1f} GiB per rank; no lists that fit were found for "
                        f"{counted(plan.found.num_too_large, 'layout')}")
    yield from (("Refused", reason) for reason in plan.found.refusals[:2])
    if plan.present_problems:
        yield "Now", f"the present layout is not legal: {'; '.join(plan.present_problems)}"


def _advice(plan: LayoutPlan, best: Planned) -> str:
    seconds = f"layout 1: {best.step.seconds:.3g} s per step"
    if plan.present is None:
        return seconds
    if plan.max_bytes is not None and plan.present.peak_bytes > plan.max_bytes:
        return f"{seconds}; the present layout does not fit; --write DIR writes layout 1"
    gain = plan.present.step.seconds / best.step.seconds
    if gain < MIN_SPEEDUP:
        return f"keep the present layout: no layout that was found is more than {MIN_SPEEDUP - 1:.0%} faster"
    return (f"{seconds} instead of {plan.present.step.seconds:.3g} s, {gain:.2f} times as fast; --write DIR writes it")


def _row(name: str, one: Planned, plan: LayoutPlan) -> tuple[str, ...]:
    choice, step, (low, high) = one.choice, one.step, one.step.interval
    peak = None if plan.device is None else plan.device.peak_flops
    mfu = "" if peak is None else f"{one.predictor.flops(one.workload) / step.seconds / one.run.world_size / peak:.1%}"
    tokens = one.workload.mean("num_tokens") / step.seconds / one.run.world_size
    num_together = one.run.model.encoder_batch_size
    encoder = choice.encoder + (f" x {num_together}" if num_together > 1 else "")
    return (name, *map(str, (choice.tp_size, choice.cp_size, choice.num_stages, choice.num_chunks, one.run.dp_size,
                             choice.micro_batch_size, choice.sampler, encoder, choice.recompute)),
            f"{step.seconds:.4g}", f"{low:.3g} .. {high:.3g}", f"{tokens:,.0f}", mfu, f"{max(0.0, step.bubble):.1%}",
            f"{one.peak_bytes / 2**30:.1f}")
