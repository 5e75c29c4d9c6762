"""How good the pipeline lists of a run are, and which would be better, on its own data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from mm.config.run import Run
from mm.placement import Placement
from mm.plan.lists import Costs, Lists, best_lists
from mm.plan.predict import Predictor
from mm.plan.stages import peaks, stage_sizes
from mm.plan.workload import Workload

_NUM_SEARCHED = 2
"""Steps that the search simulates; what it finds is judged by all."""


@dataclass(frozen=True)
class JudgedLists:
    """Lists, with what their pipelines take."""

    lists: Lists
    seconds: float
    """Mean pipeline of the slowest replica; in forward FLOPs without a calibration."""
    busy: float
    """What the mean stage of that replica works meanwhile."""
    peak_bytes: int
    """Memory of the fullest rank."""

    @property
    def utilisation(self) -> float:
        """The share of the pipeline's time in which the mean stage works."""
        return self.busy / self.seconds


@dataclass(frozen=True)
class Judgement:
    """The present lists and the best that were found; the same if none are better."""

    present: JudgedLists
    best: JudgedLists
    even: float
    """The mean pipeline if stages and microbatches were equal."""


def judge(run: Run, predictor: Predictor, workload: Workload, max_bytes: int | None) -> Judgement:
    """Judge the lists of ``run``, and search for better ones that need at most ``max_bytes`` on any rank; None: as many
    as it takes."""
    present = _judged(run, predictor, workload, Lists.of(run.model))
    some = Workload(workload.steps[:_NUM_SEARCHED])
    found, _ = best_lists(present.lists, Costs(
        cost=lambda one: _pipelines(predictor, some, one)[0],
        least=lambda one: predictor.least(some, _placed(one)),
        unevenness=lambda one: predictor.unevenness(some, _placed(one)),
        fits=lambda one: max_bytes is None or _peak_bytes(run, one) <= max_bytes))
    best = min((present, _judged(run, predictor, workload, found)), key=lambda one: one.seconds)
    even = fmean(even for _, _, even in _steps(predictor, workload, present.lists))
    return Judgement(present, best, even)


def _judged(run: Run, predictor: Predictor, workload: Workload, lists: Lists) -> JudgedLists:
    return JudgedLists(lists, *_pipelines(predictor, workload, lists), _peak_bytes(run, lists))


def _pipelines(predictor: Predictor, workload: Workload, lists: Lists) -> tuple[float, float]:
    """Mean seconds of the pipeline, and mean work of a stage."""
    steps = _steps(predictor, workload, lists)
    return fmean(seconds for seconds, _, _ in steps), fmean(busy for _, busy, _ in steps)


def _steps(predictor: Predictor, workload: Workload, lists: Lists) -> Sequence[tuple[float, float, float]]:
    return list(predictor.pipelines(workload, _placed(lists)))


def _placed(lists: Lists) -> Placement:
    return Placement.of(lists.vision, lists.language)


def _peak_bytes(run: Run, lists: Lists) -> int:
    other, placement = replace(run, model=lists.applied(run.model)), _placed(lists)
    return max(peaks(other, placement, stage_sizes(other, placement)).values())
