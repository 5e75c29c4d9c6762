"""The timeline of a step: what each rank did, and when; its shares of time, its picture, its trace, and its files.

Seconds may be measured or predicted.  The picture has a row per stage, a box per activity, and the utilization of the
stages; a browser shows the full name of a box on hover.  The trace is in Chrome's format, which Perfetto shows, and
holds what ``read_trace`` needs.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from mm.batch import BatchTotals
from mm.config.args import Arguments
from mm.config.model import ModelConfig
from mm.errors import UserError, writing
from mm.files import json_object, read_regular, write_whole
from mm.parallel.activity import Activity, Work
from mm.placement import StageSpec
from mm.report import render, round_step

COMPUTING = frozenset({Work.INPUTS, Work.FORWARD, Work.VISION_FORWARD, Work.LANGUAGE_FORWARD, Work.BACKWARD})
"""Useful work of a stage.  A pipeline whose stages do nothing else from first to last has no bubble."""

TIMED = tuple(work for work in Work if work is not Work.SAVE)
"""The kinds of work in a step."""

WAITS = frozenset({Work.EXCHANGE, Work.VISUAL_EXCHANGE, Work.GATHER, Work.REDUCTION, Work.UPDATE_WAIT})
"""Waits for other ranks, with the transfers themselves."""

_INSTANT = 1e-12
_MEASURED = "pipeline_step_"
"""How the names of the files of a measured step begin."""
Meetings = tuple[tuple[float, float], ...]
"""When a rank arrived at each of several barriers and when it left, on its own clock."""


@dataclass(frozen=True)
class Moment:
    """An activity begins, or, if ``begins`` is None, the innermost one ends."""

    seconds: float
    begins: Activity | None


@dataclass(frozen=True)
class ActivitySpan:
    """One activity of a rank from ``start`` to ``end``, in seconds."""

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
    """Description of its stage's content."""
    meetings: Meetings
    spans: tuple[ActivitySpan, ...]
    """In order of time."""
    microbatches: tuple[BatchTotals, ...] = ()
    """Counts of the microbatches of its replica, in the order in which they enter the pipeline; empty if unknown."""


@dataclass(frozen=True)
class StepSettings:
    """What the time of a step depends on besides its microbatches."""

    model: ModelConfig
    world_size: int
    tp_size: int
    cp_size: int
    sequence_parallel: bool
    precision: str
    use_distributed_optimizer: bool
    grad_reduce_in_bf16: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    context_parallel_algo: str
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    kept_copy: str = "fp32"
    shards_gradients: bool = False
    shards_weights: bool = False
    host_share: float = 0.0

    @classmethod
    def of(cls, args: Arguments, model: ModelConfig, world_size: int) -> "StepSettings":
        """The settings of a run."""
        return cls(model, world_size, args.tensor_model_parallel_size, args.context_parallel_size,
                   args.sequence_parallel, args.precision, args.splits_optimizer, args.grad_reduce_in_bf16,
                   args.overlap_grad_reduce, args.overlap_param_gather, args.context_parallel_algo,
                   args.exp_avg_dtype, args.exp_avg_sq_dtype, args.kept_copy, args.shards_gradients,
                   args.shards_weights, args.host_share)


@dataclass(frozen=True)
class StepTimeline:
    """One step of a run, measured or predicted."""

    iteration: int
    records: tuple[RankRecord, ...]
    """By rank, on one clock."""
    settings: StepSettings
    is_predicted: bool = False

    @property
    def microbatches(self) -> tuple[tuple[BatchTotals, ...], ...]:
        """The microbatches of each replica."""
        replicas = {record.dp_rank: record.microbatches for record in self.records}
        return tuple(replicas[one] for one in sorted(replicas))

    @property
    def rows(self) -> tuple[RankRecord, ...]:
        """The first rank of each stage, by stage."""
        stages = sorted({record.pp_rank for record in self.records})
        return tuple(min((one for one in self.records if one.pp_rank == stage), key=lambda one: one.rank)
                     for stage in stages)

    @property
    def name(self) -> str:
        """The name of its files, without their suffixes."""
        return f"predicted_step_{self.iteration}" if self.is_predicted else f"{_MEASURED}{self.iteration}"


@dataclass(frozen=True)
class TimeShares:
    """How one rank spent a step.  The first four are fractions of the step and sum to 1."""

    busy: float
    """Forward and backward, including preparation of their inputs."""
    waits: float
    """Waits for messages, visual tokens, data and gradient reduction, and for other ranks in the update."""
    update: float
    """The update, without its waits for other ranks."""
    idle: float
    """Nothing recorded."""
    bubble: float
    """Not busy, as a fraction of the time from the first forward to the last backward of any stage."""


def label(work: Work) -> str:
    """The name of a kind of work in spans that do not overlap."""
    return "other forward" if work is Work.FORWARD else work.value


def seconds_key(work: Work) -> str:
    """The key of its time in metrics.jsonl."""
    return f"{work.name.lower()}_seconds"


def held(specs: Iterable[StageSpec]) -> str:
    """What a stage with these slots holds, in words."""
    specs = list(specs)
    num_vision, num_language = (sum(len(getattr(spec, name)) for spec in specs) for name in (
        "vision_layers", "language_layers"))
    return f"{num_vision} ViT, {num_language} LLM layers"


