"""The page of a run: facts, curves, tables, timeline and answers.

Curves of a run over its steps: binned so that no extreme value is lost, and placed on axes for the page.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from mm.console import duration
from mm.errors import counted
from mm.files import PAGE_FILE
from mm.page.record import Row, RunRecord, read_run
from mm.report import Report, Table, page, render, round_step, write_page

MAX_BINS = 400
"""Most bins of a curve.  A picture on a screen shows hardly more."""
_NUM_TICKS = 5
_LOG_RATIO = 30.0
"""The axis is logarithmic if the largest value is more than this many times the median."""
_MEAN_SHARE = 25
"""A running mean covers one ``_MEAN_SHARE``-th of the bins of its curve."""
_TOP = 10


@dataclass
class Chart:
    """A curve in the coordinates of its picture, for the template."""

    title: str
    notes: list[str]
    values: list[tuple[float, str]] = field(default_factory=list)
    """Ticks of the vertical axis."""
    steps: list[tuple[float, str]] = field(default_factory=list)
    """Ticks of the horizontal axis."""
    band: str = ""
    """Path from the least to the largest value of each bin."""
    line: str = ""
    """Path of the mean."""
    dots: list[tuple[float, float, str]] = field(default_factory=list)
    """Positions and names of single values."""
    spikes: list[tuple[float, str]] = field(default_factory=list)
    """Steps that are marked, with the reason."""
    width: int = 460
    height: int = 220
    left: int = 58
    right: int = 448
    floor: int = 182
    """Where the horizontal axis is."""


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
) -> Chart | None:
    """A curve with single values (``dots``) and lines at the ``spikes``; None without a finite value.

    ``is_noisy``: the line is a running mean.
    """
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
    num_lost = int((~np.isfinite(values)).sum())
    found = Chart(title, [unit] * bool(unit) + ["logarithmic"] * is_log + [f"not finite: {num_lost:,}"] * bool(num_lost)
                  + ["dots: validations"] * bool(dots) + ["red: bad steps and spikes"] * bool(spikes))

    def x(step: np.ndarray | float) -> np.ndarray:
        return np.round(found.left + (np.asarray(step) - first) / (last - first) * (found.right - found.left), 1)

    def y(value: np.ndarray | float) -> np.ndarray:
        value = np.log10(value) if is_log else np.asarray(value)
        return np.round(found.floor - (value - low) / (high - low) * (found.floor - _TOP), 1)

    ticks = 10.0 ** np.arange(math.ceil(low), math.floor(high) + 1) if is_log else _ticks(low, high)
    found.values = [(float(y(value)), number_text(value)) for value in ticks]
    found.steps = [(float(x(step)), f"{step:,.0f}") for step in _ticks(first, last) if step == int(step)]
    found.dots = [(float(x(step)), float(y(value)), f"step {step:,}: {number_text(value)}") for step, value in dots]
    found.spikes = [(float(x(step)), f"step {step:,}: {why}") for step, why in spikes]
    window = np.ones(max(1, len(means) // _MEAN_SHARE) if is_noisy else 1)
    means = np.convolve(means, window, "same") / np.convolve(np.ones(len(means)), window, "same")
    found.line = _path(x(middles), y(means))
    found.band = _path([*x(middles), *x(middles[::-1])], [*y(largest), *y(smallest[::-1])]) + "Z"
    return found


def _path(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> str:
    return "M" + "L".join(f"{one:g} {other:g}" for one, other in zip(x, y, strict=True))


def _ticks(least: float, most: float) -> Iterator[float]:
    """Round numbers between the two."""
    width = round_step((most - least) / _NUM_TICKS)
    return (float(number * width) for number in range(math.ceil(least / width), math.floor(most / width) + 1))


def number_text(value: float) -> str:
    """A number of an axis or a fact: five significant digits below 10,000, whole above."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:,.5g}"


GIB = 2**30
_CHARTS = (("Loss", "", "loss"), ("Learning rate", "", "lr"), ("Gradient norm", "before clipping", "grad_norm"),
           ("Step time", "s", "step_seconds"), ("Tokens/s per device", "tokens/s", "tokens_per_second_per_device"),
           ("Peak memory", "GiB, last rank", "max_memory_bytes"))  # fmt: skip
