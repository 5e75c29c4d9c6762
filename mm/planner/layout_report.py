"""The report of ``mm-plan`` without a command: for the terminal, and as an HTML page with the timeline of a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mm.config.run import Run
from mm.data.lengths import HasLengths
from mm.device.platform import KnownDevice
from mm.errors import counted
from mm.plan.choices import AS_GIVEN, ENCODERS, Choice, learning_changes
from mm.plan.costs import COUNTS
from mm.plan.drawn import predicted_timeline
from mm.plan.lists import Lists
from mm.plan.predict import Predictor
from mm.plan.search import Planned, SearchResult
from mm.report import Bars, Histogram, Report, Table, page
from mm.timeline.picture import draw

MIN_SPEEDUP = 1.01
"""Least speedup for which the report advises a change."""
_HEAD = ("", "TP", "CP", "PP", "VPP", "DP", "MBS", "samples", "encoder", "recompute", "step, s", "90% interval",
         "tok/s/device", "MFU", "waits", "GiB")
_MAX_SAMPLES = 20_000
"""Samples in the histograms of the page."""
_MAX_CHANGES = 5


@dataclass(frozen=True)
class LayoutPlan:
    """What the report shows."""

    run: Run
    """The run as given."""
    lengths: HasLengths
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


def layout_report(plan: LayoutPlan) -> Report:
    """One sentence of advice, why the best is best and what limits it, then the layouts and possible changes."""
    best, *others = plan.found.ranking
    rows = [_row(str(number), one, plan) for number, one in enumerate(plan.found.ranking, 1)]
    rows += [] if plan.present is None else [_row("now", plan.present, plan)]
    same = "" if _changed(plan) else ": all train on the same samples in each step, with the same loss and gradients"
    tables = [Table(f"Layouts{same}", _HEAD, tuple(rows))]
    if changes := _gains(plan)[:_MAX_CHANGES]:
        tables.append(Table("Single changes of the present layout", ("change", "step, s", "speed"), tuple(
            (what, f"{seconds:.4g}", f"{gain:+.1%}") for what, seconds, gain in changes)))
    limit = None if plan.max_bytes is None else plan.max_bytes / 2**30
    memory = tuple((f"stage {stage}", num_bytes / 2**30) for stage, num_bytes in enumerate(best.stage_bytes))
    model = Path(plan.run.args.mm_model).name
    return Report(
        f"Layouts for {counted(plan.run.world_size, 'rank')} and {model}", tuple(_facts(plan, best, others)),
        tuple(tables), bars=(Bars("Memory of layout 1", "GiB per rank", memory, limit),))


def layout_page(plan: LayoutPlan, report: Report) -> str:
    """The report as a page of its own, with the lengths of the samples and the predicted step of layout 1."""
    best = plan.found.ranking[0]
    numbers = np.arange(len(plan.lengths))
    if len(numbers) > _MAX_SAMPLES:
        numbers = np.sort(np.random.default_rng(0).choice(numbers, _MAX_SAMPLES, replace=False))
    sizes = plan.lengths.of(numbers)
    histograms = (Histogram.of("Tokens", "per sample", sizes.num_tokens),
                  Histogram.of("Patches", "per sample", sizes.num_patches))
    predictor = Predictor(best.run, best.predictor.calibration)
    entering = predictor.entering(predictor.slowest(best.workload.steps[0]))
    step = draw([predicted_timeline(predictor, [entering], 1)])
    body = replace(report, histograms=histograms).body()
    return page(report.title, f'{body}\n<h2>The slowest replica of layout 1 in a step</h2>\n'
                              f'<div class="timeline">{step}</div>')


def _facts(plan: LayoutPlan, best: Planned, others: Sequence[Planned]) -> Iterator[tuple[str, str]]:
    yield "Advice", _advice(plan, best)
    yield from (("Learning", f"not as in the given run: {change}") for change in _changed(plan))
    yield "Based on", plan.calibration
    yield "Data", _data(best)
    vision, language = Lists.of(best.run.model).values()
    yield "ViT", f"layout 1: image_encoder.vision_encoder.pipeline_num_layers: {vision}"
    yield "LLM", f"layout 1: text_decoder.pipeline_num_layers: {language}"
    if others:
        yield "Why not 2", _difference(best, others[0])
    yield "Searched", (
        f"{counted(plan.found.num_considered, 'layout')} in {plan.seconds:.1f} s; no layout that fits can take less "
        f"than {plan.found.least:.4g} s, whatever its lists, so layout 1 is at most "
        f"{best.step.seconds / plan.found.least - 1:.1%} slower than the best possible")
    if plan.run.args.shards_weights:
        yield "Stages", ("only layouts with one pipeline stage: optim_grads_params works with no more; give "
                         "--data-parallel-sharding-strategy optim_grads to search the others")
    if plan.max_bytes is not None:
        how_many = counted(plan.found.num_too_large, "layout")
        yield "Memory", (f"at most {plan.max_bytes / 2**30:.1f} GiB per rank"
                         f"{f'; no lists that fit were found for {how_many}' if plan.found.num_too_large else ''}")
    yield from (("Refused", reason) for reason in plan.found.refusals[:2])
    yield "Now", _now(plan)


def _advice(plan: LayoutPlan, best: Planned) -> str:
    seconds = f"{_words(best.choice, best.run)}: {best.step.seconds:.3g} s per step"
    if plan.present is None:
        return seconds
    if plan.max_bytes is not None and plan.present.peak_bytes > plan.max_bytes:
        return f"{seconds}; the present layout does not fit; --write DIR writes the new one"
    gain = plan.present.step.seconds / best.step.seconds
    if gain < MIN_SPEEDUP:
        return f"keep the present layout: no layout that was found is more than {MIN_SPEEDUP - 1:.0%} faster"
    return (f"{seconds} instead of {plan.present.step.seconds:.3g} s, {gain:.2f} times as fast; --write DIR writes the "
            f"new layout")


def _changed(plan: LayoutPlan) -> list[str]:
    """How some of the layouts learn otherwise than the run."""
    return [*dict.fromkeys(change for one in plan.found.ranking for change in learning_changes(one.choice, plan.run))]


def _words(choice: Choice, run: Run) -> str:
    chunks = f" with {choice.num_chunks} chunks each" if choice.num_chunks > 1 else ""
    num_together = run.model.encoder_batch_size
    sampler = "" if choice.sampler == AS_GIVEN else f", {choice.sampler}"
    sampler += ", encoder whole on tensor ranks" if choice.encoder != ENCODERS[0] else ""
    sampler += f", images of {num_together} microbatches encoded together" if num_together > 1 else ""
    return (f"TP {choice.tp_size}, CP {choice.cp_size}, PP {choice.num_stages}{chunks}, DP {run.dp_size}, micro batch "
            f"{choice.micro_batch_size}{sampler}, recompute {choice.recompute}")


def _data(best: Planned) -> str:
    steps = best.workload.steps
    tokens, patches = (sum(float(one[:, COUNTS.index(name)].sum()) for step in steps for one in step) / len(steps)
                       for name in ("num_tokens", "num_patches"))
    return (f"{counted(best.run.global_batch_size, 'sample')} per step: {tokens:,.0f} tokens and {patches:,.0f} "
            f"patches, the mean of {counted(len(steps), 'step')}")


def _row(name: str, one: Planned, plan: LayoutPlan) -> tuple[str, ...]:
    choice, step, (low, high) = one.choice, one.step, one.step.interval
    peak = None if plan.device is None else plan.device.peak_flops
    mfu = "" if peak is None else f"{one.predictor.flops(one.workload) / step.seconds / one.run.world_size / peak:.1%}"
    tokens = one.workload.num_tokens / step.seconds / one.run.world_size
    num_together = one.run.model.encoder_batch_size
    encoder = choice.encoder + (f" x {num_together}" if num_together > 1 else "")
    return (name, *map(str, (choice.tp_size, choice.cp_size, choice.num_stages, choice.num_chunks, one.run.dp_size,
                             choice.micro_batch_size, choice.sampler, encoder, choice.recompute)),
            f"{step.seconds:.4g}", f"{low:.3g} .. {high:.3g}", f"{tokens:,.0f}", mfu, f"{max(0.0, step.bubble):.1%}",
            f"{one.peak_bytes / 2**30:.1f}")


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


def _now(plan: LayoutPlan) -> str:
    if plan.present_problems:
        return "the present layout is not legal: " + "; ".join(plan.present_problems)
    if plan.present is None:
        return "the calibration lacks blocks of the present layout"
    what, _, gain = next(iter(_gains(plan)), ("", 0.0, 0.0))
    if gain < MIN_SPEEDUP - 1:
        return f"no single change of the present layout makes it more than {MIN_SPEEDUP - 1:.0%} faster"
    return f"the one change that gains most: {what} ({gain:+.1%} speed)"


def _gains(plan: LayoutPlan) -> list[tuple[str, float, float]]:
    """What to change in the present layout, the step's seconds after it, and the share of speed that it gains; only
    changes whose gain is not 0.0% when rounded."""
    if plan.present is None:
        return []
    seconds = plan.present.step.seconds
    found = ((what, one.step.seconds, seconds / one.step.seconds - 1) for what, one in plan.changes)
    return [one for one in found if one[2] >= 0.0005]