def flat_spans(moments: Sequence[Moment]) -> tuple[ActivitySpan, ...]:
    """Spans of the innermost running activities.

    Two adjacent parts of an inner activity (layers of the LLM, and its loss) are merged, dropping the outer activity's
    instant between them.  Between two gathers of weights, and between two reductions in a backward pass, lies more
    than an instant: the pass of a layer.
    """
    spans: list[ActivitySpan] = []
    running: list[Activity] = []
    for now, then in pairwise(moments):
        if now.begins is None:
            running.pop()
        else:
            running.append(now.begins)
        if not running:
            continue
        span = ActivitySpan(running[-1], now.seconds, max(now.seconds, then.seconds))
        last = spans[-2:]
        may_merge = (len(running) > 1 and running[-2].work is not Work.BACKWARD
                     and running[-1].work is not Work.GATHER)
        if may_merge and [one.activity for one in last] == [running[-1], running[-2]] and (
                last[0].end == last[1].start):
            span = replace(span, start=last[0].start)
            del spans[-2:]
        spans.append(span)
    return tuple(spans)


def seconds_of(spans: Iterable[ActivitySpan], works: Iterable[Work]) -> float:
    """Time spent at these kinds of work."""
    return sum(span.seconds for span in spans if span.activity.work in works)


def clock_offset(meetings: Meetings, reference: Meetings) -> float:
    """How far a rank's clock is ahead of the reference rank's, from common barriers; 0 if they allow it.  No rank
    leaves a barrier before all have arrived.  Ranks on one machine share a clock, so 0 is always consistent."""
    pairs = list(zip(meetings, reference, strict=True))
    least = max((came - left for (came, _), (_, left) in pairs), default=0.0)
    most = min((left - came for (_, left), (came, _) in pairs), default=0.0)
    return 0.0 if least <= 0.0 <= most else (least + most) / 2


def aligned(records: Sequence[RankRecord]) -> list[RankRecord]:
    """Records by rank, on the clock of the first rank, with the first start at 0."""
    records = sorted(records, key=lambda record: record.rank)
    offsets = [clock_offset(record.meetings, records[0].meetings) for record in records]
    starts = [record.spans[0].start - offset for record, offset in zip(records, offsets, strict=True) if record.spans]
    zero = min(starts, default=0.0)
    return [replace(record, spans=tuple(_moved(record.spans, -offset - zero)))
            for record, offset in zip(records, offsets, strict=True)]


def _moved(spans: Iterable[ActivitySpan], seconds: float) -> Iterator[ActivitySpan]:
    return (replace(span, start=span.start + seconds, end=span.end + seconds) for span in spans)


def extent(records: Iterable[RankRecord], works: Iterable[Work] = tuple(Work)) -> tuple[float, float]:
    """The first start and the last end of these kinds of work on any rank."""
    spans = [span for record in records for span in record.spans if span.activity.work in works]
    return min((span.start for span in spans), default=0.0), max((span.end for span in spans), default=0.0)


def shares(record: RankRecord, records: Iterable[RankRecord]) -> TimeShares:
    """The shares of one rank; ``records`` are all ranks of the step."""
    records = list(records)
    (start, end), (first, last) = extent(records), extent(records, COMPUTING)
    step, pipeline = max(end - start, _INSTANT), max(last - first, _INSTANT)
    computing = seconds_of(record.spans, COMPUTING)
    waits = seconds_of(record.spans, {Work.DATA, *WAITS})
    update = seconds_of(record.spans, {Work.UPDATE})
    idle = max(step - computing - waits - update, 0.0)  # rounding
    return TimeShares(computing / step, waits / step, update / step, idle / step, 1 - computing / pipeline)


def numeral(activity: Activity, num_chunks: int) -> str:
    """Microbatch, counted from 0, and chunk: "3", or "3b" if there is more than one chunk."""
    if activity.microbatch is None:
        return ""
    chunk = chr(ord("a") + (activity.chunk or 0)) if num_chunks > 1 else ""
    return f"{activity.microbatch}{chunk}"


def count_chunks(records: Iterable[RankRecord]) -> int:
    """Chunks of each stage; 1 without virtual chunks."""
    return max((span.activity.chunk or 0 for record in records for span in record.spans), default=0) + 1


# The picture

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
    """Draw timelines of one step as SVG, with the first rank of each stage.  ``trace_name``: the file with every rank,
    if there is one.  ``notes``: lines below the last timeline."""
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


def measured_files(folder: Path, suffix: str) -> list[Path]:
    """The .json or .svg files of measured steps in a --log-dir, by iteration."""
    return sorted(folder.glob(f"{_MEASURED}*{suffix}"), key=lambda path: (len(path.name), path.name))


def measured_steps(folder: Path) -> list[StepTimeline]:
    """All measured steps that --profile-pipeline has written to a --log-dir.  Raises UserError if there are none."""
    paths = measured_files(folder, ".json")
    if not paths:
        raise UserError(f"{folder}: no {_MEASURED}*.json; expected the --log-dir of a run with --profile-pipeline "
                        f"ITERATION; add that flag to a run, with an iteration past the first few")
    return list(map(read_trace, paths))


def read_trace(path: Path) -> StepTimeline:
    """Read the trace of one step.  Raises UserError for a file that ``trace`` has not written."""
    try:
        return TypeAdapter(StepTimeline).validate_python(json_object(read_regular(path)).get("otherData"))
    except (OSError, ValueError) as error:  # with pydantic's
        raise UserError(f"{path}: cannot be read ({error}); measure the step again with --profile-pipeline") from error
