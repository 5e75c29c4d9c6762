"""``mm-page``, which is ``python -m mm.page``: one HTML file about a run, made from the files in its ``--log-dir``.

Curves are binned so that no extreme value is lost.  What a file says is formatted as soon as it is read, so that
damage is reported with its place.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from mm.config.command_line import CommandLine
from mm.config.parse import STRICT, Positional
from mm.console import duration
from mm.data.loader.quarantine import LEDGER
from mm.data.sample import BadSample
from mm.errors import UserError, counted
from mm.files import (
    ANSWERS_FOLDER,
    FACTS_FILE,
    MAX_THUMBNAILS,
    METRICS_FILE,
    PAGE_FILE,
    PREDICTIONS_FILE,
    THUMBNAILS_FOLDER,
    complete,
    json_object,
)
from mm.process import run_command
from mm.report import Report, Table, check_page, page, render, round_step, write_page

GIB = 2**30
_CURVES = {
    "loss": ("Loss", ""), "lr": ("Learning rate", ""), "grad_norm": ("Gradient norm", "before clipping"),
    "step_seconds": ("Step time", "s"), "tokens_per_second_per_device": ("Tokens/s per device", "tokens/s"),
    "max_memory_bytes": ("Peak memory", "GiB, last rank"),
}  # fmt: skip
"""Fields of a step that have a curve, with its title and unit."""
_SMOOTH = ("lr", "max_memory_bytes")
_COLUMNS = ("iteration", *_CURVES)
_NUM_RECENT = 100
"""Steps in the medians of the present speed."""
MAX_BINS = 400
"""Most bins of a curve.  A picture on a screen shows hardly more."""
_NUM_TICKS = 5
_LOG_RATIO = 30.0
"""The axis is logarithmic if the largest value is more than this many times the median."""
_MEAN_SHARE = 25
"""A running mean covers one ``_MEAN_SHARE``-th of the bins of its curve."""
_FRAME = {"width": 460, "height": 220, "left": 58, "right": 448, "top": 10, "bottom": 182}
"""Size of the picture of a curve, and where its axes are."""
_MAX_OPEN, _MAX_LISTED = 12, 50
"""Most rows of a table that is not folded, and of any table: the latest ones."""
_MAX_SAMPLES = 8
"""Most numbers of samples in a cell."""
_MAX_ANSWERS = 24
_KINDS = {"text": "all tokens text", "visual": "all tokens visual", "stated": "with --dry-run-patches"}
"""Kinds of microbatches in ``mm.cost.stage_memory`` -> how a header names them."""

Row = Mapping[str, Any]
Cells = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PageFlags:
    """``mm-page``."""

    run: Annotated[Path, Positional("RUN_DIR")] = Field(description="the --log-dir of a run")
    html: Path | None = Field(None, description=f"the file to write; absent = {PAGE_FILE} in RUN_DIR")


PAGE = CommandLine(
    "mm-page", "Write one HTML file about a run, which may have ended or not: facts, curves, tables, timeline, answers "
    "and settings.", PageFlags, "RUN_DIR [--html PAGE]")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status: 0, or 2 for errors that the user can fix."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _run(words), lambda: "the page is as it was; run the same command again")


def _run(words: Sequence[str]) -> int:
    flags = PAGE.read(PAGE.split(words))
    check_page(flags.html)
    print(write_run_page(flags.run, flags.html))
    return 0


def write_run_page(folder: Path, path: Path | None = None) -> str:
    """Write the page of the run in ``folder``, its ``--log-dir``; returns the line that says so.  Raises UserError if
    there is no run, or a file is damaged."""
    return write_page(path or folder / PAGE_FILE, run_page(folder, str(folder), datetime.now()))


def run_page(folder: Path, name: str, now: datetime) -> str:
    """The page of the run in ``folder``, which is called ``name``."""
    from mm.timeline import measured_files  # not at the top, as it imports torch, which --help does not need

    path, facts_path = folder / METRICS_FILE, folder / FACTS_FILE
    if not path.is_file() or not facts_path.is_file():
        raise UserError(f"{folder}: has no {METRICS_FILE} and {FACTS_FILE}; give the --log-dir of a run that has begun "
                        f"(the default is logs, where mm-train was started)")
    metrics = Metrics(path)
    with _reading(str(facts_path), "the description of a run", "start the run again, which writes it"):
        facts = json_object(facts_path.read_bytes())
        shown = (("status", _status(facts, metrics, path)), ("page written", f"{now:%Y-%m-%d %H:%M:%S}"),
                 *metrics.facts(facts["arguments"]["train_iters"]), *_facts(facts))
        memory = _memory(facts["predicted_peak_bytes"], metrics.stage_memory_bytes)
        settings = Table("All settings", ("setting", "value"), tuple(_flat("", facts)), is_folded=True)
    answered_at, answers = _answers(folder / ANSWERS_FOLDER)
    tables = Report("", (), tuple(_listed([*metrics.tables(), memory, _left_out(folder / LEDGER)])))
    return page(f"Run {name}", render(
        "run.html", facts=Report("", shown).body(), charts=metrics.charts(), tables=tables.body(),
        timeline=next(iter(measured_files(folder, ".svg")[-1:]), None), answers=answers, answered_at=answered_at,
        settings=Report("", (), (settings,)).body()))


# What the files of a run say


class Metrics:
    """The rows of ``metrics.jsonl`` as the page shows them; for all steps, only ``_COLUMNS`` are kept."""

    def __init__(self, path: Path) -> None:
        """Read a file; an incomplete last line is ignored.  Raises UserError naming a damaged line."""
        self._steps: list[tuple[float, ...]] = []
        self._mfu: list[float] = []
        self._epoch: float | None = None
        self._losses: list[tuple[int, float]] = []
        self._scores: list[tuple[int, float]] = []
        self._spikes: list[tuple[int, str]] = []
        self._rows: dict[str, list[Cells]] = {"validation": [], "score": [], "spike": []}
        self._slowest: list[Cells] = []
        self.stage_memory_bytes: list[float] = []
        """Peak memory of each stage so far."""
        self._num_tokens = self._num_unchanged = 0
        for place, line in _lines(path):
            with _reading(place, "a row of a run's metrics", "remove that line, and make the page again"):
                self._add(json_object(line))

    def _add(self, row: Row) -> None:
        kind, iteration = row["kind"], int(row.get("iteration", 0))
        if kind == "step":
            self._steps.append(tuple(float(np.nan if row[name] is None else row[name]) for name in _COLUMNS))
            self._mfu.append(float(np.nan if row.get("mfu") is None else row["mfu"]))
            self._epoch = None if row.get("epoch") is None else float(row["epoch"])
            self._num_tokens += int(row["num_tokens"])
            self._num_unchanged += not row["updated"]
            self.stage_memory_bytes = list(map(float, row.get("stage_memory_bytes") or self.stage_memory_bytes))
            if row.get("slowest_ranks"):
                self._slowest = [*_slowest(row["slowest_ranks"])]
        elif kind == "validation":
            loss, best = row["validation_loss"], row["best_validation_loss"]
            if loss is not None:
                self._losses.append((iteration, float(loss)))
            self._rows[kind].append((
                f"{iteration:,}", "not finite" if loss is None else number_text(loss),
                "none" if best is None else f"{number_text(best)}, step {row['best_iteration']:,}",
                f"{row['num_samples']:,}", f"{row['validation_seconds']:,.1f}"))
        elif kind == "score":
            percent = float(row["validation_score_percent"])
            self._scores.append((iteration, percent))
            self._rows[kind].append((f"{iteration:,}", f"{percent:.2f}%", f"{row['num_questions']:,}",
                                     f"{row['num_truncated_answers']:,}", f"{row['answer_seconds']:,.1f}"))
        elif kind == "spike":
            self._spikes.append((iteration, str(row["why"])))
            self._rows[kind].append((
                f"{iteration:,}", str(row["why"]), "unchanged" if row["skipped"] else "updated",
                ", ".join(map(str, row["samples"][:_MAX_SAMPLES])) + " ..." * (len(row["samples"]) > _MAX_SAMPLES)))

    def _column(self, name: str) -> np.ndarray:
        """One of ``_COLUMNS`` for all steps, float64; NaN where it is not finite."""
        place = _COLUMNS.index(name)
        return np.array([one[place] for one in self._steps], dtype=np.float64)

    @property
    def last_iteration(self) -> int | None:
        """The last step."""
        return int(self._steps[-1][0]) if self._steps else None

    def facts(self, train_iters: int) -> Iterator[tuple[str, str]]:
        """How far the run is, and how fast."""
        if (done := self.last_iteration) is None:
            return
        seconds, speed = (_recent(self._column(name)) or 0.0 for name in (
            "step_seconds", "tokens_per_second_per_device"))
        loss, mfu = self._column("loss")[-1], _recent(self._mfu)
        yield "step", f"{done:,} of {train_iters:,} ({done / train_iters:.1%})" + (
            "" if self._epoch is None else f", epoch {self._epoch:.2f}")
        if done < train_iters:
            yield "time left", f"{duration((train_iters - done) * seconds)}, without validations and checkpoints"
        yield "time in steps", duration(float(self._column("step_seconds").sum()))
        yield "tokens", f"{self._num_tokens:,}"
        if np.isfinite(loss):
            yield "loss", number_text(loss)
        yield from (("best validation loss", best) for _, _, best, *_ in self._rows["validation"][-1:])
        yield from (("score", percent) for _, percent, *_ in self._rows["score"][-1:])
        yield "bad steps and spikes", str(len(self._spikes))
        yield "steps without update", f"{self._num_unchanged:,}"
        recent = f"median of the last {counted(min(len(self._steps), _NUM_RECENT), 'step')}"
        yield "step time", f"{number_text(seconds)} s, {recent}"
        yield "tokens/s per device", f"{speed:,.0f}, {recent}"
        yield "MFU", "unknown: no peak of this device is known" if mfu is None else f"{mfu:.1%}, {recent}"
        yield "peak memory", f"{self._column('max_memory_bytes').max() / GIB:,.2f} GiB, last rank"

    def charts(self) -> list[dict[str, Any]]:
        """All curves that have a value."""
        found = [chart(title, unit, self._column("iteration"), self._column(name) / (GIB if "GiB" in unit else 1.0),
                       name not in _SMOOTH, self._losses if name == "loss" else (),
                       self._spikes if name in ("loss", "grad_norm") else ())
                 for name, (title, unit) in _CURVES.items()]
        scores = np.array(self._scores).reshape(-1, 2).T
        return [one for one in (*found, chart("Score of answers", "%", *scores, is_noisy=False)) if one is not None]

    def tables(self) -> Iterator[Table]:
        for kind, title, header in (
            ("validation", "Validations", ("step", "loss", "best", "samples", "seconds")),
            ("score", "Scored answers", ("step", "score", "questions", "truncated", "seconds")),
            ("spike", "Bad steps and spikes", ("step", "why", "weights", "samples")),
        ):
            yield Table(title, header, tuple(self._rows[kind]))
        yield Table("Slowest ranks", ("ranks", "stage", "replica", "device", "own time in a step",
                                      "against the median"), tuple(self._slowest))


def _recent(values: Sequence[float] | np.ndarray) -> float | None:
    """The median over the latest steps that have the value."""
    latest = np.asarray(values[-_NUM_RECENT:])
    found = latest[~np.isnan(latest)]
    return float(np.median(found)) if len(found) else None


def _slowest(ranks: Sequence[Row]) -> Iterator[Cells]:
    for one in ranks:
        yield (", ".join(map(str, one["ranks"])), str(one["stage"]), str(one["replica"]),
               ", ".join(f"{host} {device}" for host, device in zip(one["hosts"], one["devices"], strict=True)),
               f"{1000 * one['own_seconds']:,.0f} ms", f"{one['share']:+,.0%}, other {one['compared_with']}")


def _status(facts: Row, metrics: Metrics, path: Path) -> str:
    """Whether the run has ended and how, as far as its files say."""
    if ended := facts.get("ended"):
        return f"ended at {ended['at']}: {ended['how']}"
    if metrics.last_iteration is None:
        return "no step has been recorded yet"
    return (f"no end is recorded: the run goes on, or it was killed; step {metrics.last_iteration:,} is the last, at "
            f"{datetime.fromtimestamp(path.stat().st_mtime):%Y-%m-%d %H:%M:%S}")


def _facts(facts: Row) -> Iterator[tuple[str, str]]:
    args, model = facts["arguments"], facts["model"]
    yield "model", (f"{Path(args['mm_model']).name} ({model['vision']['num_layers']} ViT layers + "
                    f"{model['language']['num_layers']} LLM layers)")
    yield "layout", (f"tensor {args['tensor_model_parallel_size']} x context {args['context_parallel_size']} x "
                     f"pipeline {facts['pipeline_model_parallel_size']} x data {facts['data_parallel_size']} = "
                     f"{counted(facts['world_size'], 'rank')}")
    yield "device", f"{facts['ran_on']['device']}, {facts['ran_on']['backend']}"
    yield from ((name.replace("_", " "), str(facts[name])) for name in ("precision", "global_batch_size", "started_at"))


def _memory(predicted: Sequence[Row], measured: Sequence[float]) -> Table:
    """Peak memory of each stage as predicted for each kind of microbatch, and as measured."""
    kinds = list(predicted[0]) if predicted else []
    rows = [[*(predicted[stage][kind] for kind in kinds), measured[stage] if stage < len(measured) else None]
            for stage in range(len(predicted) or len(measured))]
    return Table("Peak memory of the stages in GiB",
                 ("stage", *(f"predicted, {_KINDS.get(kind, kind)}" for kind in kinds), "measured"),
                 tuple((str(stage), *("-" if one is None else f"{one / GIB:,.2f}" for one in row))
                       for stage, row in enumerate(rows)))


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """All settings of ``run.json`` by their path, such as ``arguments.lr``; those not set are left out."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name != "weights":  # long lists of names
                yield from _flat(f"{path}.{name}" if path else str(name), inner)
    elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        for number, inner in enumerate(value):
            yield from _flat(f"{path}.{number}", inner)
    elif value not in (None, [], ""):
        yield path, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _left_out(ledger: Path) -> Table:
    rows = list[Cells]()
    for place, line in _lines(ledger) if ledger.is_file() else ():
        with _reading(place, "a bad sample", "remove that line, and make the page again"):
            bad = BadSample(**json_object(line))
            rows.append((bad.where, bad.what))
    return Table("Samples left out", ("where", "what"), tuple(rows))


