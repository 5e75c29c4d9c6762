"""The page of one run, and that of several side by side, put together from facts, curves, tables and answers."""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from html import escape

from mm.errors import counted
from mm.page.curve import Bin
from mm.page.facts import GIB, run_facts, settings, status
from mm.page.plot import BAD, COLOURS, Marks, Plot, Series
from mm.page.record import Answered, RunRecord
from mm.page.tables import MAX_OPEN, settings_table, tables
from mm.report import Report, Table, page, picture_tag

_MAX_QUESTIONS = 24
_MAX_THUMBNAILS = 4
_MAX_TIMELINE_BYTES = 400_000
_CURVES = (("Loss", "", "loss"), ("Learning rate", "", "lr"), ("Gradient norm", "before clipping", "grad_norm"),
           ("Step time", "s", "step_seconds"), ("Tokens/s per device", "tokens/s", "tokens_per_second_per_device"),
           ("Peak memory", "GiB, last rank", "max_memory_bytes"))  # fmt: skip
_SMOOTH = ("lr", "max_memory_bytes")
_OF_EVERY_RUN = ("arguments.log_dir", "started_at", "ended.at")
"""Settings that differ between any two runs."""


def run_page(record: RunRecord, now: datetime) -> str:
    """The page of one run."""
    (_, found), *facts = run_facts(record, now)
    _, is_bad = status(record, now)
    body = [
        f'<p class="status{" bad" if is_bad else ""}">{escape(found)} Page written at {now:%Y-%m-%d %H:%M:%S}.</p>',
        _tiles(facts),
        Report("", (), notes=record.notes).body(),
        _plots([record]),
        Report("", (), tuple(tables(record))).body(),
        *_timelines(record),
        *_answers(record.questions),
        Report("", (), (settings_table(record),)).body() if record.facts else "",
    ]
    return page(f"Run {record.name}", "\n".join(body))


def runs_page(runs: Sequence[RunRecord], now: datetime) -> str:
    """The page of several runs: the settings that differ, facts side by side, and curves in one picture."""
    names = tuple(one.name for one in runs)
    facts = [dict(run_facts(one, now)) for one in runs]
    body = [
        f'<p class="status">Page written at {now:%Y-%m-%d %H:%M:%S}.</p>',
        _differences([one for one in runs if one.facts]).body(),
        Report("", (), (_side_by_side("Facts", names, facts),)).body(),
        _plots(runs),
        Report("", (), notes=tuple(f"{one.name}: {note}" for one in runs for note in one.notes)).body(),
    ]
    return page(f"Runs {', '.join(names[:-1])} and {names[-1]}", "\n".join(body))


def _differences(runs: Sequence[RunRecord]) -> Report:
    """The settings that differ between runs whose settings are known; if there are many, they are folded."""
    if len(runs) < 2:
        return Report("", ())
    table = _side_by_side("Settings that differ", [one.name for one in runs], [
        {name: value for name, value in settings(one).items() if name not in _OF_EVERY_RUN} for one in runs])
    rows = tuple(row for row in table.rows if len(set(row[1:])) > 1)
    if not rows:
        return Report("", (), notes=("All settings are the same.",))
    title = f"{table.title} ({len(rows):,})"
    return Report("", (), (replace(table, title=title, rows=rows, is_folded=len(rows) > MAX_OPEN),))


def _tiles(facts: Sequence[tuple[str, str]]) -> str:
    tiles = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _side_by_side(title: str, names: Sequence[str], columns: Sequence[dict[str, str]]) -> Table:
    """A column for each run; a missing value is a dash."""
    keys = dict.fromkeys(key for one in columns for key in one)
    return Table(title, ("", *names), tuple((key, *(one.get(key, "-") for one in columns)) for key in keys))


def _plots(runs: Sequence[RunRecord]) -> str:
    steps = [one.history.curves["loss"].bins for one in runs if one.history.num_steps]
    if not steps:
        return ""
    span = (min(bins[0].first for bins in steps), max(bins[-1].last for bins in steps))
    figures = [_plot(runs, *curve, span).svg() for curve in _CURVES]
    figures.append(Plot("Score of answers", "%", [
        Series(one.name, one.history.scores.bins, colour, is_noisy=False)
        for one, colour in zip(runs, COLOURS, strict=False)], (), span).svg())
    return f'<div class="curves">{"".join(figures)}</div>'


def _plot(runs: Sequence[RunRecord], title: str, unit: str, field: str, span: tuple[int, int]) -> Plot:
    factor = 1 / GIB if field == "max_memory_bytes" else 1.0
    is_alone = len(runs) == 1
    series, marks = [], []
    for one, colour in zip(runs, COLOURS, strict=False):
        bins = [_scaled(single, factor) for single in one.history.curves[field].bins]
        series.append(Series(one.name, bins, colour, field not in _SMOOTH))
        if field == "loss":
            marks.append(Marks("validation" if is_alone else f"{one.name}, validation",
                               one.history.validation_losses.bins, "diamond", COLOURS[2] if is_alone else colour))
        if field in ("loss", "grad_norm") and is_alone:
            marks.append(Marks("bad step or spike", one.history.spike_steps.bins, "cross", BAD, at_top=True))
    return Plot(title, unit, series, marks, span)


def _scaled(one: Bin, factor: float) -> Bin:
    return one if factor == 1.0 else replace(
        one, total=one.total * factor, least=one.least * factor, most=one.most * factor)


def _timelines(record: RunRecord) -> Iterator[str]:
    """The picture of the latest step that has one; it is embedded as an image, in which no script runs."""
    small = [one for one in record.timelines if one.stat().st_size <= _MAX_TIMELINE_BYTES]
    if small:
        content = b64encode(small[-1].read_bytes()).decode()
        others = ", ".join(one.name for one in record.timelines if one != small[-1])
        yield (f'<h2>Timeline of a step ({escape(small[-1].name)})</h2><div class="timeline"><img alt="timeline" '
               f'src="data:image/svg+xml;base64,{content}"></div>')
        yield f"<p>Others in --log-dir: {escape(others)}</p>" if others else ""


def _answers(questions: Sequence[Answered]) -> Iterator[str]:
    if not questions:
        return
    shown = questions[:_MAX_QUESTIONS]
    yield f"<h2>Answers ({counted(len(shown), 'question')}, the worst answered first)</h2>"
    yield f'<div class="questions">{"".join(map(_question, shown))}</div>'


def _question(asked: Answered) -> str:
    pictures = "".join(picture_tag(path.read_bytes(), "image of the question")
                       for path in asked.thumbnails[:_MAX_THUMBNAILS])
    rows = "".join(f"<tr><td>step {step:,}</td><td{_style(score)}>{escape(text) or '(nothing)'}</td>"
                   f"<td>{score:.0%}</td></tr>" for step, text, score in asked.answers)
    return (f"<div>{pictures}<p>{asked.number + 1}. {escape(asked.question)}</p>"
            f"<table>{rows}<tr><td>right</td><td>{escape(' | '.join(asked.right))}</td><td></td></tr></table></div>")


def _style(score: float) -> str:
    return "" if score >= 1 else ' class="wrong"'
