"""A report: facts, tables, bars, histograms and problems, as text for the terminal and as one HTML page."""

import os
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import numpy as np

from mm.errors import MAX_PROBLEMS, UserError, counted, printable
from mm.files import write_whole

_BAR_CHARACTERS = 40
_MAX_OPEN = 10
"""The page folds the samples of a problem if there are more than these."""
_MAX_UNBROKEN, _MAX_WHOLE = 14, 24
"""The page never breaks cells of up to ``_MAX_UNBROKEN`` characters into lines, nor, in longer cells, words of up to
``_MAX_WHOLE``."""


@dataclass(frozen=True)
class Histogram:
    """How many samples there are in each range of a quantity, such as their number of tokens."""

    title: str
    unit: str
    edges: tuple[float, ...]
    """Ascending; one more than ``counts``.  A bin includes its lower edge and excludes its upper one."""
    counts: tuple[int, ...]

    @classmethod
    def of(cls, title: str, unit: str, values: np.ndarray, num_bins: int = 20) -> "Histogram":
        """Count integers in bins of equal width; the width is 1, 2 or 5 times a power of ten."""
        low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
        width = _round_width((high - low + 1) / num_bins)
        start = low // width * width
        edges = np.arange(start, high + width + 1, width)
        counts, _ = np.histogram(values, edges)
        return cls(title, unit, tuple(map(float, edges)), tuple(map(int, counts)))