_SMOOTH = ("lr", "max_memory_bytes")
_MAX_OPEN, _MAX_LISTED = 12, 50
"""Most rows of a table that is not folded, and of any table: the latest ones."""
_MAX_SAMPLES = 8
"""Most numbers of samples in a cell."""
_KINDS = {"text": "all tokens text", "visual": "all tokens visual", "stated": "with --dry-run-patches"}
"""Kinds of microbatches in ``mm.cost.stage_memory`` -> how a header names them."""


def write_run_page(folder: Path, path: Path | None = None) -> str:
    """Write the page of the run in ``folder``, its ``--log-dir``; returns the line that says so.

    Raises UserError if there is no run, or a file is damaged.
    """
    return write_page(path or folder / PAGE_FILE, run_page(read_run(folder), str(folder), datetime.now()))


def run_page(record: RunRecord, name: str, now: datetime) -> str:
    """The page of the run that is called ``name``."""
    settings = Table("All settings", ("setting", "value"), tuple(_flat("", record.facts)), is_folded=True)
    facts = Report("", (("status", _status(record)), ("page written", f"{now:%Y-%m-%d %H:%M:%S}"), *_facts(record)))
    return page(f"Run {name}", render(
        "run.html", facts=facts.body(), charts=list(_charts(record)),
        tables=Report("", (), tuple(_tables(record))).body(), timeline=record.timeline,
        answers=[(images, _answer(row).body()) for images, row in record.answers],
        answered_at=record.answered_at, settings=Report("", (), (settings,)).body()))


def _answer(row: Row) -> Report:
    options = "".join(f"\n{letter}. {text}" for letter, text in row.get("options", {}).items())
    return Report("", (("question", row["question"] + options), ("answered", row["prediction"] or "(nothing)"),
                       ("right", " | ".join(row["right"])), ("score", f"{row['score']:.0%}")))


def _status(record: RunRecord) -> str:
    """Whether the run has ended and how, as far as its files say."""
    if ended := record.facts.get("ended"):
        return f"ended at {ended['at']}: {ended['how']}"
    if record.metrics.last is None:
        return "no step has been recorded yet"
    return (f"no end is recorded: the run goes on, or it was killed; step {record.metrics.last['iteration']:,} is the "
            f"last, at {record.last_written:%Y-%m-%d %H:%M:%S}")


