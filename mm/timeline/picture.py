"""Draws timelines of a step as SVG: a row per stage, a box per activity, and the utilization of the stages.

Several timelines are drawn one above the other, on one scale.  A browser shows the full name of a box on hover.

The files of a timeline: a picture that any browser shows, and a trace in Chrome's format, which Perfetto shows and
comparisons read back.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from mm.errors import UserError, writing
from mm.files import json_object, read_regular, write_whole
from mm.parallel.activity import Work
from mm.report import render, round_step
from mm.timeline.spans import ActivitySpan, RankRecord, StepTimeline, count_chunks, extent, label, numeral, shares

_DARK, _WHITE = "#1c2733", "#ffffff"
_INKS = {
    "ViT forward": ("#12806f", _WHITE),
    "ViT backward": ("#8fd6c8", _DARK),
    "LLM forward": ("#2f5fc4", _WHITE),
    "LLM backward": ("#a8c2f5", _DARK),
    "ViT and LLM backward": ("#c3b1ea", _DARK),
    "backward": ("#b4bcc6", _DARK),
    label(Work.FORWARD): ("#7d8794", _WHITE),
    label(Work.INPUTS): ("#b9a58a", _DARK),
    label(Work.EXCHANGE): ("#f7e9c3", _DARK),
    label(Work.VISUAL_EXCHANGE): ("#e3d9a8", _DARK),
    label(Work.DATA): ("#f9d9cf", _DARK),
    label(Work.GATHER): ("#d6b6d9", _DARK),
    label(Work.REDUCTION): ("#e5b94f", _DARK),
    label(Work.UPDATE): ("#d9702e", _WHITE),
    label(Work.UPDATE_WAIT): ("#efc4a6", _DARK),
}
"""Kind of box -> the colours of the box and of the number in it, in the order of the legend."""
_TOWERS = {Work.VISION_FORWARD: "ViT", Work.LANGUAGE_FORWARD: "LLM"}

_LEFT, _PLOT, _TOP, _ROW = 160, 760, 88, 50
"""Where boxes begin, how wide a step is, where the first row begins, and the height of a row, all in pixels."""
_COLUMNS = (("busy", 972), ("waits", 1024), ("update", 1076), ("idle", 1124), ("bubble", 1180))
"""Right ends of the columns of shares, in the order of their fields."""
_NARROWEST = 0.2
"""Minimum width of a box in pixels; narrower ones are omitted here, but the trace has them."""
_LINES = (
    "The number in a box is the microbatch, counted from 0, with its chunk as a letter if there are several.",
    "busy: forward, backward and their inputs. waits: messages, visual tokens, data, gradient reduction and the "
    "gradient norm. update: without that. idle: nothing recorded. These four sum to 100% of the step.",
    "bubble: not busy, as a share of the time from the first forward to the last backward of any stage.")
_PREDICTED = ("predicted: other forward and idle are the host's work for a pass, inside and outside of its layers; "
              "messages are only the waits for messages.")


def draw(timelines: Sequence[StepTimeline], trace_name: str | None = None, notes: Sequence[str] = ()) -> str:
    """Draw timelines of one step as SVG, with the first rank of each stage.

    ``trace_name``: the file with every rank, if there is one.  ``notes``: lines below the last timeline.
    """
    seconds = max(end - start for start, end in (extent(one.rows) for one in timelines))
    panels, below = list[dict[str, Any]](), 0
    for one in timelines:
        panels.append({"top": below, **_panel(one, seconds, len(timelines) > 1, trace_name)})
        below += panels[-1]["bottom"] + 46
    kinds = {box["kind"] for panel in panels for row in panel["rows"] for box in row["boxes"]}
    legend = [(kind, fill) for kind, (fill, _) in _INKS.items() if kind in kinds]
    lines = [*notes, *_LINES, *([_PREDICTED] if any(one.is_predicted for one in timelines) else ())]
    return render("timeline.svg", panels=panels, columns=_COLUMNS, legend=legend, lines=lines, left=_LEFT, plot=_PLOT,
                  below=below, height=below + 18 * -(-len(legend) // 6) + 17 * len(lines) + 24, grey="#5a6673")


def _panel(timeline: StepTimeline, seconds: float, has_others: bool, trace_name: str | None) -> dict[str, Any]:
    """One timeline for the template, ``seconds`` in the full width."""
    rows, num_chunks, (start, end) = timeline.rows, count_chunks(timeline.rows), extent(timeline.rows)
    pixels, step = _PLOT / max(seconds, 1e-9), round_step(max(seconds, 1e-9) / 10)
    found = [astuple(shares(row, rows)) for row in rows]
    num_microbatches = len({span.activity.microbatch for row in rows for span in row.spans} - {None})
    chunks = f", each of {num_chunks} chunks" if num_chunks > 1 else ""
    rest = "" if trace_name is None else f"; {trace_name} has every rank ({len(timeline.records)})"
    what = "Predicted" if timeline.is_predicted else "Measured" if has_others else "One training"
    return {
        "heading": f"{what} step: iteration {timeline.iteration}",
        "summary": f"Microbatches: {num_microbatches}, stages: {len(rows)}{chunks}, time: "
                   f"{1000 * (end - start):,.1f} ms. Each row is the first rank of its stage{rest}.",
        "ticks": [(round(_LEFT + number * step * pixels, 1), f"{1000 * number * step:,.12g}")
                  for number in range(int(seconds / step * 1.000001) + 1)],
        "rows": [{"y": _TOP + place * _ROW, "name": f"stage {row.pp_rank} (rank {row.rank})", "holds": row.holds,
                  "boxes": list(_boxes(row, start, pixels, num_chunks)), "shares": found[place]}
                 for place, row in enumerate(rows)],
        "mean": [fmean(column) for column in zip(*found, strict=True)],
        "bottom": _TOP + len(rows) * _ROW,
    }  # fmt: skip


def _boxes(row: RankRecord, start: float, pixels: float, num_chunks: int) -> Iterator[dict[str, Any]]:
    for kind, span in _kinds(row.spans):
        if span.seconds * pixels >= _NARROWEST:
            number, (fill, ink) = numeral(span.activity, num_chunks), _INKS[kind]
            title = (f"{f'{kind} {number}'.strip()}: {1000 * (span.start - start):,.2f} to "
                     f"{1000 * (span.end - start):,.2f} ms")
            yield {"x": _LEFT + (span.start - start) * pixels, "width": span.seconds * pixels, "kind": kind,
                   "fill": fill, "ink": ink, "title": title,
                   "number": "" if span.activity.work in (Work.INPUTS, Work.FORWARD) else number}


def _kinds(spans: Sequence[ActivitySpan]) -> Iterator[tuple[str, ActivitySpan]]:
    """Each span with its kind of box; a backward pass is named after the towers of its forward pass."""
    forward: Mapping[tuple[int | None, int | None], set[str]] = defaultdict(set)
    for span in spans:
        activity = span.activity
        towers = forward[activity.chunk, activity.microbatch]
        if activity.work in _TOWERS:
            towers.add(_TOWERS[activity.work])
        named = " and ".join(tower for tower in _TOWERS.values() if tower in towers)
        yield f"{named} backward".strip() if activity.work is Work.BACKWARD else label(activity.work), span


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
