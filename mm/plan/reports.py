"""The texts of ``mm-plan predict``, ``compare`` and ``lists``, and the timeline of a predicted step."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from mm.checkpoint.hf_config import differences
from mm.config.run import Run
from mm.cost.calibration import Calibration
from mm.cost.predict import Predictor, StepPrediction, mean_passes
from mm.cost.stage_memory import stage_sizes
from mm.cost.workload import Workload, counts_of
from mm.errors import counted, refuse
from mm.parallel.activity import Activity, Work
from mm.parallel.pipeline_schedule import TimedStep, as_costs, simulate
from mm.plan.lists import RatedLists
from mm.report import Report, Table
from mm.timeline import (
    COMPUTING,
    ActivitySpan,
    RankRecord,
    StepSettings,
    StepTimeline,
    extent,
    held,
    measured_steps,
    seconds_of,
    write_timeline,
)


def predicted_timeline(predictor: Predictor, replicas: Sequence[np.ndarray], iteration: int) -> StepTimeline:
    """One step with these microbatches of each replica, in pipeline order, on the first rank of each stage."""
    run, placement = predictor.run, predictor.run.model.placement()
    passes = [_passes(predictor, counts) for counts in replicas]
    end = max(steps[-1].end for _, timeline in passes for steps in timeline)
    reduction, update = predictor.after(stage_sizes(run, placement), mean_passes([replicas]))
    records = []
    for dp_rank, (towers, timeline) in enumerate(passes):
        for stage, steps in enumerate(timeline):
            spans = (*_spans(towers, steps, stage, placement.num_stages),
                     *_ending(steps[-1].end, end, reduction, update))
            records.append(RankRecord(
                run.tp_size * run.cp_size * (dp_rank + len(replicas) * stage), stage, dp_rank, 0,
                held(spec for spec in placement.slots if spec.stage == stage), (), spans))
    records.sort(key=lambda record: record.rank)
    settings = StepSettings.of(run.args, run.model, run.world_size)
    return StepTimeline(iteration, tuple(records), settings, is_predicted=True)


def _passes(predictor: Predictor, counts: np.ndarray) -> tuple[np.ndarray, list[list[TimedStep]]]:
    """The seconds of one replica's ViT and LLM [2, direction, microbatch, slot], and what each stage does when."""
    costs, placement = predictor.costs, predictor.run.model.placement()
    of_blocks, is_in = predictor.of_blocks(counts, placement), costs.slots_of([placement])[..., 0]
    towers = np.stack([np.tensordot(of_blocks * one, is_in, 1) for one in (costs.is_vision, ~costs.is_vision)])
    messages = predictor.messages(predictor.shared(counts), [placement])[..., 0]
    return towers, simulate(as_costs(towers.sum(axis=0)), placement.num_stages, as_costs(messages))


def _spans(towers: np.ndarray, steps: Sequence[TimedStep], stage: int, num_stages: int) -> Iterator[ActivitySpan]:
    """The passes of one stage, and the waits for messages between them."""
    now = 0.0
    for step in steps:
        if step.start > now:
            yield ActivitySpan(Activity(Work.EXCHANGE, step.chunk, step.microbatch), now, step.start)
        at = int(not step.is_forward), step.microbatch, step.chunk * num_stages + stage
        vision, language = towers[(slice(None), *at)].tolist()
        pieces = [(Work.BACKWARD, vision + language)]
        if step.is_forward:
            pieces = [(Work.VISION_FORWARD, vision), (Work.LANGUAGE_FORWARD, language)]
        now = step.start
        for work, seconds in pieces:
            if seconds > 0:
                yield ActivitySpan(Activity(work, step.chunk, step.microbatch), now, now + seconds)
            now += seconds
        now = step.end


def _ending(own_end: float, end: float, reduction: float, update: float) -> Iterator[ActivitySpan]:
    """A stage reduces its gradients when its passes have ended, and waits for the others before the update."""
    reduced = own_end + reduction
    if reduction:
        yield ActivitySpan(Activity(Work.REDUCTION), own_end, reduced)
    if end + reduction > reduced:
        yield ActivitySpan(Activity(Work.UPDATE_WAIT), reduced, end + reduction)
    if update:
        yield ActivitySpan(Activity(Work.UPDATE), end + reduction, end + reduction + update)


def step_parts(timeline: StepTimeline) -> dict[str, float]:
    """Seconds of a step of all ranks, predicted or measured, by part.

    data: waits before the first pass.  pipeline: from the first forward to the last backward, without reductions in
    between.  reduction: after it, and those in between.  update: with the clearing of gradients at the start.
    """
    records = timeline.records
    (start, end), (first, last) = extent(records), extent(records, COMPUTING)
    begins = max(last, *(min((span.start for span in record.spans if span.activity.work in (
        Work.UPDATE, Work.UPDATE_WAIT)), default=last) for record in records))
    data = min(first - start, max(seconds_of(record.spans, {Work.DATA}) for record in records))
    # on each stage, count the rank that waits least for its peers
    inside = max(min(seconds_of((span for span in one.spans if span.activity.microbatch is not None), {Work.REDUCTION})
                     for one in records if one.pp_rank == stage) for stage in {record.pp_rank for record in records})
    return {"data": data, "pipeline": last - first - inside, "reduction": begins - last + inside,
            "update": end - begins + first - start - data}


