"""Where a predicted step and a measured one differ: by kind of block, stage, host, messages, data and update.

What a cause costs is simulated: one change after another turns the predicted pipeline into the measured one, and each
change is a cause.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from mm.plan.costs import counts_of
from mm.plan.factors import FittedFactors, fitted_factors
from mm.plan.measured import MeasuredStep, measured_step
from mm.plan.passes import BACKWARD, FORWARD, Kinds, Passes
from mm.plan.predict import Predictor
from mm.timeline.spans import StepTimeline

DATA, SINGLE, HOST, MESSAGES, REDUCTION, UPDATE = (
    "waits for data", "single passes", "host between passes", "messages and waits", "gradient reduction", "update")
"""Causes besides the kinds of blocks.  Single passes are slower or faster than others of the same blocks and sizes."""


@dataclass(frozen=True)
class Compared:
    """A time, predicted and measured."""

    predicted: float
    measured: float

    @property
    def more(self) -> float:
        """How much longer it is than predicted."""
        return self.measured - self.predicted


@dataclass(frozen=True)
class ComparedStage:
    """One stage in one step, averaged over replicas."""

    forward: tuple[Compared, ...]
    """The passes of all microbatches, by chunk."""
    backward: tuple[Compared, ...]
    between: Compared
    """The host's work between passes."""
    waits: Compared
    kinds: tuple[float, ...]
    """By kind, how many seconds longer its blocks take according to the fitted factors."""

    @property
    def busy(self) -> Compared:
        """Forward and backward of all chunks."""
        passes = (*self.forward, *self.backward)
        return Compared(sum(one.predicted for one in passes), sum(one.measured for one in passes))


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured steps, averaged."""

    step: Compared
    parts: Mapping[str, Compared]
    """Waits for data, pipeline, reduction and update: they sum to the step."""
    causes: Mapping[str, float]
    """By how many seconds each cause makes the step longer than predicted; they sum to the difference."""
    stages: tuple[ComparedStage, ...]
    kinds: Kinds
    factors: tuple[FittedFactors, FittedFactors]
    """Measured over predicted seconds of the kinds, forward and backward."""
    between: float
    """The host's measured seconds per pass besides the recorded ones."""

    @property
    def error(self) -> float:
        """Predicted over measured step, minus 1."""
        return self.step.predicted / self.step.measured - 1


@dataclass(frozen=True)
class _BothSides:
    """One step, predicted and measured."""

    passes: tuple[Passes, ...]
    """The predicted passes of each replica."""
    measured: MeasuredStep

    @property
    def num_stages(self) -> int:
        return self.passes[0].placement.num_stages

    def pipeline(self, recorded: Sequence[np.ndarray], between: Sequence[float]) -> float:
        """Seconds of the slowest replica's pipeline."""
        return max(steps[-1].end for one, seconds in zip(self.passes, recorded, strict=True)
                   for steps in one.timeline(seconds, between))

    @cached_property
    def predicted(self) -> float:
        """Seconds of the predicted pipeline."""
        return self.pipeline([passes.recorded() for passes in self.passes], self.host)

    @property
    def host(self) -> list[float]:
        """The predicted seconds after each pass, by stage."""
        return [self.passes[0].between] * self.num_stages

    @property
    def measured_host(self) -> np.ndarray:
        num_passes = np.mean([one.num_passes for one in self.passes], axis=0)
        return self.measured.between / np.maximum(num_passes, 1)


def compare(predictor: Predictor, timelines: Sequence[StepTimeline]) -> Comparison:
    """Predict the measured steps with their own microbatches, and divide the difference among its causes."""
    kinds, placement = Kinds.of(predictor), predictor.run.model.placement()
    sides = [_sides(predictor, kinds, one) for one in timelines]
    factors = _fitted(sides)
    of_both = np.array([one.values for one in factors])
    reduction, update = predictor.after_pipeline(placement, [one.microbatches for one in timelines])
    causes, parts = list[dict[str, float]](), list[dict[str, Compared]]()
    for one in sides:
        found = _pipeline_causes(one, kinds, of_both)
        step = {DATA: Compared(0.0, one.measured.data), "pipeline": Compared(one.predicted, one.measured.pipeline),
                REDUCTION: Compared(reduction, one.measured.reduction), UPDATE: Compared(update, one.measured.update)}
        parts.append(step)
        causes.append(found | {name: step[name].more for name in (DATA, REDUCTION, UPDATE)})
    means = {name: _mean([one[name] for one in parts]) for name in parts[0]}
    stages = tuple(_mean_stage([_stage(one, stage, of_both) for one in sides]) for stage in range(placement.num_stages))
    return Comparison(
        step=Compared(sum(one.predicted for one in means.values()), sum(one.measured for one in means.values())),
        parts=means, causes={name: fmean(one[name] for one in causes) for name in causes[0]}, stages=stages,
        kinds=kinds, factors=factors, between=float(np.mean([one.measured_host for one in sides])))


