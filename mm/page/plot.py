"""Curves of a run over its steps: binned so that no extreme value is lost, and placed on axes for the page."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mm.report import round_step

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""One colour for each run, from Okabe and Ito's palette, which colour-blind people can tell apart."""
MAX_BINS = 400
"""Most bins of a curve.  A picture on a screen shows hardly more."""
_NUM_TICKS = 5
_LOG_RATIO = 30.0
"""The axis is logarithmic if the largest value is more than this many times the median."""
_MEAN_SHARE = 25
"""A running mean covers one ``_MEAN_SHARE``-th of the bins of its curve."""


@dataclass(frozen=True)
class Series:
    """A number of one run, at some of its steps."""

    name: str
    steps: np.ndarray
    """float64, ascending."""
    values: np.ndarray
    """float64; NaN where a value is not finite."""
    colour: str
    is_noisy: bool = True
    """Whether the line is a running mean."""


@dataclass
class Chart:
    """A plot in the coordinates of its picture, for the template."""

    title: str
    notes: list[str]
    legend: list[tuple[str, str]]
    """Colour and name."""
    values: list[tuple[float, str]] = field(default_factory=list)
    """Ticks of the vertical axis."""
    steps: list[tuple[float, str]] = field(default_factory=list)
    """Ticks of the horizontal axis."""
    curves: list[tuple[str, str, str]] = field(default_factory=list)
    """Colour, path from the least to the largest value of each bin, path of the mean."""
    dots: list[tuple[float, float, str, str]] = field(default_factory=list)
    """Position, colour and name of single values."""
    spikes: list[tuple[float, str]] = field(default_factory=list)
    """Steps that are marked, with the reason."""
    width: int = 460
    height: int = 220
    left: int = 58
    right: int = 448
    floor: int = 182
    """Where the horizontal axis is."""


def binned(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The finite values in at most ``MAX_BINS`` bins of equally many steps: float64 [bins, 4], the columns are the mean
    step, and the mean, least and largest value."""
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if not len(steps):
        return np.empty((0, 4))
    width = -(-(steps[-1] - steps[0] + 1) // MAX_BINS)
    starts = np.flatnonzero(np.diff((steps - steps[0]) // width, prepend=-1))
    counts = np.diff(starts, append=len(steps))
    return np.stack([np.add.reduceat(steps, starts) / counts, np.add.reduceat(values, starts) / counts,
                     np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)], axis=1)


def running_mean(values: np.ndarray, length: int) -> np.ndarray:
    """The mean of the ``length`` values around each, or of fewer at the ends."""
    window = np.ones(length)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def chart(title: str, unit: str, series: Sequence[Series], dots: Sequence[Series], spikes: Sequence[tuple[int, str]],
          span: tuple[float, float]) -> Chart | None:
    """Draw ``series`` as curves, ``dots`` as single values, and lines at the ``spikes``; ``span`` is the first and last
    step of the axis.  None without a finite value."""
    bins = [binned(one.steps, one.values) for one in series]
    shown = np.concatenate([*bins, *(np.stack([one.steps, *[one.values] * 3], axis=1) for one in dots)])
    if not len(shown):
        return None
    least, most = shown[:, 2].min(), shown[:, 3].max()
    is_log = least > 0 and most > _LOG_RATIO * np.median(shown[:, 1])
    if is_log:
        least, most = np.log10(least), np.log10(most)
    elif least > 0 and most > 1.5 * least:
        least = 0.0  # a zero line where it costs little of the height
    margin = 0.04 * ((most - least) or abs(most) or 1.0)
    low, high = least - margin * (least != 0), most + margin
    num_lost = sum(int((~np.isfinite(one.values)).sum()) for one in series)
    notes = [unit] * bool(unit) + ["logarithmic"] * bool(is_log) + [f"not finite: {num_lost:,}"] * bool(num_lost)
    found = Chart(title, notes, [(one.colour, one.name) for one in (*series, *dots) if len(one.steps)])

    def x(step: np.ndarray | float) -> np.ndarray:
        share = (np.asarray(step) - span[0]) / max(span[1] - span[0], 1)
        return np.round(found.left + share * (found.right - found.left), 1)

    def y(value: np.ndarray | float) -> np.ndarray:
        value = np.log10(value) if is_log else np.asarray(value)
        return np.round(found.floor - (value - low) / (high - low) * (found.floor - 10), 1)

    ticks = 10.0 ** np.arange(math.ceil(low), math.floor(high) + 1) if is_log else _ticks(low, high)
    found.values = [(float(y(value)), number_text(value)) for value in ticks]
    found.steps = [(float(x(step)), f"{step:,.0f}") for step in _ticks(*span) if step == int(step)]
    found.spikes = [(float(x(step)), f"step {step:,}: {why}") for step, why in spikes]
    for one, (steps, means, smallest, largest) in ((one, rows.T) for one, rows in zip(series, bins, strict=True)):
        if len(steps):
            line = running_mean(means, max(1, len(means) // _MEAN_SHARE) if one.is_noisy else 1)
            edges = _path([*x(steps), *x(steps[::-1])], [*y(largest), *y(smallest[::-1])])
            found.curves.append((one.colour, f"{edges}Z", _path(x(steps), y(line))))
    found.dots = [(float(x(step)), float(y(value)), one.colour, f"{one.name}, step {step:,.0f}: {number_text(value)}")
                  for one in dots for step, value in zip(one.steps, one.values, strict=True)]
    return found


def _path(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> str:
    return "M" + "L".join(f"{one:g} {other:g}" for one, other in zip(x, y, strict=True))


def _ticks(least: float, most: float) -> Iterator[float]:
    """Round numbers between the two."""
    width = round_step(max(most - least, 1e-300) / _NUM_TICKS)
    return (float(number * width) for number in range(math.ceil(least / width), math.floor(most / width) + 1))


def number_text(value: float) -> str:
    """A number of an axis or a fact: five significant digits below 10,000, whole above."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:,.5g}"