_TIMELESS = ("rates", "init_method_std", "max_position_embeddings")
"""Fields of a model that do not affect the time of a step."""


def prediction_report(run: Run, calibration: Calibration, workload: Workload, step: StepPrediction) -> str:
    """Step time with its interval, what it consists of, and what the pipeline waits for."""
    low, high = step.interval
    lines = [
        f"Step      {step.seconds:.4g} s; nine of ten steps take {low:.4g} to {high:.4g} s",
        f"Parts     pipeline {step.pipeline:.4g} s, gradient reduction {step.reduction:.4g} s, update "
        f"{step.update:.4g} s",
        f"Tokens    {workload.mean('num_tokens') / step.seconds / run.world_size:,.0f} per second and rank",
    ]
    if run.num_stages > 1:
        lines.append(f"Stages    wait for {step.bubble:.1%} of the pipeline's time; {1 - step.busy / step.even:.1%} "
                     f"with equal stages and microbatches")
    num_processes = counted(calibration.machine.num_processes, "process", "processes")
    lines.append(f"Measured  on {calibration.machine.device}, {num_processes} at a time, {calibration.date}")
    return "\n".join(lines)


def compared(predictor: Predictor, folder: Path, pictures: Path | None) -> str:
    """Compare the measured steps of this run in ``folder`` with their prediction; draw both in ``pictures``."""
    measured = measured_steps(folder)
    refuse(problem for one in measured for problem in _problems(folder / f"{one.name}.json", one, predictor.run))
    both = [(predicted_timeline(predictor, [counts_of(batch) for batch in one.microbatches], one.iteration), one)
            for one in measured]
    paths = [] if pictures is None else [write_timeline(pictures, "--timeline", pair) for pair in both]
    return "\n\n".join([_comparison(both), *(f"wrote {path}, .json and .svg" for path in paths)])


def _comparison(steps: Sequence[tuple[StepTimeline, StepTimeline]]) -> str:
    """Seconds of the predicted and the measured steps, and of their parts, averaged over the steps."""
    predicted, measured = ([step_parts(one[side]) for one in steps] for side in range(2))
    ours, theirs = (fmean(sum(one.values()) for one in side) for side in (predicted, measured))
    rows = tuple((name, *(f"{fmean(one[name] for one in side):.4f}" for side in (predicted, measured)))
                 for name in measured[0])
    return Report(
        f"The prediction differs from the measured step by {ours / theirs - 1:+.1%}",
        (("Step", f"measured {theirs:.4g} s, predicted {ours:.4g} s"),
         ("Measured", f"iteration{'s' * (len(steps) > 1)} {', '.join(str(one.iteration) for _, one in steps)}")),
        (Table("A step, in seconds", ("", "predicted", "measured"), rows),)).text()


def _problems(path: Path, timeline: StepTimeline, run: Run) -> Iterator[str]:
    """How the settings of a measured step differ from those of ``run``."""
    expected, found = StepSettings.of(run.args, run.model, run.world_size), timeline.settings
    pairs = [(name, was, getattr(expected, name)) for name, was in vars(found).items()
             if name != "model" and was != getattr(expected, name)]
    pairs += [(one.json_name, one.first, one.second) for one in differences(found.model, expected.model, _TIMELESS)]
    for name, was, now in pairs:
        yield (f"{path}: was measured with {name} = {was!r}, but the flags and the model JSON say {now!r}; give those "
               f"of the measured run")


def lists_report(run: Run, present: RatedLists, best: RatedLists, even: float, has_times: bool) -> str:
    """The present lists, better ones if there are any, and equal stages as a reference."""
    lines = [_rated("Present", present, has_times)]
    if best.lists == present.lists:
        lines.append("Best      the search finds no better lists")
    else:
        vision, language = best.lists.values()
        lines += [
            _rated("Best", best, has_times),
            f"Gain      {present.seconds / best.seconds - 1:.1%} more samples per second from the pipeline; write into "
            f"{run.args.mm_model}",
            f"          image_encoder.vision_encoder.pipeline_num_layers: {vision}",
            f"          text_decoder.pipeline_num_layers: {language}",
        ]
    lines.append(f"Ideal     equal stages and microbatches would reach {present.busy / even:.1%} utilization; a frozen "
                 f"ViT, whose stage runs ahead, can do better")
    if not has_times:
        lines.append("Unit      every FLOP takes the same time, messages take none; --calibration uses measured times")
    return "\n".join(lines)


def _rated(name: str, one: RatedLists, has_times: bool) -> str:
    vision, language = one.lists.values()
    seconds = f"pipeline {one.seconds:.4g} s, " if has_times else ""
    return (f"{name.ljust(9)} ViT {vision}, LLM {language}: {seconds}stages used {one.busy / one.seconds:.1%}, fullest "
            f"rank {one.peak_bytes / 2**30:.2f} GiB")
