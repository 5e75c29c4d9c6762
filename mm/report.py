"""A report: facts, tables, histograms and problems, as text for the terminal and as one HTML page."""

import os
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mm.errors import MAX_PROBLEMS, UserError, counted, printable
from mm.files import write_whole

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_BAR_CHARACTERS = 40


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
        width = max(1, int(round_step((high - low + 1) / num_bins)))
        start = low // width * width
        edges = np.arange(start, high + width + 1, width)
        counts, _ = np.histogram(values, edges)
        return cls(title, unit, tuple(map(float, edges)), tuple(map(int, counts)))

    @property
    def most(self) -> int:
        """The count of the highest bin."""
        return max(self.counts, default=0)

    def name(self, number: int) -> str:
        """The range of a bin in words."""
        least, most = self.edges[number], self.edges[number + 1] - 1
        return f"{least:,.0f} to {most:,.0f}" if most > least else f"{least:,.0f}"


@dataclass(frozen=True)
class Table:
    """Rows of formatted cells below a header."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_folded: bool = False
    """Whether the page shows its rows only on a click."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with one sample or file."""

    where: str
    what: str
    kind: str = ""
    """The message without what differs between samples.  The page groups problems by it."""


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
        """Blocks of lines: title, facts, tables and histograms."""
        width = max((len(name) for name, _ in self.facts), default=0)
        return [[self.title], [f"{name.ljust(width)}  {value}" for name, value in self.facts],
                *map(_table_lines, self.tables), *map(_histogram_lines, self.histograms)]

    def html(self) -> str:
        """The whole page, with the problems above the statistics, the most frequent kind first."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for problem in self.problems:
            groups.setdefault(problem.kind, []).append((problem.where, problem.what))
        heading = counted(len(self.problems), "problem") if self.problems else "No problems"
        return page(self.title, render("report.html", report=self, heading=heading,
                                       groups=sorted(groups.items(), key=lambda group: -len(group[1]))))

    def body(self) -> "Markup":
        """Everything except the problems, as a part of a page."""
        return render("report.html", report=self)


def render(template: str, **values: Any) -> "Markup":
    """Fill in a file of ``mm/templates``; every value is escaped, except what ``render`` has returned."""
    from markupsafe import Markup

    return Markup(_environment().get_template(template).render(**values))


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True,
                        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters["base64"] = lambda content: b64encode(content).decode()
    return found


def page(title: str, body: str) -> str:
    """A self-contained HTML document: no script, no font, no network.  ``body`` is HTML."""
    from markupsafe import Markup

    return printable(render("page.html", title=title, body=Markup(body)))


def check_page(path: Path | None) -> None:
    """Raise UserError for an ``--html`` that cannot be written, before any work is done."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"--html is {path}, which cannot be written; name a file in an existing directory that may be "
                        f"written.")


def write_page(path: Path, html: str) -> str:
    """Write a page; returns the line that says so."""
    write_whole(path, html.encode())
    return printable(f"written: {path}")


def round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** np.floor(np.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)


def _table_lines(table: Table) -> list[str]:
    rows = (table.header, *table.rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [table.title, *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                           for row in rows)]


def _histogram_lines(histogram: Histogram) -> list[str]:
    names = [f"{edge:,.0f}" for edge in histogram.edges[:-1]]
    width = max(map(len, names), default=0)
    bars = [f"{name.rjust(width)}  {'#' * -(-count * _BAR_CHARACTERS // max(histogram.most, 1))} {count:,}"
            for name, count in zip(names, histogram.counts, strict=True)]
    return [f"{histogram.title} ({histogram.unit}, from)", *bars]
