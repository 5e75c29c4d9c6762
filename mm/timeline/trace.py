"""The trace of a step in Chrome's format, which Perfetto reads: written, and read back for comparisons."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from mm.batch import BatchTotals
from mm.errors import UserError, refuse_special
from mm.files import json_object
from mm.parallel.activity import Activity, Work
from mm.timeline.spans import (
    ActivitySpan,
    RankRecord,
    StepSettings,
    StepTimeline,
    count_chunks,
    label,
    numeral,
)

_WORKS = {work.name.lower(): work for work in Work}
"""By the category of an event."""


@dataclass(frozen=True)
class _RankFacts:
    """What the file says about a rank besides its events."""

    rank: int
    pp_rank: int
    dp_rank: int
    tp_rank: int
    holds: str


@dataclass(frozen=True)
class _StepFacts:
    """What the file says about the step besides its events."""

    iteration: int
    settings: StepSettings
    ranks: tuple[_RankFacts, ...]
    microbatches: tuple[tuple[BatchTotals, ...], ...]
    """By replica, in the order in which they enter the pipeline."""


@dataclass(frozen=True)
class _PassNumbers:
    """The pass to which an event belongs."""

    chunk: int | None = None
    microbatch: int | None = None


@dataclass(frozen=True)
class _Event:
    """The fields of an event that are read; only spans have all of them."""

    ph: str
    tid: int = 0
    cat: str = ""
    ts: FiniteFloat = 0.0
    dur: FiniteFloat = 0.0
    args: _PassNumbers = _PassNumbers()


def trace(timelines: Sequence[StepTimeline]) -> dict[str, Any]:
    """A process per stage and replica, a thread per rank.  With several timelines, the processes of a stage follow one
    another."""
    events = [event for number, one in enumerate(timelines) for event in _events(one, number, len(timelines))]
    first = timelines[0]
    facts = _facts(first) if len(timelines) == 1 else {"iteration": first.iteration}
    return {"displayTimeUnit": "ms", "otherData": facts, "traceEvents": events}


def _facts(timeline: StepTimeline) -> dict[str, Any]:
    ranks = tuple(_RankFacts(one.rank, one.pp_rank, one.dp_rank, one.tp_rank, one.holds) for one in timeline.records)
    return to_jsonable_python({
        "iteration": timeline.iteration, "settings": timeline.settings, "ranks": ranks,
        "microbatches": timeline.microbatches})


def _events(timeline: StepTimeline, number: int, num_timelines: int) -> Iterator[dict[str, Any]]:
    num_chunks, num_replicas = count_chunks(timeline.records), max(one.dp_rank for one in timeline.records) + 1
    ends = ", predicted" if timeline.is_predicted else ", measured" if num_timelines > 1 else ""
    for record in timeline.records:
        place = {"pid": (record.pp_rank * num_replicas + record.dp_rank) * num_timelines + number, "tid": record.rank}
        process, thread = f"stage {record.pp_rank}, replica {record.dp_rank}{ends}", f"rank {record.rank}"
        yield from ({"ph": "M", "name": "process_name", "args": {"name": process}, **place},
                    {"ph": "M", "name": "process_labels", "args": {"labels": record.holds}, **place},
                    {"ph": "M", "name": "process_sort_index", "args": {"sort_index": place["pid"]}, **place},
                    {"ph": "M", "name": "thread_name", "args": {"name": thread}, **place})
        for span in record.spans:
            activity = span.activity
            yield {
                "ph": "X", "name": f"{label(activity.work)} {numeral(activity, num_chunks)}".rstrip(),
                "cat": activity.work.name.lower(), "ts": span.start * 1e6, "dur": span.seconds * 1e6,
                "args": {"chunk": activity.chunk, "microbatch": activity.microbatch}, **place,
            }  # fmt: skip


def read_trace(path: Path) -> StepTimeline:
    """Read the measured trace of one step.  Raises UserError for a file that ``trace`` has not written."""
    refuse_special(path)
    cure = "measure the step again with --profile-pipeline"
    try:
        content = json_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected the trace of a step; {cure}") from error
    found = content.get("otherData")
    if not isinstance(found, dict) or not found.get("settings") or "ranks" not in found:
        raise UserError(f"{path}: has no settings and microbatches of its step, perhaps because an older version wrote "
                        f"it; {cure}")
    try:
        facts = TypeAdapter(_StepFacts).validate_python(found)
        events = TypeAdapter(tuple[_Event, ...]).validate_python(content.get("traceEvents"))
        spans: dict[int, list[ActivitySpan]] = defaultdict(list)
        for event in events:
            if event.ph == "X":
                spans[event.tid].append(_span(event))
        records = tuple(
            RankRecord(one.rank, one.pp_rank, one.dp_rank, one.tp_rank, one.holds, (), tuple(spans[one.rank]),
                       facts.microbatches[one.dp_rank]) for one in facts.ranks)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; {cure}") from error
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path}: is damaged (an event or rank has {error}); {cure}") from error
    return StepTimeline(facts.iteration, records, facts.settings)


def _span(event: _Event) -> ActivitySpan:
    activity = Activity(_WORKS[event.cat], event.args.chunk, event.args.microbatch)
    return ActivitySpan(activity, event.ts / 1e6, (event.ts + event.dur) / 1e6)