def _answers(folder: Path) -> tuple[int, list[tuple[list[bytes], str]]]:
    """The iteration of the latest answers, and the worst of them: images of the question as JPEG, and HTML."""
    from mm.checkpoint.directories import ITERATION_NAME  # imports torch

    files = {int(match[1]): one for one in folder.glob(f"iter_*/{PREDICTIONS_FILE}")
             if (match := ITERATION_NAME.fullmatch(one.parent.name))}
    if not files:
        return 0, []
    found = list[tuple[float, int, Report]]()
    for number, (place, line) in enumerate(_lines(files[max(files)])):
        with _reading(place, "an answer", "remove the file, and make the page again"):
            row = json_object(line)
            options = "".join(f"\n{letter}. {text}" for letter, text in row.get("options", {}).items())
            found.append((float(row["score"]), number, Report("", (
                ("question", row["question"] + options), ("answered", row["prediction"] or "(nothing)"),
                ("right", " | ".join(row["right"])), ("score", f"{row['score']:.0%}")))))
    worst = sorted(found, key=lambda one: one[:2])[:_MAX_ANSWERS]
    images = [[thumbnail_path(folder, number, image) for image in range(MAX_THUMBNAILS)] for _, number, _ in worst]
    return max(files), [([one.read_bytes() for one in some if one.is_file()], answer.body())
                        for some, (_, _, answer) in zip(images, worst, strict=True)]


