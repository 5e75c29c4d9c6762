"""The parts of a step, predicted or measured: both are timelines."""

from collections.abc import Sequence
from dataclasses import dataclass

from mm.parallel.activity import Work
from mm.timeline.spans import COMPUTING, ActivitySpan, RankRecord, StepTimeline, extent, seconds_of


@dataclass(frozen=True)
class StepParts:
    """Seconds of one step of all ranks; the four parts sum to it."""

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
    begins = max(last, *(_update_begins(record, last) for record in records))
    data = min(first - start, max(seconds_of(record.spans, {Work.DATA}) for record in records))
    stages = sorted({record.pp_rank for record in records})
    # on each stage, count the rank that waits least for its peers
    inside = max(min(_reducing(one.spans) for one in records if one.pp_rank == stage) for stage in stages)
    return StepParts(data=data, pipeline=last - first - inside, reduction=begins - last + inside,
                     update=end - begins + first - start - data)


def _reducing(spans: Sequence[ActivitySpan]) -> float:
    """Seconds of reductions inside backward passes."""
    return seconds_of((one for one in spans if one.activity.microbatch is not None), {Work.REDUCTION})


def _update_begins(record: RankRecord, otherwise: float) -> float:
    return min((span.start for span in record.spans if span.activity.work in (Work.UPDATE, Work.UPDATE_WAIT)),
               default=otherwise)


def unrecorded(spans: Sequence[ActivitySpan]) -> float:
    """Seconds between the first and the last pass of a rank in which nothing is recorded."""
    own = [span for span in spans if span.activity.work in COMPUTING]
    if not own:
        return 0.0
    begins, ends = own[0].start, own[-1].end
    return max(0.0, ends - begins - sum(span.seconds for span in spans if begins <= span.start < ends))
