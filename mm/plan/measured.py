"""A measured step in the numbers of a prediction: its parts, and the seconds of every pass."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mm.parallel.activity import Work
from mm.plan.passes import BACKWARD, FORWARD
from mm.timeline.spans import COMPUTING, ActivitySpan, RankRecord, StepTimeline, extent, seconds_of


@dataclass(frozen=True)
class MeasuredStep:
    """One step of all ranks.  The four parts sum to its seconds."""

    data: float
    """Waits for data before the first pass."""
    pipeline: float
    """From the first forward to the last backward of any rank, without the reductions in between."""
    reduction: float
    """After the last backward, and, if gradients are sharded, in the passes."""
    update: float
    """The update, with the clearing of gradients at the start of the step."""
    recorded: tuple[np.ndarray, ...]
    """By replica, the seconds of each pass [direction, microbatch, slot], averaged over the ranks of the stage."""
    between: np.ndarray
    """By stage, the seconds of the pipeline in which nothing is recorded on it: the host's work between its passes.
    """
    waits: np.ndarray
    """By stage, the rest: messages, and waits for its first and after its last pass."""

    @property
    def seconds(self) -> float:
        return self.data + self.pipeline + self.reduction + self.update


def measured_step(timeline: StepTimeline, num_stages: int, num_chunks: int) -> MeasuredStep:
    """The numbers of ``timeline``, measured with this many stages and chunks."""
    records = timeline.records
    (start, end), (first, last) = extent(records), extent(records, COMPUTING)
    begins = max(last, *(_update_begins(record, last) for record in records))
    data = min(first - start, max(seconds_of(record.spans, {Work.DATA}) for record in records))
    stages = [[record for record in records if record.pp_rank == stage] for stage in range(num_stages)]
    between = np.array([np.mean([unrecorded(one.spans) for one in stage]) for stage in stages])
    busy = np.array([np.mean([seconds_of(one.spans, COMPUTING) for one in stage]) for stage in stages])
    replicas = sorted({record.dp_rank for record in records})
    # on each stage, count the rank that waits least for its peers
    inside = max(min(_reducing(one.spans) for one in stage) for stage in stages)
    pipeline = last - first - inside
    return MeasuredStep(
        data=data, pipeline=pipeline, reduction=begins - last + inside, update=end - begins + first - start - data,
        recorded=tuple(_recorded([one for one in records if one.dp_rank == replica], num_stages, num_chunks)
                       for replica in replicas),
        between=between, waits=pipeline - busy - between)


def _reducing(spans: Sequence[ActivitySpan]) -> float:
    """Seconds of reductions inside backward passes."""
    return seconds_of((one for one in spans if one.activity.microbatch is not None), {Work.REDUCTION})


def _update_begins(record: RankRecord, otherwise: float) -> float:
    return min((span.start for span in record.spans if span.activity.work in (Work.UPDATE, Work.UPDATE_WAIT)),
               default=otherwise)


def _recorded(records: Sequence[RankRecord], num_stages: int, num_chunks: int) -> np.ndarray:
    """The seconds of the passes of one replica."""
    found = np.zeros((2, len(records[0].microbatches), num_stages * num_chunks))
    num_ranks = Counter(record.pp_rank for record in records)
    for record in records:
        for span in record.spans:
            activity = span.activity
            if activity.work in COMPUTING and activity.microbatch is not None and activity.chunk is not None:
                direction = BACKWARD if activity.work is Work.BACKWARD else FORWARD
                at = direction, activity.microbatch, activity.chunk * num_stages + record.pp_rank
                found[at] += span.seconds / num_ranks[record.pp_rank]
    return found


def unrecorded(spans: Sequence[ActivitySpan]) -> float:
    """Seconds between the first and the last pass of a rank in which nothing is recorded."""
    own = [span for span in spans if span.activity.work in COMPUTING]
    if not own:
        return 0.0
    begins, ends = own[0].start, own[-1].end
    return max(0.0, ends - begins - sum(span.seconds for span in spans if begins <= span.start < ends))
