"""Draws timelines of a step as SVG: a row per stage, a box per activity, and the utilization of the stages.

Several timelines are drawn one above the other, on one scale.  The SVG is written as text, without another package.
Any browser shows it, with the full name of a box on hover.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple
from math import floor, log10
from statistics import fmean
from typing import NamedTuple
from xml.sax.saxutils import escape

from mm.parallel.activity import Work
from mm.timeline.spans import ActivitySpan, RankRecord, StepTimeline, count_chunks, extent, label, numeral, shares


class _Ink(NamedTuple):
    fill: str
    text: str = "#1c2733"


_INKS = {
    "ViT forward": _Ink("#12806f", "#ffffff"),
    "ViT backward": _Ink("#8fd6c8"),
    "LLM forward": _Ink("#2f5fc4", "#ffffff"),
    "LLM backward": _Ink("#a8c2f5"),
    "ViT and LLM backward": _Ink("#c3b1ea"),
    "backward": _Ink("#b4bcc6"),
    label(Work.FORWARD): _Ink("#7d8794", "#ffffff"),
    label(Work.INPUTS): _Ink("#b9a58a"),
    label(Work.EXCHANGE): _Ink("#f7e9c3"),
    label(Work.VISUAL_EXCHANGE): _Ink("#e3d9a8"),
    label(Work.DATA): _Ink("#f9d9cf"),
    label(Work.GATHER): _Ink("#d6b6d9"),
    label(Work.REDUCTION): _Ink("#e5b94f"),
    label(Work.UPDATE): _Ink("#d9702e", "#ffffff"),
    label(Work.UPDATE_WAIT): _Ink("#efc4a6"),
}
"""Kind of box -> its colours, in the order of the legend."""
_TOWERS = {Work.VISION_FORWARD: "ViT", Work.LANGUAGE_FORWARD: "LLM"}

_WIDTH, _LEFT, _PLOT, _TOP, _ROW, _GAP = 1200, 160, 760, 124, 38, 12
_COLUMNS = {"busy": 972, "waits": 1024, "update": 1076, "idle": 1124, "bubble": 1180}
"""Right ends of the columns of shares, in the order of their fields."""
_NARROWEST = 0.2
"""Minimum width of a box in pixels; narrower ones are omitted here, but the trace has them."""
_NARROWEST_IN_LEGEND = 1.5
"""Minimum width in pixels for a kind of box to appear in the legend."""
_DIGIT = 7.2
_LEGEND = 36
"""Height of the legend."""
_GREY = "#5a6673"


def draw(timelines: Sequence[StepTimeline], trace_name: str | None = None, notes: Sequence[str] = ()) -> str:
    """Draw timelines of one step as SVG, with the first rank of each stage.

    ``trace_name``: the file with every rank, if there is one.  ``notes``: lines below the last timeline.
    """
    seconds = max(end - start for start, end in (extent(one.rows) for one in timelines))
    elements: list[str] = []
    kinds: set[str] = set()
    top = 0
    for number, one in enumerate(timelines):
        lower = _LEGEND if number else 0  # only the first panel has one
        drawn, found, bottom = _panel(one, seconds)
        drawn += [_text(24, 34 + lower, _heading(one, len(timelines) > 1), size=18, weight="bold"),
                  _text(24, 56 + lower, _summary(one.rows, len(one.records), trace_name))]
        top -= lower
        elements.append(f'<g transform="translate(0 {top})">\n' + "\n".join(drawn) + "\n</g>")
        kinds, top = kinds | found, top + bottom
    if len(timelines) == 2:
        elements += _differences(timelines[0], timelines[1], top)
        top += 28
    num_chunks = max(count_chunks(one.rows) for one in timelines)
    lines = [*notes, *_explanation(num_chunks, any(one.is_predicted for one in timelines))]
    elements += [*_legend(kinds), *(_text(24, top + 36 + 17 * number, line, size=11, fill=_GREY)
                                    for number, line in enumerate(lines))]
    height = top + 37 + 17 * len(lines)
    body = "\n".join([f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>', *elements])
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif">\n{body}\n</svg>\n')


def _panel(timeline: StepTimeline, seconds: float) -> tuple[list[str], set[str], int]:
    """The elements of one timeline, ``seconds`` in the full width; the kinds of its boxes; and where it ends."""
    rows, kinds = timeline.rows, set[str]()
    num_chunks, (start, _) = count_chunks(rows), extent(rows)
    pixels = _PLOT / max(seconds, 1e-9)
    bottom = _TOP + len(rows) * (_ROW + _GAP)
    elements = list(_axis(seconds, pixels, bottom))
    for place, row in enumerate(rows):
        y = _TOP + place * (_ROW + _GAP)
        elements += [_text(24, y + 16, f"stage {row.pp_rank} (rank {row.rank})", weight="bold"),
                  _text(24, y + 32, row.holds, size=11, fill=_GREY),
                  f'<rect x="{_LEFT}" y="{y}" width="{_PLOT}" height="{_ROW}" fill="#f1f3f5"/>']
        for kind, span in _kinds(row.spans):
            x, width = _LEFT + (span.start - start) * pixels, span.seconds * pixels
            if width >= _NARROWEST:
                kinds |= {kind} if width >= _NARROWEST_IN_LEGEND else set()
                elements += _box(kind, span, numeral(span.activity, num_chunks), start, x, y, width)
        elements += _numbers(astuple(shares(row, rows)), y + 24)
    return [*elements, *_means(rows, bottom + 30)], kinds, bottom + 30


def _heading(timeline: StepTimeline, is_one_of_several: bool) -> str:
    what = "Predicted" if timeline.is_predicted else "Measured" if is_one_of_several else "One training"
    return f"{what} step: iteration {timeline.iteration}"


def _summary(rows: Sequence[RankRecord], num_ranks: int, trace_name: str | None) -> str:
    microbatches = {span.activity.microbatch for row in rows for span in row.spans} - {None}
    (start, end), num_chunks = extent(rows), count_chunks(rows)
    chunks = f", each of {num_chunks} chunks" if num_chunks > 1 else ""
    rest = "" if trace_name is None else f"; {trace_name} has every rank ({num_ranks})"
    return (f"Microbatches: {len(microbatches)}, stages: {len(rows)}{chunks}, time: {1000 * (end - start):,.1f} ms. "
            f"Each row is the first rank of its stage{rest}.")


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


def _box(kind: str, span: ActivitySpan, number: str, zero: float, x: float, y: float, width: float) -> Iterator[str]:
    title = f"{kind} {number}".strip()
    when = f"{1000 * (span.start - zero):,.2f} to {1000 * (span.end - zero):,.2f} ms"
    edge = ' stroke="#ffffff" stroke-width="0.7"' if width > 3 else ""
    yield (f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" fill="{_INKS[kind].fill}"{edge}>'
           f"<title>{escape(title)}: {when}</title></rect>")
    if number and width > _DIGIT * len(number) + 2 and span.activity.work not in (Work.INPUTS, Work.FORWARD):
        yield _text(x + width / 2, y + _ROW / 2 + 4, number, anchor="middle", fill=_INKS[kind].text)


def _means(rows: Sequence[RankRecord], y: float) -> Iterator[str]:
    """Column headers, and the means of all rows below the table."""
    for name, x in _COLUMNS.items():
        yield _text(x, _TOP - 10, name, size=11, anchor="end", fill=_GREY)
    if len(rows) > 1:
        yield _text(_LEFT + _PLOT, y, "mean", size=11, anchor="end", fill=_GREY)
        yield from _numbers(_mean_shares(rows), y)


def _mean_shares(rows: Sequence[RankRecord]) -> list[float]:
    return [fmean(column) for column in zip(*(astuple(shares(row, rows)) for row in rows), strict=True)]


def _differences(one: StepTimeline, other: StepTimeline, y: float) -> Iterator[str]:
    """By how many percentage points the mean shares of the second timeline exceed those of the first."""
    (start, end), (other_start, other_end) = extent(one.rows), extent(other.rows)
    longer = f"{1000 * (other_end - other_start - end + start):+,.1f} ms"
    yield _text(_LEFT + _PLOT, y + 17, f"measured minus predicted: {longer}", size=11, anchor="end", fill=_GREY)
    means = zip(_mean_shares(other.rows), _mean_shares(one.rows), strict=True)
    for (share, before), x in zip(means, _COLUMNS.values(), strict=True):
        yield _text(x, y + 17, f"{100 * (share - before):+.1f}", anchor="end")


def _numbers(values: Sequence[float], y: float) -> Iterator[str]:
    for value, x in zip(values, _COLUMNS.values(), strict=True):
        yield _text(x, y, f"{value:.1%}", anchor="end")


def _axis(seconds: float, pixels: float, bottom: float) -> Iterator[str]:
    """Gridlines at round times, about ten of them."""
    coarse = max(seconds, 1e-9) / 10
    power = 10.0 ** floor(log10(coarse))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= coarse * 0.999)
    for index in range(int(seconds / step * 1.000001) + 1):
        x = _LEFT + index * step * pixels
        yield f'<line x1="{x:.2f}" y1="{_TOP - 6}" x2="{x:.2f}" y2="{bottom - _GAP + 6}" stroke="#d5dae0"/>'
        yield _text(x, bottom + 10, f"{index * step * 1000:,.12g}", size=11, anchor="middle", fill=_GREY)
    yield _text(_LEFT + _PLOT / 2, bottom + 28, "time (ms)", size=11, anchor="middle", fill=_GREY)


def _legend(kinds: Collection[str]) -> Iterator[str]:
    x = 24.0
    for kind, ink in _INKS.items():
        if kind in kinds:
            yield (f'<rect x="{x:.1f}" y="73" width="13" height="13" fill="{ink.fill}" stroke="#aab2bb" '
                   f'stroke-width="0.5"/>')
            yield _text(x + 18, 84, kind, size=11)
            x += 33 + 6.2 * len(kind)


def _explanation(num_chunks: int, has_prediction: bool) -> Iterator[str]:
    letters = ", with its chunk as a letter" if num_chunks > 1 else ""
    yield f"The number in a box is the microbatch, counted from 0{letters}."
    yield ("busy: forward, backward and their inputs. waits: messages, visual tokens, data, gradient reduction and the "
           "gradient norm. update: without that. idle: nothing recorded. These four sum to 100% of the step.")
    yield "bubble: not busy, as a share of the time from the first forward to the last backward of any stage."
    if has_prediction:
        yield ("predicted: other forward and idle are the host's work for a pass, inside and outside of its layers; "
               "messages are only the waits for messages.")


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", weight: str = "normal",
          fill: str = "#1c2733") -> str:
    shape = f'font-size="{size}" fill="{fill}"' + (f' text-anchor="{anchor}"' if anchor != "start" else "") + (
        f' font-weight="{weight}"' if weight != "normal" else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" {shape}>{escape(text)}</text>'
