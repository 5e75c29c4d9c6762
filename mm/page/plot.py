"""Curves of a run over its steps: binned so that no extreme value is lost, and placed on axes for the page."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mm.report import round_step

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
