"""A predicted step as the timeline that ``--profile-pipeline`` would measure, and the parts of either."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mm.cost.model_states import stage_sizes
from mm.cost.predict import Predictor, mean_passes
from mm.parallel.activity import Activity, Work
from mm.parallel.simulation import TimedStep, as_costs, as_messages, simulate
from mm.timeline.spans import COMPUTING, ActivitySpan, RankRecord, StepSettings, StepTimeline, extent, held, seconds_of

_FORWARD, _BACKWARD = 0, 1


def predicted_timeline(predictor: Predictor, replicas: Sequence[np.ndarray], iteration: int) -> StepTimeline:
    """One step with these microbatches of each replica, in the order in which they enter the pipeline.

    The first rank of each stage of each replica stands for all: tensor- and context-parallel ranks do the same.
    """
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
    """The passes of one replica: seconds of the ViT's and the LLM's blocks [2, direction, microbatch, slot], and what
    each stage does and when."""
    costs, placement = predictor.costs, predictor.run.model.placement()
    of_blocks, is_in = predictor.of_blocks(counts, placement), costs.slots_of([placement])[..., 0]
    towers = np.stack([np.tensordot(of_blocks * one, is_in, 1) for one in (costs.is_vision, ~costs.is_vision)])
    messages = predictor.messages(predictor.shared(counts), [placement])[..., 0]
    return towers, simulate(as_costs(towers.sum(axis=0)), placement.num_stages, as_messages(messages))


def _spans(towers: np.ndarray, steps: Sequence[TimedStep], stage: int, num_stages: int) -> Iterator[ActivitySpan]:
    """The passes of one stage, and the waits for messages between them."""
    now = 0.0
    for step in steps:
        if step.start > now:
            yield ActivitySpan(Activity(Work.EXCHANGE, step.chunk, step.microbatch), now, step.start)
        at = _FORWARD if step.is_forward else _BACKWARD, step.microbatch, step.chunk * num_stages + stage
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


@dataclass(frozen=True)
class StepParts:
    """Seconds of one step of all ranks, predicted or measured; the four parts sum to it."""

    data: float
    """Waits for data before the first pass."""
    pipeline: float
    """From the first forward to the last backward of any rank, without the reductions in between."""
    reduction: float
    """After the last backward, and, if gradients are sharded, in the passes."""
    update: float
    """The update, with the clearing of gradients at the start of the step."""

    @property
    def seconds(self) -> float:
        return self.data + self.pipeline + self.reduction + self.update


def step_parts(timeline: StepTimeline) -> StepParts:
    """The parts of ``timeline``."""
    records = timeline.records
    (start, end), (first, last) = extent(records), extent(records, COMPUTING)
    begins = max(last, *(min((span.start for span in record.spans if span.activity.work in (
        Work.UPDATE, Work.UPDATE_WAIT)), default=last) for record in records))
    data = min(first - start, max(seconds_of(record.spans, {Work.DATA}) for record in records))
    # on each stage, count the rank that waits least for its peers
    inside = max(min(_reducing(one.spans) for one in records if one.pp_rank == stage)
                 for stage in {record.pp_rank for record in records})
    return StepParts(data=data, pipeline=last - first - inside, reduction=begins - last + inside,
                     update=end - begins + first - start - data)


def _reducing(spans: Sequence[ActivitySpan]) -> float:
    """Seconds of reductions inside backward passes."""
    return seconds_of((one for one in spans if one.activity.microbatch is not None), {Work.REDUCTION})
