"""The text of ``mm-plan`` without a command."""

from collections.abc import Sequence
from dataclasses import dataclass

from mm.config.run import Run
from mm.device.platform import KnownDevice
from mm.plan.choices import AS_GIVEN, ENCODERS, Choice
from mm.plan.costs import COUNTS
from mm.plan.lists import Lists
from mm.plan.search import Planned, SearchResult
from mm.plan.waits import waits_of

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
    changes: tuple[tuple[str, Planned], ...]
    """What each single change of the present layout gives, best first."""
    max_bytes: int | None


def layout_report(plan: LayoutPlan) -> str:
    """One sentence of advice, then the layouts, why the best is best, what limits it, and single changes."""
    best, rows = plan.found.ranking[0], [*plan.found.ranking]
    lines = [f"Advice    {_advice(plan, best)}", f"Based on  {plan.calibration}", f"Data      {_data(best)}", ""]
    table = [_HEAD, *(_row(str(number), one, plan) for number, one in enumerate(rows, 1))]
    if plan.present is not None:
        table.append(_row("now", plan.present, plan))
    lines += _aligned(table)
    vision, language = Lists.of(best.run.model).values()
    lines += ["", f"Lists     layout 1: image_encoder.vision_encoder.pipeline_num_layers: {vision}",
              f"          text_decoder.pipeline_num_layers: {language}"]
    lines += [f"Waits     {_waits(best)}"] if best.choice.num_stages > 1 else []
    lines += [f"Why not 2 {_difference(best, rows[1])}"] if len(rows) > 1 else []
    lines.append(f"Searched  {plan.found.num_considered} layouts in {plan.seconds:.1f} s; no layout that fits can "
                 f"take less than {plan.found.least:.4g} s, whatever its lists, so layout 1 is at most "
                 f"{best.step.seconds / plan.found.least - 1:.1%} slower than the best possible")
    if plan.max_bytes is not None:
        lines.append(f"Memory    at most {plan.max_bytes / 2**30:.1f} GiB per rank; no lists that fit were found for "
                     f"{plan.found.num_too_large} layouts")
    lines += [f"Refused   {reason}" for reason in plan.found.refusals[:2]]
    lines += _present_lines(plan)
    lines.append("All of these train on the same samples in each step, with the same loss and gradients.")
    return "\n".join(lines)


def _advice(plan: LayoutPlan, best: Planned) -> str:
    words = _words(best.choice, best.run.dp_size)
    if plan.present is None:
        return f"{words}: {best.step.seconds:.3g} s per step"
    seconds = f"{words}: {best.step.seconds:.3g} s per step"
    if plan.max_bytes is not None and plan.present.peak_bytes > plan.max_bytes:
        return f"{seconds}; the present layout does not fit; --write DIR writes the new one"
    gain = plan.present.step.seconds / best.step.seconds
    if gain < MIN_SPEEDUP:
        return f"keep the present layout: no layout that was found is more than {MIN_SPEEDUP - 1:.0%} faster"
    return (f"{seconds} instead of {plan.present.step.seconds:.3g} s, {gain:.2f} times as fast; --write DIR writes the "
            f"new layout")


def _words(choice: Choice, dp_size: int) -> str:
    chunks = f" with {choice.num_chunks} chunks each" if choice.num_chunks > 1 else ""
    sampler = "" if choice.sampler == AS_GIVEN else f", {choice.sampler}"
    sampler += ", encoder whole on tensor ranks" if choice.encoder != ENCODERS[0] else ""
    return (f"TP {choice.tp_size}, CP {choice.cp_size}, PP {choice.num_stages}{chunks}, DP {dp_size}, micro batch "
            f"{choice.micro_batch_size}{sampler}, recompute {choice.recompute}")


def _data(best: Planned) -> str:
    steps = best.workload.steps
    tokens, patches = (sum(float(one[:, COUNTS.index(name)].sum()) for step in steps for one in step) / len(steps)
                       for name in ("num_tokens", "num_patches"))
    return (f"{best.run.global_batch_size:,} samples per step: {tokens:,.0f} tokens and {patches:,.0f} patches, the "
            f"mean of {len(steps)} steps")


def _row(name: str, one: Planned, plan: LayoutPlan) -> tuple[str, ...]:
    choice, step, (low, high) = one.choice, one.step, one.step.interval
    peak = None if plan.device is None else plan.device.peak_flops
    mfu = "" if peak is None else f"{one.predictor.flops(one.workload) / step.seconds / one.run.world_size / peak:.1%}"
    tokens = one.workload.num_tokens / step.seconds / one.run.world_size
    return (name, *map(str, (choice.tp_size, choice.cp_size, choice.num_stages, choice.num_chunks, one.run.dp_size,
                             choice.micro_batch_size, choice.sampler, choice.encoder, choice.recompute)),
            f"{step.seconds:.4g}", f"{low:.3g} .. {high:.3g}", f"{tokens:,.0f}", mfu, f"{max(0.0, step.bubble):.1%}",
            f"{one.peak_bytes / 2**30:.1f}")


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _waits(one: Planned) -> str:
    found = waits_of(one.predictor, one.workload, one.run.model.placement())
    return (f"layout 1: {found.total:.1%} of the pipeline's time: filling and draining {found.filling:.1%}, uneven "
            f"stages {found.stages:.1%}, uneven microbatches {found.microbatches:.1%}, messages {found.messages:.1%}")


def _difference(best: Planned, other: Planned) -> str:
    """The largest reason why ``other`` is slower."""
    ours, theirs = best.step, other.step
    more = {
        "computation and collectives of the layers": theirs.busy - ours.busy,
        "waits in the pipeline": (theirs.pipeline - theirs.busy) - (ours.pipeline - ours.busy),
        "reduction of gradients": theirs.reduction - ours.reduction, "update": theirs.update - ours.update,
    }
    name, share = max(more, key=more.__getitem__), theirs.seconds / ours.seconds - 1
    uncertain = f", which is less than the {ours.error:.0%} error of predictions" if share < ours.error else ""
    return f"{share:+.1%}{uncertain}; most of it: {name}, {more[name]:+.3g} s"


def _present_lines(plan: LayoutPlan) -> list[str]:
    if plan.present_problems:
        return ["Now       the present layout is not legal: " + "; ".join(plan.present_problems)]
    if plan.present is None:
        return ["Now       the calibration lacks blocks of the present layout"]
    gains = [(what, plan.present.step.seconds / one.step.seconds - 1) for what, one in plan.changes]
    helpful = [f"{what} ({gain:+.1%} speed)" for what, gain in gains if gain > 0.005]
    if not helpful:
        return ["Now       no single change of the present layout makes it more than 0.5 % faster"]
    return [f"Now       the one change that gains most: {helpful[0]}"
            f"{'; others: ' + ', '.join(helpful[1:4]) if len(helpful) > 1 else ''}"]