def _facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Names and values, first of those that change."""
    if record.metrics.last is not None:
        yield from _progress(record, record.metrics.last)
    facts, args, model = record.facts, record.facts["arguments"], record.facts["model"]
    yield "model", (f"{Path(args['mm_model']).name} ({model['vision']['num_layers']} ViT layers + "
                    f"{model['language']['num_layers']} LLM layers)")
    yield "layout", (f"tensor {args['tensor_model_parallel_size']} x context {args['context_parallel_size']} x "
                     f"pipeline {facts['pipeline_model_parallel_size']} x data {facts['data_parallel_size']} = "
                     f"{counted(facts['world_size'], 'rank')}")
    yield "device", f"{facts['ran_on']['device']}, {facts['ran_on']['backend']}"
    yield from ((name.replace("_", " "), str(facts[name])) for name in ("precision", "global_batch_size", "started_at"))


def _progress(record: RunRecord, last: Row) -> Iterator[tuple[str, str]]:
    metrics, total, done = record.metrics, record.facts["arguments"]["train_iters"], last["iteration"]
    yield "step", f"{done:,} of {total:,} ({done / total:.1%})" + (
        f", epoch {last['epoch']:.2f}" if last.get("epoch") is not None else "")
    seconds, mfu = metrics.recent_median("step_seconds") or 0.0, metrics.recent_median("mfu")
    if done < total:
        yield "time left", f"{duration((total - done) * seconds)}, without validations and checkpoints"
    yield "time in steps", duration(float(metrics.column("step_seconds").sum()))
    yield "tokens", f"{metrics.num_tokens:,}"
    if last["loss"] is not None:
        yield "loss", number_text(last["loss"])
    for row in metrics.rows("validation")[-1:]:
        yield "best validation loss", _best(row)
    for row in metrics.rows("score")[-1:]:
        yield "score", f"{row['validation_score_percent']:.2f}%"
    yield "bad steps and spikes", str(len(metrics.rows("spike")))
    yield "steps without update", f"{metrics.num_unchanged:,}"
    recent = f"median of the last {counted(len(metrics.recent), 'step')}"
    yield "step time", f"{number_text(seconds)} s, {recent}"
    yield "tokens/s per device", f"{metrics.recent_median('tokens_per_second_per_device') or 0.0:,.0f}, {recent}"
    yield "MFU", "unknown: no peak of this device is known" if mfu is None else f"{mfu:.1%}, {recent}"
    yield "peak memory", f"{metrics.column('max_memory_bytes').max() / GIB:,.2f} GiB, last rank"


def _best(row: Row) -> str:
    loss = row["best_validation_loss"]
    return "none" if loss is None else f"{number_text(loss)}, step {row['best_iteration']:,}"


def _charts(record: RunRecord) -> Iterator[Chart]:
    metrics = record.metrics
    validations = [(row["iteration"], row["validation_loss"]) for row in metrics.rows("validation")
                   if row["validation_loss"] is not None]
    spikes = [(row["iteration"], row["why"]) for row in metrics.rows("spike")]
    scores = np.array([(row["iteration"], row["validation_score_percent"]) for row in metrics.rows("score")])
    found = [chart(title, unit, metrics.column("iteration"), metrics.column(name) / (GIB if "GiB" in unit else 1.0),
                   name not in _SMOOTH, validations if name == "loss" else (),
                   spikes if name in ("loss", "grad_norm") else ()) for title, unit, name in _CHARTS]
    found.append(chart("Score of answers", "%", *scores.reshape(len(scores), 2).T, is_noisy=False))
    yield from (one for one in found if one is not None)


def _tables(record: RunRecord) -> Iterator[Table]:
    """All tables that have rows, except the settings."""
    metrics = record.metrics
    tables = (
        ("Validations", ("step", "loss", "best", "samples", "seconds"), [
            (f"{row['iteration']:,}", "not finite" if row["validation_loss"] is None else number_text(
                row["validation_loss"]), _best(row), f"{row['num_samples']:,}", f"{row['validation_seconds']:,.1f}")
            for row in metrics.rows("validation")]),
        ("Scored answers", ("step", "score", "questions", "truncated", "seconds"), [
            (f"{row['iteration']:,}", f"{row['validation_score_percent']:.2f}%", f"{row['num_questions']:,}",
             f"{row['num_truncated_answers']:,}", f"{row['answer_seconds']:,.1f}") for row in metrics.rows("score")]),
        ("Bad steps and spikes", ("step", "why", "weights", "samples"), [
            (f"{row['iteration']:,}", row["why"], "unchanged" if row["skipped"] else "updated",
             ", ".join(map(str, row["samples"][:_MAX_SAMPLES])) + " ..." * (len(row["samples"]) > _MAX_SAMPLES))
            for row in metrics.rows("spike")]),
        ("Slowest ranks", ("ranks", "stage", "replica", "device", "own time in a step", "against the median"),
         [*_slowest(metrics.compared or {})]),
        ("Peak memory of the stages in GiB", *_memory(record)),
        ("Samples left out", ("where", "what"), [(one.where, one.what) for one in record.bad_samples]))
    for title, header, rows in tables:
        some = f"; the latest {_MAX_LISTED}" if len(rows) > _MAX_LISTED else ""
        if rows:
            yield Table(f"{title} ({len(rows):,}{some})", header, tuple(rows[-_MAX_LISTED:]), len(rows) > _MAX_OPEN)


def _slowest(row: Row) -> Iterator[tuple[str, ...]]:
    for one in row.get("slowest_ranks", ()):
        yield (", ".join(map(str, one["ranks"])), str(one["stage"]), str(one["replica"]),
               ", ".join(f"{host} {device}" for host, device in zip(one["hosts"], one["devices"], strict=True)),
               f"{1000 * one['own_seconds']:,.0f} ms", f"{one['share']:+,.0%}, other {one['compared_with']}")


def _memory(record: RunRecord) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows: peak memory of each stage as predicted for each kind of microbatch, and as measured."""
    predicted, measured = record.facts["predicted_peak_bytes"], record.metrics.stage_memory_bytes
    kinds = list(predicted[0]) if predicted else []
    header = ("stage", *(f"predicted, {_KINDS.get(kind, kind)}" for kind in kinds), "measured")
    values = [[*(predicted[stage][kind] for kind in kinds), measured[stage] if stage < len(measured) else None]
              for stage in range(len(predicted) or len(measured))]
    return header, [(str(stage), *("-" if one is None else f"{one / GIB:,.2f}" for one in row))
                    for stage, row in enumerate(values)]


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