@dataclass(frozen=True)
class Table:
    """Rows of formatted cells below a header."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_folded: bool = False
    """Whether the page shows its rows only on a click."""


@dataclass(frozen=True)
class Bars:
    """One number for each of several things, drawn as a bar, and the limit that all have."""

    title: str
    unit: str
    values: tuple[tuple[str, float], ...]
    limit: float | None = None

    @property
    def heading(self) -> str:
        limit = "" if self.limit is None else f"; limit {self.limit:,.1f}"
        return f"{self.title} ({self.unit}{limit})"

    @property
    def end(self) -> float:
        """The value of a bar of full length."""
        return max([value for _, value in self.values] + [self.limit or 0.0]) or 1.0


@dataclass(frozen=True)
class Problem:
    """What is wrong with one sample or file."""

    where: str
    what: str
    kind: str = ""
    """The message without what differs between samples.  The page groups problems by it."""
    path: str | None = None
    """The image or video that causes it, if any."""


@dataclass(frozen=True)
class Report:
    """A whole report, such as on a dataset or a plan."""

    title: str
    facts: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...] = ()
    histograms: tuple[Histogram, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    sections: tuple["Report", ...] = ()
    """Reports on the splits of a dataset, such as training and validation, each under its title."""
    bars: tuple[Bars, ...] = ()

    def text(self) -> str:
        """Text for the terminal, with at most ``MAX_PROBLEMS`` problems."""
        blocks = [*self._blocks(), *(block for section in self.sections for block in section._blocks())]
        blocks.append([f"note: {note}" for note in self.notes])
        shown = [f"{problem.where}: {problem.what}" for problem in self.problems[:MAX_PROBLEMS]]
        if len(self.problems) > len(shown):
            shown.append(f"... and {len(self.problems) - len(shown)} more problems; --html PAGE lists them all")
        blocks.append(shown)
        return printable("\n\n".join("\n".join(block) for block in blocks if block))

    def _blocks(self) -> list[list[str]]:
        """Blocks of lines: title, facts, tables, bars and histograms."""
        width = max((len(name) for name, _ in self.facts), default=0)
        return [[self.title], [f"{name.ljust(width)}  {value}" for name, value in self.facts],
                *map(_table_lines, self.tables), *map(_bar_lines, self.bars), *map(_histogram_lines, self.histograms)]

    def html(self, pictures: Mapping[str, bytes] | None = None) -> str:
        """One self-contained page: no script, no font, no network.  ``pictures``: a JPEG for some kinds of problems.

        The problems are before the statistics, which may be many screens long.
        """
        num = len(self.problems)
        heading = counted(num, "problem") if num else "No problems"
        first, statistics = Report("", self.facts, notes=self.notes), replace(self, facts=(), notes=())
        return page(self.title, "\n".join([
            first.body(), f"<h2>{heading}</h2>", *self._html_problems(pictures or {}), statistics.body()]))

    def _html_problems(self, pictures: Mapping[str, bytes]) -> Iterator[str]:
        """Each kind of problem, the most frequent first: its count, its picture, and its samples folded if many."""
        groups: dict[str, list[Problem]] = {}
        for problem in self.problems:
            groups.setdefault(problem.kind, []).append(problem)
        for kind, some in sorted(groups.items(), key=lambda group: -len(group[1])):
            picture = picture_tag(pictures[kind], "the first") if kind in pictures else ""
            yield f"<h3>{len(some):,} x {escape(kind)}</h3>{picture}" if kind else ""
            rows = _html_rows(("where", "what"), [(problem.where, problem.what) for problem in some], "problems")
            yield _folded(f"All {len(some):,}", rows) if len(some) > _MAX_OPEN else rows

    def body(self) -> str:
        """Everything except the problems, as a part of a page."""
        facts = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in self.facts)
        blocks = [f'<div class="wide"><table class="facts">{facts}</table></div>'] if facts else []
        blocks += map(_html_table, self.tables)
        blocks += map(_html_bars, self.bars)
        if self.histograms:
            blocks.append(f'<div class="histograms">{"".join(map(_svg, self.histograms))}</div>')
        blocks += [f"<h2>{escape(section.title)}</h2>\n{section.body()}" for section in self.sections]
        return "\n".join([*blocks, *(f"<p>{escape(note)}</p>" for note in self.notes)])


def picture_tag(jpeg: bytes, name: str) -> str:
    """An element of a page that contains an image."""
    return f'<img alt="{escape(name)}" src="data:image/jpeg;base64,{b64encode(jpeg).decode()}">'


def page(title: str, body: str) -> str:
    """A whole HTML document."""
    return printable(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style></head><body><main>\n<h1>{escape(title)}</h1>\n{body}\n</main></body></html>\n")


def check_page(path: Path | None) -> None:
    """Raise UserError for an ``--html`` that cannot be written, before any work is done."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise UserError(f"--html is {path}, which is a directory; name a file in it, such as {path / 'report.html'}.")
    if not folder.is_dir():
        raise UserError(f"--html is {path}, but there is no directory {folder}; create it, or name another file.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"--html is {path}, which cannot be written; name another file, or change its permissions.")


def write_page(path: Path, html: str) -> str:
    """Write a page; returns the line that says so."""
    write_whole(path, html.encode())
    return printable(f"written: {path}")


def _round_width(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20 ... that is at least ``least``."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10


def _table_lines(table: Table) -> list[str]:
    rows = (table.header, *table.rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [table.title, *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                           for row in rows)]


def _histogram_lines(histogram: Histogram) -> list[str]:
    most = max(histogram.counts, default=0)
    names = [f"{edge:,.0f}" for edge in histogram.edges[:-1]]
    width = max(map(len, names), default=0)
    bars = [f"{name.rjust(width)}  {'#' * -(-count * _BAR_CHARACTERS // max(most, 1))} {count:,}"
            for name, count in zip(names, histogram.counts, strict=True)]
    return [f"{histogram.title} ({histogram.unit}, from)", *bars]


def _bar_lines(bars: Bars) -> list[str]:
    width = max((len(name) for name, _ in bars.values), default=0)
    return [bars.heading, *(f"{name.ljust(width)}  {'#' * round(value / bars.end * _BAR_CHARACTERS)} {value:,.1f}"
                            for name, value in bars.values)]


def _html_table(table: Table) -> str:
    rows = _html_rows(table.header, table.rows)
    return _folded(table.title, rows) if table.is_folded else f"<h2>{escape(table.title)}</h2>{rows}"


def _folded(title: str, content: str) -> str:
    """Content that the page shows only on a click."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _html_rows(header: Sequence[str], rows: Sequence[Sequence[str]], style: str = "plain") -> str:
    """A table; if it is too wide for the screen, it scrolls."""
    names = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table class="{style}"><tr>{names}</tr>{body}</table></div>'


def _cell(text: str) -> str:
    if len(text) <= _MAX_UNBROKEN:
        return f"<td>{escape(text)}</td>"
    is_torn = max(map(len, text.split()), default=0) > _MAX_WHOLE
    return f'<td class="long{" torn" if is_torn else ""}">{escape(text)}</td>'


def _html_bars(bars: Bars) -> str:
    limit = "" if bars.limit is None else (
        f'<rect class="limit" x="{100 * bars.limit / bars.end - 0.4:.2f}" width="0.4" height="4"/>')
    line = " <small>red: the limit</small>" if limit else ""
    rows = "".join(
        f'<tr><th>{escape(name)}</th><td class="bar"><svg viewBox="0 0 100 4" preserveAspectRatio="none">'
        f'<rect width="{100 * value / bars.end:.2f}" height="4"/>{limit}</svg></td><td>{value:,.1f}</td></tr>'
        for name, value in bars.values)
    return f'<h2>{escape(bars.heading)}{line}</h2><table class="bars">{rows}</table>'


_WIDTH, _HEIGHT, _BOTTOM = 460, 190, 24
"""Size of a histogram in pixels; ``_BOTTOM`` of the height is for the axis."""
_DIGIT = 9
"""Width of a digit of its labels in pixels, rounded up."""


def _svg(histogram: Histogram) -> str:
    most, num_bins = max(histogram.counts, default=0) or 1, len(histogram.counts)
    each, height = _WIDTH / num_bins, _HEIGHT - _BOTTOM - 14
    elements = list(_svg_bars(histogram.counts, histogram.edges, each, height / most))
    is_single = histogram.edges[1] - histogram.edges[0] == 1  # a bar stands for one number, which is below its middle
    for number in sorted({0, num_bins // 2, num_bins - is_single}):
        x, label = (number + is_single / 2) * each, f"{histogram.edges[number]:,.0f}"
        half = _DIGIT * len(label) / 2
        anchor = "start" if x < half else "end" if x > _WIDTH - half else "middle"
        elements.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{label}</text>')
    highest = f"highest bar: {counted(most, 'sample')}"
    return (f'<figure><figcaption><b>{escape(histogram.title)} {escape(histogram.unit)}</b> <small>({highest})</small>'
            f'</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(elements)}</svg></figure>')


def _svg_bars(counts: Sequence[int], edges: Sequence[float], each: float, scale: float) -> Iterator[str]:
    floor = _HEIGHT - _BOTTOM
    for number, count in enumerate(counts):
        height = max(count * scale, 1.0 if count else 0.0)
        least, most = edges[number], edges[number + 1] - 1
        hover = f"{least:,.0f}{f' to {most:,.0f}' if most > least else ''}: {counted(count, 'sample')}"
        yield (f'<rect x="{number * each + 1:.1f}" y="{floor - height:.1f}" width="{max(each - 2, 1):.1f}" '
               f'height="{height:.1f}"><title>{hover}</title></rect>')
    yield f'<line x1="0" y1="{floor}" x2="{_WIDTH}" y2="{floor}"/>'


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #f5f6f8; margin: 0 }
main { max-width: 1200px; margin: 0 auto; padding: 24px }
h1 { font-size: 24px; overflow-wrap: anywhere } h2 { font-size: 18px; margin-top: 32px }
table { border-collapse: collapse; background: #fff; width: 100% }
th, td { text-align: left; padding: 5px 8px; border: 1px solid #dde2e8; vertical-align: top; overflow-wrap: anywhere }
th { background: #eef1f5; font-weight: 600; white-space: nowrap; overflow-wrap: normal } .facts { width: auto }
.histograms { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 16px }
.histograms { margin-top: 24px } .histograms small { display: block }
figure { margin: 0; background: #fff; border: 1px solid #dde2e8; padding: 12px }
svg { width: 100%; height: auto } figure rect, .bar rect { fill: #3b7dd8 } figure line { stroke: #8a94a3 }
figure text { font-size: 12px; fill: #5b6675 } .histograms text { font-size: 15px } small { color: #5b6675 }
.bars th, .bars td { white-space: nowrap; vertical-align: middle } .bar { width: 100% } .bar .limit { fill: #c62828 }
.bar svg { height: 16px; display: block } h2 small { font-size: 13px; font-weight: 400 }
.wide { overflow-x: auto } .plain td, .problems td { white-space: nowrap } .plain th { white-space: normal }
.wide .long { white-space: normal; min-width: 7em; overflow-wrap: normal } .wide .torn { overflow-wrap: anywhere }
.problems td:last-child { min-width: 14em } h3 { font-size: 16px; margin: 24px 0 8px; overflow-wrap: anywhere }
.answer th { width: 6em }
details { margin-top: 24px } summary { cursor: pointer; font-weight: 600; padding: 4px 0 }
@media (max-width: 600px) {
  main { padding: 12px } .facts th { white-space: normal } .curve text { font-size: 14px }
}
@media (min-width: 601px) { .problems td:first-child { white-space: nowrap } }
.turns { background: #fff; border: 1px solid #dde2e8; padding: 14px; white-space: pre-wrap; overflow-wrap: anywhere }
.target { background: #cdeccf } .media { background: #dbe7fb } .turns span { border-radius: 3px }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 160px), 1fr)); gap: 8px }
.tiles, .curves { margin: 16px 0 }
.tiles > div { background: #fff; border: 1px solid #dde2e8; padding: 6px 10px; overflow-wrap: anywhere }
.tiles dt { color: #5b6675; font-size: 13px } .tiles dd { margin: 0; line-height: 1.35 }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 16px }
.curve figcaption { font-weight: 600 } .curve small { font-weight: 400 }
.legend span { font-weight: 400; font-size: 13px; color: #5b6675; margin-right: 12px; overflow-wrap: anywhere }
.legend span { display: inline-block } .legend .target, .legend .media { color: #1d2733; padding: 1px 6px }
.timeline { background: #fff; border: 1px solid #dde2e8; overflow-x: auto }
.timeline > * { max-width: none; width: 100%; min-width: 760px; border: 0; margin: 0; display: block }
.questions { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 16px }
.questions > div { background: #fff; border: 1px solid #dde2e8; padding: 10px; overflow-wrap: anywhere }
.questions p { margin: 4px 0 8px; white-space: pre-wrap } .questions img { max-width: min(100%, 200px) }
.status { padding: 8px 12px; border-left: 4px solid #3b7dd8; background: #fff } .status.bad { border-color: #d55e00 }
.wrong { color: #a33c00; font-weight: 600 }
img { max-width: 320px; border: 1px solid #dde2e8; margin: 4px }
.frames { display: flex; flex-wrap: wrap } .frames small { display: block; margin: 0 4px 8px }
"""
