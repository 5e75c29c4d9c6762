"""A predicted step as the timeline that ``--profile-pipeline`` would measure, for the same picture and trace."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mm.parallel.activity import Activity, Work
from mm.parallel.simulation import TimedStep, as_costs, as_messages, simulate
from mm.placement import Placement
from mm.plan.costs import image_kinds
from mm.plan.predict import Predictor
from mm.timeline.spans import ActivitySpan, RankRecord, StepSettings, StepTimeline, held
from mm.weights.table import VISION_PLACES

_FORWARD, _BACKWARD = 0, 1


def predicted_timeline(predictor: Predictor, replicas: Sequence[np.ndarray], iteration: int) -> StepTimeline:
    """One step with these microbatches of each replica, in the order in which they enter the pipeline.

    The first rank of each stage of each replica stands for all: tensor- and context-parallel ranks do the same.
    """
    placement = predictor.run.model.placement()
    all_passes = [_Passes.of(predictor, placement, counts) for counts in replicas]
    timelines = [one.timeline() for one in all_passes]
    end = max(steps[-1].end for timeline in timelines for steps in timeline)
    reduction, update = predictor.after_pipeline(placement, [replicas])
    num_ranks = predictor.run.tp_size * predictor.run.cp_size
    records = []
    for dp_rank, (passes, timeline) in enumerate(zip(all_passes, timelines, strict=True)):
        for stage, steps in enumerate(timeline):
            spans = (*passes.spans(steps, stage), *_ending(steps[-1].end, end, reduction, update))
            records.append(RankRecord(
                num_ranks * (dp_rank + len(replicas) * stage), stage, dp_rank, 0,
                held(spec for spec in placement.slots if spec.stage == stage), (), spans))
    records.sort(key=lambda record: record.rank)
    run = predictor.run
    settings = StepSettings.of(run.args, run.model, run.world_size)
    return StepTimeline(iteration, tuple(records), settings, is_predicted=True)


@dataclass(frozen=True)
class _Passes:
    """The passes of one replica in one step, which ``mm.plan.predict`` only adds up."""

    num_stages: int
    vision: np.ndarray
    """Seconds of the ViT's blocks [direction, microbatch, slot]."""
    language: np.ndarray
    """Those of the LLM's."""
    inside: np.ndarray
    """The host's work besides its blocks, while a pass is recorded; 0 where a slot has no such pass."""
    after: np.ndarray
    """The host's work after each pass, which is not recorded."""
    messages: np.ndarray

    @classmethod
    def of(cls, predictor: Predictor, placement: Placement, counts: np.ndarray) -> "_Passes":
        """The passes of the microbatches ``counts`` [num_microbatches, num_counts]."""
        costs, here = predictor.costs, predictor.shared(counts)
        is_in = costs.slots_of([placement])
        is_vision = np.array([place in VISION_PLACES for place, _ in costs.places])
        of_blocks = predictor.of_blocks(counts, placement)
        vision, language = (np.einsum("dmb,bs->dms", of_blocks * one, is_in[..., 0]) for one in (is_vision, ~is_vision))
        is_passed = costs.is_passed(is_in)[..., 0][:, image_kinds(here)]
        inside = predictor.calibration.chunk_pass
        return cls(placement.num_stages, vision, language, inside * is_passed, (costs.chunk_pass - inside) * is_passed,
                   predictor.messages(here, [placement])[..., 0])

    def timeline(self) -> list[list[TimedStep]]:
        """What each stage does and when."""
        costs = as_costs(self.vision + self.language + self.inside + self.after)
        return simulate(costs, self.num_stages, as_messages(self.messages))

    def spans(self, steps: Sequence[TimedStep], stage: int) -> Iterator[ActivitySpan]:
        """The passes of one stage, and the waits for messages between them."""
        now = 0.0
        for step in steps:
            if step.start > now:
                yield ActivitySpan(Activity(Work.EXCHANGE, step.chunk, step.microbatch), now, step.start)
            at = _FORWARD if step.is_forward else _BACKWARD, step.microbatch, step.chunk * self.num_stages + stage
            vision, language, inside = (float(one[at]) for one in (self.vision, self.language, self.inside))
            pieces = [(Work.BACKWARD, inside + vision + language)]
            if step.is_forward:
                pieces = [(Work.FORWARD, inside), (Work.VISION_FORWARD, vision), (Work.LANGUAGE_FORWARD, language)]
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
