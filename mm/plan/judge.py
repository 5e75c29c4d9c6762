"""Judges the pipeline lists of a run on its own data, and finds better ones."""

from collections.abc import Sequence
from dataclasses import dataclass

from mm.config.run import Run
from mm.placement import Placement
from mm.plan.lists import Costs, Lists, best_lists
from mm.plan.predict import Predictor
from mm.plan.sizes import PeakMemory
from mm.plan.workload import Workload
from mm.progress import ongoing

_NUM_SEARCHED = 2
"""Steps that the search simulates; its result is judged on all steps."""


@dataclass(frozen=True)
class JudgedLists:
    """Lists, with the time and memory that their pipelines need."""

    lists: Lists
    seconds: float
    """Mean pipeline of the slowest replica; in forward FLOPs without a calibration."""
    busy: float
    """Mean work of that replica's stages during it."""
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
    """Judge the lists of ``run``, and search for better ones that need at most ``max_bytes`` on any rank; None sets no
    limit."""
    present = Lists.of(run.model)
    memory = PeakMemory(run)
    costs = list_costs(predictor, memory, Workload(workload.steps[:_NUM_SEARCHED]), max_bytes)
    with ongoing("searching for better lists"):
        found, _ = best_lists(present, costs)
    both = list(dict.fromkeys((present, found)))
    pipelines = predictor.pipelines(workload, [one.placement for one in both])
    means = zip(both, pipelines.seconds.mean(axis=0).tolist(), pipelines.busy.mean(axis=0).tolist(), strict=True)
    judged = [JudgedLists(one, seconds, busy, max(memory.of_stages(one.placement))) for one, seconds, busy in means]
    return Judgement(judged[0], min(judged, key=lambda one: one.seconds), float(pipelines.even[:, 0].mean()))


def list_costs(
    predictor: Predictor, memory: PeakMemory, workload: Workload, max_bytes: int | None, is_rough: bool = False
) -> Costs:
    """The costs that the search for lists asks for.  ``is_rough``: see ``Predictor.pipelines``."""

    def placements(some: Sequence[Lists]) -> list[Placement]:
        return [one.placement for one in some]

    return Costs(
        costs=lambda some: predictor.pipelines(workload, placements(some), is_rough).seconds.mean(axis=0),
        least=lambda some: predictor.least(workload, placements(some)),
        unevenness=lambda some: predictor.unevenness(workload, placements(some)),
        fits=lambda one: max_bytes is None or max(memory.of_stages(one.placement)) <= max_bytes)