def thumbnail_path(folder: Path, number: int, image: int) -> Path:
    """The small copy of an image of question ``number``, in the ``ANSWERS_FOLDER`` of a run."""
    return folder / THUMBNAILS_FOLDER / f"{number}_{image}.jpg"


def _listed(tables: Sequence[Table]) -> Iterator[Table]:
    """Those that have rows, with the number of rows, of which only the latest are kept."""
    for one in tables:
        num_rows, some = len(one.rows), f"; the latest {_MAX_LISTED}" if len(one.rows) > _MAX_LISTED else ""
        if num_rows:
            yield Table(f"{one.title} ({num_rows:,}{some})", one.header, one.rows[-_MAX_LISTED:], num_rows > _MAX_OPEN)


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The complete lines of a file, each with its place."""
    with path.open("rb") as stream:
        yield from ((f"{path}:{number}", line) for number, line in enumerate(complete(stream), start=1))


@contextmanager
def _reading(place: str, what: str, cure: str) -> Iterator[None]:
    """The body reads one ``what`` and formats it; its errors become a UserError that names the place."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(f"{place}: is not {what} ({type(error).__name__}: {error}); {cure}") from error


# Curves


def binned(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The finite values in at most ``MAX_BINS`` bins of equally many steps: float64 [4, bins], the rows are the mean
    step, and the mean, least and largest value."""
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if not len(steps):
        return np.empty((4, 0))
    width = -(-(steps[-1] - steps[0] + 1) // MAX_BINS)
    starts = np.flatnonzero(np.diff((steps - steps[0]) // width, prepend=-1))
    counts = np.diff(starts, append=len(steps))
    return np.stack([np.add.reduceat(steps, starts) / counts, np.add.reduceat(values, starts) / counts,
                     np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)])


def chart(
    title: str, unit: str, steps: np.ndarray, values: np.ndarray, is_noisy: bool = True,
    dots: Sequence[tuple[int, float]] = (), spikes: Sequence[tuple[int, str]] = (),
) -> dict[str, Any] | None:
    """A curve for the template, with single values (``dots``) and lines at the ``spikes``; None without a finite value.
    ``is_noisy``: the line is a running mean."""
    middles, means, smallest, largest = binned(steps, values)
    if not len(middles):
        return None
    least, most = (f(np.append(one, [value for _, value in dots])) for f, one in (
        (np.min, smallest), (np.max, largest)))
    if is_log := bool(least > 0 and most > _LOG_RATIO * np.median(means)):
        least, most = np.log10(least), np.log10(most)
    elif least > 0 and most > 1.5 * least:
        least = 0.0  # a zero line where it costs little of the height
    margin = 0.04 * ((most - least) or abs(most) or 1.0)
    low, high, first, last = least - margin * (least != 0), most + margin, steps[0], max(steps[-1], steps[0] + 1)
    num_lost, (left, right, top, bottom) = int((~np.isfinite(values)).sum()), list(_FRAME.values())[2:]

    def x(step: np.ndarray | float) -> np.ndarray:
        return np.round(left + (np.asarray(step) - first) / (last - first) * (right - left), 1)

    def y(value: np.ndarray | float) -> np.ndarray:
        value = np.log10(value) if is_log else np.asarray(value)
        return np.round(bottom - (value - low) / (high - low) * (bottom - top), 1)

    ticks = 10.0 ** np.arange(math.ceil(low), math.floor(high) + 1) if is_log else _ticks(low, high)
    window = np.ones(max(1, len(means) // _MEAN_SHARE) if is_noisy else 1)
    means = np.convolve(means, window, "same") / np.convolve(np.ones(len(means)), window, "same")
    return {
        **_FRAME, "title": title,
        "notes": [unit] * bool(unit) + ["logarithmic"] * is_log + [f"not finite: {num_lost:,}"] * bool(num_lost)
                 + ["dots: validations"] * bool(dots) + ["red: bad steps and spikes"] * bool(spikes),
        "y_ticks": [(float(y(value)), number_text(value)) for value in ticks],
        "x_ticks": [(float(x(step)), f"{step:,.0f}") for step in _ticks(first, last) if step == int(step)],
        "dots": [(float(x(step)), float(y(value)), f"step {step:,}: {number_text(value)}") for step, value in dots],
        "spikes": [(float(x(step)), f"step {step:,}: {why}") for step, why in spikes],
        "line": _path(x(middles), y(means)),
        "band": _path([*x(middles), *x(middles[::-1])], [*y(largest), *y(smallest[::-1])]) + "Z",
    }  # fmt: skip


def _path(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> str:
    return "M" + "L".join(f"{one:g} {other:g}" for one, other in zip(x, y, strict=True))


def _ticks(least: float, most: float) -> Iterator[float]:
    """Round numbers between the two."""
    width = round_step((most - least) / _NUM_TICKS)
    return (float(number * width) for number in range(math.ceil(least / width), math.floor(most / width) + 1))


def number_text(value: float) -> str:
    """A number of an axis or a fact: five significant digits below 10,000, whole above."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:,.5g}"


if __name__ == "__main__":
    sys.exit(main())
