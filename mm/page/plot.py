"""Curves as SVG: values over steps, of one or several runs, with a running mean and marks.  No script, no font."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from typing import Literal

from mm.page.curve import Bin, running_means, stretches

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""One colour for each run, from Okabe and Ito's palette, which colour-blind people can tell apart."""
BAD = "#d55e00"
"""The colour of marks for bad steps and values that are not finite."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 220, 58, 12, 10, 38
"""Sizes in pixels; the axes are left and at the bottom."""
_NUM_TICKS = 5
"""Ticks on an axis, approximately."""
_LOG_RATIO = 30.0
"""The axis is logarithmic if the largest value is more than this many times the median."""
_MEAN_SHARE = 25
"""A running mean covers one ``_MEAN_SHARE``-th of the bins of its curve."""
_MARGIN = 0.04
MarkShape = Literal["diamond", "cross"]


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    """For the legend, if there are several."""
    bins: Sequence[Bin]
    colour: str = COLOURS[0]
    is_noisy: bool = True
    """Whether to draw a running mean above the values."""

    @property
    def num_averaged(self) -> int:
        """Bins of the running mean; 1 if there is none."""
        return max(1, sum(one.count > 0 for one in self.bins) // _MEAN_SHARE) if self.is_noisy else 1

    @property
    def legend(self) -> list[tuple[str, float, str]]:
        """What is drawn: sign, opacity and name of each part."""
        width = max((one.last - one.first + 1 for one in self.bins), default=1)
        if width > 1 and self.is_noisy:
            return [("&#9608;", 0.25, f"smallest to largest of {width:,} steps"), ("&#9473;", 1.0, "running mean")]
        if self.num_averaged > 1:
            return [("&#9679;", 0.3, "each step"), ("&#9473;", 1.0, "running mean")]
        return [("&#9473;", 1.0, "each step" if width == 1 else f"mean of {width:,} steps")]


@dataclass(frozen=True)
class Marks:
    """Marks at single steps."""

    name: str
    bins: Sequence[Bin]
    """One bin for each step, or for several if there are too many."""
    shape: MarkShape
    colour: str
    at_top: bool = False
    """Whether to draw them at the upper edge: they have no value on the axis."""


@dataclass(frozen=True)
class Plot:
    """Curves of one number, with marks."""

    title: str
    unit: str
    series: Sequence[Series]
    marks: Sequence[Marks]
    span: tuple[int, int]
    """First and last step of the axis."""

    def svg(self) -> str:
        """The figure, as a part of a page; empty if there is no value."""
        axes = _Axes.of(self)
        if axes is None:
            return ""
        lost = self._lost
        notes = [self.unit] if self.unit else []
        notes += ["logarithmic"] if axes.is_log else []
        notes += [f"not finite: {sum(one.num_lost for one in lost):,}"] if lost else []
        small = f" <small>({escape('; '.join(notes))})</small>" if notes else ""
        return (f'<figure class="curve"><figcaption>{escape(self.title)}{small}{self._legend()}</figcaption>'
                f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(self.title)}">'
                f'{"".join(self._elements(axes))}</svg></figure>')

    @property
    def _lost(self) -> list[Bin]:
        """Bins with values that are not finite."""
        return [one for curve in self.series for one in curve.bins if one.num_lost]

    def _elements(self, axes: "_Axes") -> list[str]:
        share = 1.0 if len(self.series) == 1 else 0.4  # the bands of several runs must not hide anything
        return [*axes.drawn(), *(piece for curve in self.series for piece in _spread(axes, curve, share)),
                *(piece for curve in self.series for piece in _lines(axes, curve)),
                *(piece for marks in self.marks for piece in _marks(axes, marks)), *_gaps(axes, self._lost)]

    def _legend(self) -> str:
        """What the signs mean: the parts of a single curve, or the names of several curves."""
        entries = [(f"color: {one.colour}", "&#9473;", one.name) for one in self.series] if len(self.series) > 1 else [
            (f"color: {one.colour}; opacity: {opacity:g}", sign, name)
            for one in self.series for sign, opacity, name in one.legend]
        entries += [(f"color: {one.colour}", "&#9670;" if one.shape == "diamond" else "&#10005;", one.name)
                    for one in self.marks if one.bins]
        texts = (f'<span><b style="{style}">{sign}</b> {escape(name)}</span>' for style, sign, name in entries)
        return f'<div class="legend">{" ".join(texts)}</div>' if len(entries) > 1 else ""


@dataclass(frozen=True)
class _Axes:
    """Where steps and values are drawn."""

    first: float
    last: float
    least: float
    most: float
    is_log: bool

    @classmethod
    def of(cls, plot: Plot) -> "_Axes | None":
        of_marks = (one for marks in plot.marks if not marks.at_top for one in marks.bins)
        bins = [one for one in chain(*(curve.bins for curve in plot.series), of_marks) if one.count]
        if not bins:
            return None
        first, last = plot.span
        least, most = min(one.least for one in bins), max(one.most for one in bins)
        median = sorted(one.mean for one in bins)[len(bins) // 2]
        is_log = least > 0 and most > _LOG_RATIO * median
        if is_log:
            least, most = math.log10(least), math.log10(most)
        elif least > 0 and most > 1.5 * least:
            least = 0.0  # a zero line where it costs little of the height
        spread = (most - least) or abs(most) or 1.0
        lower = least if least == 0.0 else least - _MARGIN * spread
        return cls(first, max(last, first + 1), lower, most + _MARGIN * spread, is_log)

    def x(self, step: float) -> float:
        return _LEFT + (step - self.first) / (self.last - self.first) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        value = math.log10(value) if self.is_log else value
        return _HEIGHT - _BOTTOM - (value - self.least) / (self.most - self.least) * (_HEIGHT - _BOTTOM - _TOP)

    def drawn(self) -> Iterator[str]:
        """Grid, ticks and labels."""
        floor, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        for value in _log_ticks(self.least, self.most) if self.is_log else _ticks(self.least, self.most):
            y = self.y(value)
            yield f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#e3e7ec"/>'
            yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number_text(value)}</text>'
        for step in _ticks(self.first, self.last, whole=True):
            x = self.x(step)
            anchor = "end" if x > right - 16 else "middle"
            yield f'<path d="M{x:.1f} {floor}v4" stroke="#8a94a3"/>'
            yield f'<text x="{x:.1f}" y="{floor + 17}" text-anchor="{anchor}">{step:,.0f}</text>'
        yield f'<path d="M{_LEFT} {floor}H{right}" stroke="#8a94a3"/>'
        yield f'<text x="{(_LEFT + right) / 2:.0f}" y="{_HEIGHT - 5}" text-anchor="middle">step</text>'


def number_text(value: float) -> str:
    """A number of an axis or a fact: five significant digits below 10,000, whole above, three if tiny or huge."""
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        text = f"{value:,.5g}" if abs(value) < 1e4 else f"{value:,.0f}"
        return text if "e" not in text else f"{value:,.0f}"
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else f"{value:,.3g}"


def _ticks(least: float, most: float, *, whole: bool = False) -> list[float]:
    """Round numbers between the two."""
    coarse = (most - least) / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(coarse))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= coarse * 0.999)
    width = max(width, 1.0) if whole else width
    first = math.ceil(least / width - 1e-9)
    return [number * width for number in range(first, math.floor(most / width + 1e-9) + 1)]


def _log_ticks(least: float, most: float) -> list[float]:
    """Powers of ten between the two logarithms, and over less than two decades also 2 and 5 times these."""
    powers = range(math.floor(least), math.ceil(most) + 1)
    factors = (1, 2, 5) if most - least < 2 else (1,)
    every = max(1, len(powers) // (2 * _NUM_TICKS))
    return [factor * 10.0**power for power in powers[::every] for factor in factors
            if least <= math.log10(factor * 10.0**power) <= most]


def _spread(axes: _Axes, curve: Series, share: float) -> Iterator[str]:
    """Values as points, or as a band from the least to the largest of each bin; ``share`` scales the opacity."""
    for piece in stretches(curve.bins):
        if all(one.first == one.last for one in piece):
            if curve.num_averaged > 1 or len(piece) == 1:
                points = "".join(f"M{axes.x(one.middle):.1f} {axes.y(one.mean):.1f}h0" for one in piece)
                width, opacity = (3.2, 0.3 * share) if len(piece) > 1 else (5, 1)
                yield (f'<path d="{points}" stroke="{curve.colour}" stroke-width="{width}" stroke-linecap="round" '
                       f'opacity="{opacity:g}"/>')
        else:
            upper = [f"{axes.x(one.middle):.1f} {axes.y(one.most):.1f}" for one in piece]
            lower = [f"{axes.x(one.middle):.1f} {axes.y(one.least):.1f}" for one in reversed(piece)]
            yield (f'<path d="M{"L".join([*upper, *lower])}Z" fill="{curve.colour}" stroke="{curve.colour}" '
                   f'stroke-width="0.7" opacity="{0.25 * share:g}"/>')


def _lines(axes: _Axes, curve: Series) -> Iterator[str]:
    """The running mean if the curve is noisy, else the values."""
    for piece in stretches(curve.bins):
        means = running_means(piece, curve.num_averaged)
        line = "L".join(f"{axes.x(one.middle):.1f} {axes.y(mean):.1f}" for one, mean in zip(piece, means, strict=True))
        yield f'<path d="M{line}" fill="none" stroke="{curve.colour}" stroke-width="1.8" stroke-linejoin="round"/>'


def _marks(axes: _Axes, marks: Marks) -> Iterator[str]:
    for one in marks.bins:
        if not one.count or not axes.first <= one.middle <= axes.last:
            continue
        x, y = axes.x(one.middle), _TOP + 5 if marks.at_top else axes.y(one.mean)
        value = "" if marks.at_top else f": {number_text(one.mean)}"
        shape = f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5-5z" if marks.shape == "diamond" else (
            f"M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8")
        ink = f'fill="{marks.colour}" stroke="#fff"' if marks.shape == "diamond" else (
            f'fill="none" stroke="{marks.colour}" stroke-width="2"')
        yield f'<path d="{shape}" {ink}><title>{escape(marks.name)}, step {_steps(one)}{value}</title></path>'


def _gaps(axes: _Axes, lost: Sequence[Bin]) -> Iterator[str]:
    """A tick on the step axis where a value is not finite."""
    for one in lost:
        yield (f'<path d="M{axes.x(one.middle):.1f} {_HEIGHT - _BOTTOM - 8}v8" stroke="{BAD}" stroke-width="2">'
               f"<title>not finite, step {_steps(one)}</title></path>")


def _steps(one: Bin) -> str:
    return f"{one.first:,}" if one.first == one.last else f"{one.first:,} to {one.last:,}"
