"""A predicted step as the timeline that ``--profile-pipeline`` would measure, for the same picture and trace."""

from collections.abc import Iterator, Sequence

import numpy as np

from mm.parallel.activity import Activity, Work
from mm.parallel.simulation import TimedStep
from mm.plan.passes import BACKWARD, FORWARD, Kinds, Passes
from mm.plan.predict import Predictor
from mm.timeline.spans import ActivitySpan, RankRecord, StepSettings, StepTimeline, held


def predicted_timeline(predictor: Predictor, replicas: Sequence[np.ndarray], iteration: int) -> StepTimeline:
    """One step with these microbatches of each replica, in the order in which they enter the pipeline.

    The first rank of each stage of each replica stands for all: tensor- and context-parallel ranks do the same.
    """
    kinds, placement = Kinds.of(predictor), predictor.run.model.placement()
    all_passes = [Passes.of(predictor, kinds, counts) for counts in replicas]
    timelines = [one.timeline(one.recorded(), [one.between] * placement.num_stages) for one in all_passes]
    end = max(steps[-1].end for timeline in timelines for steps in timeline)
    reduction, update = predictor.after_pipeline(placement, [replicas])
    num_ranks = predictor.run.tp_size * predictor.run.cp_size
    records = []
    for dp_rank, (passes, timeline) in enumerate(zip(all_passes, timelines, strict=True)):
        for stage, steps in enumerate(timeline):
            spans = (*_spans(steps, stage, passes, kinds), *_ending(steps[-1].end, end, reduction, update))
            records.append(RankRecord(
                num_ranks * (dp_rank + len(replicas) * stage), stage, dp_rank, 0,
                held(spec for spec in placement.slots if spec.stage == stage), (), spans))
    records.sort(key=lambda record: record.rank)
    run = predictor.run
    settings = StepSettings.of(run.args, run.model, run.world_size)
    return StepTimeline(iteration, tuple(records), settings, is_predicted=True)


def _spans(steps: Sequence[TimedStep], stage: int, passes: Passes, kinds: Kinds) -> Iterator[ActivitySpan]:
    """The passes of one stage, and the waits for messages between them."""
    now, towers = 0.0, np.array(kinds.is_vision)
    for step in steps:
        slot = step.chunk * passes.placement.num_stages + stage
        if step.start > now:
            yield ActivitySpan(Activity(Work.EXCHANGE, step.chunk, step.microbatch), now, step.start)
        direction = FORWARD if step.is_forward else BACKWARD
        of_kinds = passes.of_kinds[direction, step.microbatch, slot]
        inside = passes.inside * float(passes.is_passed[direction, step.microbatch, slot])
        pieces = [(Work.BACKWARD, inside + float(of_kinds.sum()))]
        if step.is_forward:
            pieces = [(Work.FORWARD, inside), (Work.VISION_FORWARD, float(of_kinds[towers].sum())),
                      (Work.LANGUAGE_FORWARD, float(of_kinds[~towers].sum()))]
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