def _sides(predictor: Predictor, kinds: Kinds, timeline: StepTimeline) -> _BothSides:
    placement = predictor.run.model.placement()
    passes = tuple(Passes.of(predictor, kinds, counts_of(one)) for one in timeline.microbatches)
    return _BothSides(passes, measured_step(timeline, placement.num_stages, placement.num_chunks))


def _fitted(sides: Sequence[_BothSides]) -> tuple[FittedFactors, FittedFactors]:
    def of_direction(direction: int) -> FittedFactors:
        predicted, measured = [], []
        for one in sides:
            for passes, recorded in zip(one.passes, one.measured.recorded, strict=True):
                is_passed = passes.is_passed[direction]
                predicted.append(passes.of_kinds[direction][is_passed])
                measured.append(np.maximum(recorded[direction][is_passed] - passes.inside, 0.0))
        return fitted_factors(np.concatenate(predicted), np.concatenate(measured))

    return of_direction(FORWARD), of_direction(BACKWARD)


def _pipeline_causes(one: _BothSides, kinds: Kinds, factors: np.ndarray) -> dict[str, float]:
    """Seconds that each cause adds to the pipeline."""
    applied, causes = np.ones_like(factors), dict[str, float]()
    now = one.predicted

    def becomes(name: str, seconds: float) -> None:
        nonlocal now
        causes[name], now = seconds - now, seconds

    for kind, name in enumerate(kinds.names):
        applied[:, kind] = factors[:, kind]
        becomes(name, one.pipeline([passes.recorded(applied) for passes in one.passes], one.host))
    becomes(SINGLE, one.pipeline(one.measured.recorded, one.host))
    becomes(HOST, one.pipeline(one.measured.recorded, one.measured_host.tolist()))
    becomes(MESSAGES, one.measured.pipeline)
    return causes


def _stage(one: _BothSides, stage: int, factors: np.ndarray) -> ComparedStage:
    num_chunks, num_stages = one.passes[0].placement.num_chunks, one.num_stages
    predicted, measured = (
        np.mean([recorded.sum(axis=1).reshape(2, num_chunks, num_stages)[:, :, stage] for recorded in side], axis=0)
        for side in ([passes.recorded() for passes in one.passes], one.measured.recorded))
    forward, backward = ([Compared(*both) for both in zip(*sides, strict=True)]
                         for sides in zip(predicted.tolist(), measured.tolist(), strict=True))
    host = float(np.mean([passes.num_passes[stage] * passes.between for passes in one.passes]))
    waits = one.predicted - float(predicted.sum()) - host
    longer = np.mean([np.einsum("dmsk,dk->k", passes.of_kinds[:, :, stage::num_stages], factors - 1)
                      for passes in one.passes], axis=0)
    return ComparedStage(tuple(forward), tuple(backward), Compared(host, float(one.measured.between[stage])),
                         Compared(waits, float(one.measured.waits[stage])), tuple(longer.tolist()))


def _mean_stage(stages: Sequence[ComparedStage]) -> ComparedStage:
    def chunks(name: str) -> Iterator[Compared]:
        for same in zip(*(getattr(one, name) for one in stages), strict=True):
            yield _mean(same)

    return ComparedStage(tuple(chunks("forward")), tuple(chunks("backward")), _mean([one.between for one in stages]),
                         _mean([one.waits for one in stages]),
                         tuple(np.mean([one.kinds for one in stages], axis=0).tolist()))


def _mean(times: Sequence[Compared]) -> Compared:
    return Compared(fmean(one.predicted for one in times), fmean(one.measured for one in times))
