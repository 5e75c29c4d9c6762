"""The files of a timeline: a picture that any browser shows, and a trace in Chrome's format, which Perfetto shows and
comparisons read back."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from mm.errors import UserError, writing
from mm.files import json_object, read_regular, write_whole
from mm.timeline.picture import draw
from mm.timeline.spans import StepTimeline, count_chunks, label, numeral


def write_timeline(
    folder: str | Path, flag: str, timelines: Sequence[StepTimeline], notes: Sequence[str] = ()
) -> Path:
    """Write the .json and .svg of one step, or of a prediction and the measured step; returns the path without suffix.

    ``flag`` gave the folder.  ``notes`` are lines below the picture.  Raises UserError naming a file that cannot
    be written.
    """
    first = timelines[0]
    path = Path(folder) / (first.name if len(timelines) == 1 else f"compared_step_{first.iteration}")
    for name, text in ((f"{path}.json", json.dumps(trace(timelines)) + "\n"),
                       (f"{path}.svg", draw(timelines, f"{path.name}.json", notes))):
        with writing(name, flag):
            write_whole(Path(name), text.encode())
    return path


def trace(timelines: Sequence[StepTimeline]) -> dict[str, Any]:
    """A process per stage and replica, a thread per rank.  With several timelines, the processes of a stage follow one
    another."""
    events = [event for number, one in enumerate(timelines) for event in _events(one, number, len(timelines))]
    step = to_jsonable_python(timelines[0]) if len(timelines) == 1 else {}
    return {"displayTimeUnit": "ms", "otherData": step, "traceEvents": events}


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


def measured_steps(folder: Path) -> list[StepTimeline]:
    """All measured steps that --profile-pipeline has written to a --log-dir.  Raises UserError if there are none."""
    paths = sorted(folder.glob("pipeline_step_*.json"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise UserError(f"{folder}: no pipeline_step_*.json; expected the --log-dir of a run with --profile-pipeline "
                        f"ITERATION; add that flag to a run, with an iteration past the first few")
    return list(map(read_trace, paths))


def read_trace(path: Path) -> StepTimeline:
    """Read the trace of one step.  Raises UserError for a file that ``trace`` has not written."""
    try:
        return TypeAdapter(StepTimeline).validate_python(json_object(read_regular(path)).get("otherData"))
    except (OSError, ValueError) as error:  # with pydantic's
        raise UserError(f"{path}: cannot be read ({error}); measure the step again with --profile-pipeline") from error
