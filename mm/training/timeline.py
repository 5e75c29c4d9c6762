"""What each rank did during one step, and when: from moments to spans that do not overlap, shares, and a trace.

Pure: seconds go in, numbers and JSON come out.  What measured them, and how they came here, is not known here.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mm.parallel.activity import Activity, Work

COMPUTING = frozenset({Work.INPUTS, Work.FORWARD, Work.VISION_FORWARD, Work.LANGUAGE_FORWARD, Work.BACKWARD})
"""What a stage is there for.  A pipeline whose stages did nothing else from first to last would have no bubble."""

TIMED = tuple(work for work in Work if work is not Work.SAVE)
"""What a step consists of."""

_INSTANT = 1e-12
Meetings = tuple[tuple[float, float], ...]
"""When a rank came to each of some barriers, and when it left, by its own clock."""


@dataclass(frozen=True)
class Moment:
    """An activity begins; or, without one, the innermost activity ends."""

    seconds: float
    begins: Activity | None


@dataclass(frozen=True)
class Span:
    """A rank is at one activity from ``start`` to ``end``, in seconds."""

    activity: Activity
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class RankRecord:
    """One rank's step."""

    rank: int
    pp_rank: int
    dp_rank: int
    tp_rank: int
    holds: str
    """What its stage holds, for people."""
    meetings: Meetings
    spans: tuple[Span, ...]
    """In order."""


@dataclass(frozen=True)
class Shares:
    """How one rank spent a step.  The first four are parts of the whole step and sum to 1."""

    busy: float
    """Forward and backward, with what prepares them."""
    waits: float
    """For messages, for data and for the reduction of gradients."""
    update: float
    """With its wait for the gradients' norm of all ranks."""
    idle: float
    """Nothing that was recorded."""
    bubble: float
    """Not busy, as a part of the time from the first forward to the last backward of any stage."""


def label(work: Work) -> str:
    """The name of a kind of work where spans do not overlap."""
    return "other forward" if work is Work.FORWARD else work.value


def seconds_key(work: Work) -> str:
    """The name of its time in metrics.jsonl."""
    return f"{work.name.lower()}_seconds"


def flat_spans(moments: Sequence[Moment]) -> tuple[Span, ...]:
    """Spans of the innermost activities; where none runs, there is none.

    Between two parts of one inner activity (layers of the LLM, and its loss) the outer one does nothing of its own.
    """
    spans: list[Span] = []
    running: list[Activity] = []
    for now, then in pairwise(moments):
        if now.begins is None:
            running.pop()
        else:
            running.append(now.begins)
        if not running:
            continue
        span = Span(running[-1], now.seconds, max(now.seconds, then.seconds))
        last = spans[-2:]
        if len(running) > 1 and [one.activity for one in last] == [running[-1], running[-2]] and (
                last[0].end == last[1].start):
            span = replace(span, start=last[0].start)
            del spans[-2:]
        spans.append(span)
    return tuple(spans)


def seconds_of(spans: Iterable[Span], works: Iterable[Work]) -> float:
    """Time spent at these kinds of work."""
    return sum(span.seconds for span in spans if span.activity.work in works)


def clock_offset(ours: Meetings, reference: Meetings) -> float:
    """How far our clock is ahead of the reference's, from barriers that both have passed; 0 where that is possible.

    Nobody leaves a barrier before all have come.  On one machine all clocks are one, and 0 is always possible.
    """
    pairs = list(zip(ours, reference, strict=True))
    least = max((came - left for (came, _), (_, left) in pairs), default=0.0)
    most = min((left - came for (_, left), (came, _) in pairs), default=0.0)
    return 0.0 if least <= 0.0 <= most else (least + most) / 2


def aligned(records: Sequence[RankRecord]) -> list[RankRecord]:
    """By rank, all by the clock of the first one, with the first start at 0."""
    records = sorted(records, key=lambda record: record.rank)
    offsets = [clock_offset(record.meetings, records[0].meetings) for record in records]
    starts = [record.spans[0].start - offset for record, offset in zip(records, offsets, strict=True) if record.spans]
    zero = min(starts, default=0.0)
    return [replace(record, spans=tuple(_moved(record.spans, -offset - zero)))
            for record, offset in zip(records, offsets, strict=True)]


def _moved(spans: Iterable[Span], seconds: float) -> Iterator[Span]:
    return (replace(span, start=span.start + seconds, end=span.end + seconds) for span in spans)


def extent(records: Iterable[RankRecord], works: Iterable[Work] = tuple(Work)) -> tuple[float, float]:
    """From the first start to the last end of such work on any rank."""
    spans = [span for record in records for span in record.spans if span.activity.work in works]
    return min((span.start for span in spans), default=0.0), max((span.end for span in spans), default=0.0)


def shares(record: RankRecord, records: Iterable[RankRecord]) -> Shares:
    """Of one rank, beside all those that the step is told of."""
    records = list(records)
    (start, end), (first, last) = extent(records), extent(records, COMPUTING)
    step, pipeline = max(end - start, _INSTANT), max(last - first, _INSTANT)
    computing = seconds_of(record.spans, COMPUTING)
    waits = seconds_of(record.spans, {Work.EXCHANGE, Work.DATA, Work.REDUCTION})
    update = seconds_of(record.spans, {Work.UPDATE})
    idle = max(step - computing - waits - update, 0.0)  # rounding
    return Shares(computing / step, waits / step, update / step, idle / step, 1 - computing / pipeline)


def numeral(activity: Activity, num_chunks: int) -> str:
    """Which microbatch, counted from 0, and of which chunk: "3", or "3b" where there is more than one chunk."""
    if activity.microbatch is None:
        return ""
    chunk = chr(ord("a") + (activity.chunk or 0)) if num_chunks > 1 else ""
    return f"{activity.microbatch}{chunk}"


def count_chunks(records: Iterable[RankRecord]) -> int:
    """Chunks of each stage; 1 without virtual chunks."""
    return max((span.activity.chunk or 0 for record in records for span in record.spans), default=0) + 1


def trace(records: Sequence[RankRecord], iteration: int) -> dict[str, Any]:
    """Chrome's format, which Perfetto reads: a process for each stage of each replica, a thread for each rank."""
    num_chunks, num_replicas = count_chunks(records), max(record.dp_rank for record in records) + 1
    events: list[dict[str, Any]] = []
    for record in records:
        place = {"pid": record.pp_rank * num_replicas + record.dp_rank, "tid": record.rank}
        process, thread = f"stage {record.pp_rank}, replica {record.dp_rank}", f"rank {record.rank}"
        events += [{"ph": "M", "name": "process_name", "args": {"name": process}, **place},
                   {"ph": "M", "name": "process_labels", "args": {"labels": record.holds}, **place},
                   {"ph": "M", "name": "process_sort_index", "args": {"sort_index": place["pid"]}, **place},
                   {"ph": "M", "name": "thread_name", "args": {"name": thread}, **place}]
        for span in record.spans:
            activity = span.activity
            events.append({
                "ph": "X", "name": f"{label(activity.work)} {numeral(activity, num_chunks)}".rstrip(),
                "cat": activity.work.name.lower(), "ts": span.start * 1e6, "dur": span.seconds * 1e6,
                "args": {"chunk": activity.chunk, "microbatch": activity.microbatch}, **place,
            })  # fmt: skip
    return {"displayTimeUnit": "ms", "otherData": {"iteration": iteration}, "traceEvents": events}
