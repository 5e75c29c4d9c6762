"""The texts of ``mm-plan compare``."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap

from mm.plan.differences import DATA, HOST, MESSAGES, REDUCTION, SINGLE, UPDATE, Compared, Comparison
from mm.plan.factors import FittedFactors
from mm.report import Report, Table
from mm.timeline.spans import StepTimeline

_ALIKE = 0.02
"""Predicted and measured step agree if they differ by less than this share."""
_DIRECTIONS = ("forward", "backward")


def comparison_report(found: Comparison, timelines: Sequence[StepTimeline]) -> str:
    """The largest cause of the difference; then all causes, parts of the step, stages and kinds of blocks."""
    steps = ", ".join(str(one.iteration) for one in timelines)
    facts = (("Step", f"measured {found.step.measured:.4g} s, predicted {found.step.predicted:.4g} s "
                      f"({found.error:+.1%})"),
             ("Measured", f"iteration{'s' * (len(timelines) > 1)} {steps}"))
    tables = _causes(found), _step(found), _stages(found), _kinds(found)
    return Report(_sentence(found), facts, tables, notes=_notes(found)).text()


def _notes(found: Comparison) -> tuple[str, ...]:
    """What may be behind the largest cause, if its name does not say it."""
    if abs(found.step.more) < _ALIKE * found.step.measured or _largest(found)[0] != SINGLE:
        return ()
    return ("single passes: some passes took longer or shorter than others of the same blocks and sizes, as when other "
            "programs use the same cores, or a device changes its clock; measure more steps",)


def _sentence(found: Comparison) -> str:
    more = found.step.more
    if abs(more) < _ALIKE * found.step.measured:
        return f"The prediction is accurate: it differs from the measured step by {abs(found.error):.1%}"
    name, seconds = _largest(found)
    stage = _stage_of(name, found, more)
    where = "" if stage is None else f", above all on stage {stage}"
    return (f"The step took {abs(more):.4g} s {'longer' if more > 0 else 'less'} than predicted; the largest cause is: "
            f"{name}, {abs(seconds):.4g} s{where}")


def _largest(found: Comparison) -> tuple[str, float]:
    """The cause that adds most to the difference."""
    sign = 1 if found.step.more > 0 else -1
    return max(found.causes.items(), key=lambda one: sign * one[1])


def _stage_of(name: str, found: Comparison, more: float) -> int | None:
    """The stage that this cause makes slowest, or fastest if the step took less; None if no stage can be named."""
    if len(found.stages) == 1 or name in (DATA, REDUCTION, UPDATE):
        return None
    if name in found.kinds.names:
        longer = [one.kinds[found.kinds.names.index(name)] for one in found.stages]
    else:
        times = [one.waits if name == MESSAGES else one.between if name == HOST else one.busy for one in found.stages]
        longer = [one.more for one in times]
    return max(range(len(longer)), key=lambda stage: longer[stage] * (1 if more > 0 else -1))


def _causes(found: Comparison) -> Table:
    """The causes that cost anything, largest first."""
    more, least = found.step.more, 1e-4 * found.step.measured
    ordered = sorted(found.causes.items(), key=lambda one: -abs(one[1]))
    rows = tuple((name, f"{seconds:+.4f}", f"{seconds / more:.0%}" if more else "") for name, seconds in ordered
                 if abs(seconds) >= least)
    return Table("Causes of the difference: seconds by which each makes the step longer than predicted",
                 ("cause", "seconds", "share"), rows)


def _step(found: Comparison) -> Table:
    return Table("A step, in seconds", ("", "predicted", "measured"),
                 tuple((name, *_both(one)) for name, one in found.parts.items()))


def _stages(found: Comparison) -> Table:
    return Table("Stages, in seconds of a step", ("stage", "", "predicted", "measured", "difference"),
                 tuple((str(stage), name, *_both(one), f"{one.more:+.4f}")
                       for stage in range(len(found.stages)) for name, one in _rows(found, stage)))


def _rows(found: Comparison, stage: int) -> Iterator[tuple[str, Compared]]:
    one = found.stages[stage]
    has_chunks = len(one.forward) > 1
    for chunk in range(len(one.forward)):
        for direction in _DIRECTIONS:
            yield f"{direction}{f', chunk {chunk}' * has_chunks}", getattr(one, direction)[chunk]
    yield HOST, one.between
    yield MESSAGES, one.waits


def _both(one: Compared) -> tuple[str, str]:
    return f"{one.predicted:.4f}", f"{one.measured:.4f}"


def _kinds(found: Comparison) -> Table:
    rows = tuple(row for direction, factors in zip(_DIRECTIONS, found.factors, strict=True)
                 for row in _factor_rows(direction, factors, found.kinds.names))
    return Table("Kinds of blocks: measured over predicted seconds, with standard errors; kinds that the passes do not "
                 "tell apart share a line", ("", "factor", "kinds"), rows)


def _factor_rows(direction: str, factors: FittedFactors, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for group, error in sorted(zip(factors.groups, factors.errors, strict=True)):
        yield direction, f"{factors.values[group[0]]:.2f} +- {error:.2f}", ", ".join(names[kind] for kind in group)
    known = {kind for group in factors.groups for kind in group}
    if others := [name for kind, name in enumerate(names) if kind not in known]:
        yield direction, "not determined", ", ".join(others)


def refinement_lines(before: Comparison, after: Comparison, path: Path) -> str:
    """What was refined, and the error of the prediction before and after."""
    lines = [f"written: {path}: the error of these steps was {before.error:+.1%} and is {after.error:+.1%}"]
    for direction, factors in zip(_DIRECTIONS, before.factors, strict=True):
        names = ", ".join(before.kinds.names[kind] for kind in sorted(sum(factors.groups, ())))
        lines.append(f"         refined, {direction}: {names or 'nothing'}")
    others = (UPDATE, *([HOST] if len(before.stages) > 1 else []))
    return "\n".join([*lines, f"         refined too: {', '.join(others)}"])


def cause_lines(found: Comparison) -> list[str]:
    """The sentence and the causes, short enough for a picture."""
    rows = _causes(found).rows
    causes = "; ".join(f"{name} {seconds} s" for name, seconds, _ in rows)
    return [f"{_sentence(found)}.", *wrap(f"Causes: {causes}.", 170)]


