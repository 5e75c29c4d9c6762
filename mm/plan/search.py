"""The search for the fastest layout of a run that fits into memory, with a proof of how near it is to any other.

Layouts are simulated with even lists, in the order of an estimate of their step, until no better ones are to be
expected.  The lists of the fastest ones are then searched.  A lower bound of the step of every layout that fits, which
holds for any lists, says how much could be missed at most.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from statistics import fmean

from mm.config.run import Run
from mm.data.lengths import HasLengths
from mm.data.order.cost import SampleSizes
from mm.data.order.sampler import PACKS_OF_STAGE, order_of, sampler_name
from mm.errors import UserError
from mm.plan.calibration import Calibration
from mm.plan.choices import RECOMPUTE, Choice
from mm.plan.costs import COUNTS
from mm.plan.judge import list_costs
from mm.plan.lists import Lists, best_lists
from mm.plan.predict import Predictor, StepPrediction
from mm.plan.sizes import PeakMemory, StageSize, stage_sizes
from mm.plan.workload import Workload, sample_counts, workload_of

NUM_STEPS = 1
"""Steps that the search simulates: the same samples for every layout.  What it finds is predicted over more."""
SLACK = 1.03
"""Layouts are simulated until the estimate of the next is above the simulated time of the best ones by this factor."""
NUM_OF_GROUP = 4
"""Layouts of each group that are simulated: those with the best estimates that fit."""
NUM_SEARCHED = 6
"""Groups whose fastest layout's lists are searched, by default."""
_MAX_MOVES, _WORTH_MOVING = 8, 1.2
"""Layers that are moved between stages to make even lists fit, if the fullest needs at most this times the limit."""


@dataclass(frozen=True)
class Planned:
    """A layout with its lists, and what a step takes."""

    choice: Choice
    run: Run
    step: StepPrediction
    peak_bytes: int
    """Of the fullest rank."""
    predictor: Predictor
    workload: Workload


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    ranking: tuple[Planned, ...]
    """The fastest layouts that fit, fastest first."""
    least: float
    """No layout that was considered takes fewer seconds, whatever its lists."""
    num_considered: int
    num_too_large: int
    refusals: tuple[str, ...]
    """Why layouts could not be predicted: each reason once."""
    smallest: Planned | None
    """If none fits, the layout that needs the least memory."""


@dataclass(frozen=True)
class _Open:
    """A layout that was not refused yet."""

    choice: Choice
    run: Run
    predictor: Predictor
    memory: PeakMemory
    bound: float
    """Of the seconds of a step."""
    estimate: float
    rest: float
    """Seconds of the reduction and the update in the bound."""


class LayoutSearch:
    """Judges layouts of one run on its own data."""

    def __init__(
        self, run: Run, calibrate: Callable[[Run], Calibration], lengths: HasLengths, max_bytes: int | None
    ) -> None:
        """``calibrate`` gives the calibration for a layout, or raises UserError.  ``max_bytes``: of any rank."""
        self._run, self._calibrate, self._lengths, self._max_bytes = run, calibrate, lengths, max_bytes
        self._sample_sizes = SampleSizes(run.model, lengths)
        one_rank = replace(run, world_size=run.tp_size * run.cp_size * run.num_stages)
        order = order_of(one_rank, lengths, dp_rank=0, consumed_samples=0, sizes=self._sample_sizes)
        self._samples = sample_counts(lengths.of(order.stream.samples(0, run.global_batch_size)))
        self._predictors: dict[object, Predictor] = {}
        self._workloads: dict[object, Workload] = {}
        self._sizes: dict[object, StageSize] = {}

    def planned(self, choice: Choice, run: Run, num_steps: int) -> Planned:
        """``run`` as it is, predicted over ``num_steps`` steps."""
        workload = self._workload(run, num_steps)
        predictor = self._predictor(choice, run)
        return Planned(choice, run, predictor.predict(workload, run),
                       max(PeakMemory(run).of_stages(run.model.placement())), predictor, workload)

    def best(
        self, choices: Iterable[Choice], num_kept: int, num_steps: int, num_searched: int = NUM_SEARCHED
    ) -> SearchResult:
        """The ``num_kept`` fastest layouts, after a search for the lists of ``num_searched``."""
        considered = list(choices)
        opened, refusals = list[_Open](), dict[str, None]()
        for choice in considered:
            try:
                opened.append(self._opened(choice))
            except UserError as error:
                refusals |= dict.fromkeys(error.problems)
        opened.sort(key=lambda one: one.estimate)
        fitting, too_large = self._fitting(opened, num_kept)
        promising = _best_of_groups(fitting)[: max(num_searched, num_kept)]
        searched = sorted((self._with_best_lists(one, lists) for _, one, lists in promising), key=lambda one: one[0])
        ranking = sorted((self.planned(one.choice, _placed(one.run, lists), num_steps)
                          for _, one, lists in searched[:num_kept]), key=lambda one: one.step.seconds)
        smallest = None if ranking or not too_large else self._smallest([one.choice for one in too_large], num_steps)
        bounds = [one.bound for one in opened if one not in too_large]
        return SearchResult(tuple(ranking), min(bounds, default=0.0), len(considered), len(too_large), tuple(refusals),
                     smallest)

    def _fitting(
        self, opened: Sequence[_Open], num_kept: int
    ) -> tuple[list[tuple[float, _Open, Lists]], list[_Open]]:
        """Simulated layouts with even lists, fastest first; and those that do not fit."""
        fitting, too_large = list[tuple[float, _Open, Lists]](), list[_Open]()
        num_tried = Counter[tuple[int, int, int]]()
        for one in opened:
            fastest = [seconds for seconds, _, _ in _best_of_groups(fitting)[:num_kept]]
            if len(fastest) == num_kept and one.estimate > fastest[-1] * SLACK:
                break
            if num_tried[one.choice.group] >= NUM_OF_GROUP:
                continue
            found = self._with_even_lists(one)
            if found is None:
                too_large.append(one)
            else:
                fitting.append(found)
                num_tried[one.choice.group] += 1
        return sorted(fitting, key=lambda one: one[0]), too_large

    def _opened(self, choice: Choice) -> _Open:
        run = choice.applied(self._run)
        predictor, even = self._predictor(choice, run), [self._even_size(run)]
        rest = predictor.reduction(even) + predictor.update(even)
        bound, estimate = predictor.estimate(self._samples, *self._num_microbatches(run), choice.num_chunks)
        return _Open(choice, run, predictor, PeakMemory(run), bound + rest, estimate + rest, rest)

    def _num_microbatches(self, run: Run) -> tuple[float, float]:
        """Microbatches of a replica, and at least so many on average; with packs, the former is about right."""
        if run.num_microbatches is not None:
            return run.num_microbatches, run.num_microbatches
        num_samples, budget = run.global_batch_size // run.dp_size, run.args.seq_length * run.args.micro_batch_size
        num_tokens = float(self._samples[:, COUNTS.index("num_tokens")].sum()) / run.dp_size
        wanted = PACKS_OF_STAGE * run.num_stages if run.num_stages > 1 and run.data.is_balanced else 1
        least = max(1.0, num_tokens / budget)
        return max(1, min(num_samples, max(math.ceil(least), wanted))), min(least, num_samples)

    def _with_even_lists(self, one: _Open) -> tuple[float, _Open, Lists] | None:
        """The layout with even lists and the least recomputation that fits; None if none does."""
        for recompute in self._ladder(one.choice):
            if self._max_bytes is not None and self._even_size(one.run).total_bytes > self._max_bytes:
                return None
            here = one if recompute == one.choice.recompute else self._opened(replace(
                one.choice, recompute=recompute))
            workload = self._workload(here.run, NUM_STEPS)
            start = Lists.even(*here.predictor.layer_work(workload), here.choice.num_stages, here.choice.num_chunks)
            fitting = self._smaller(here, start)
            if fitting is not None:
                seconds = here.predictor.about(workload, fitting.placement) + here.rest
                return seconds, here, fitting
        return None

    def _smaller(self, one: _Open, start: Lists) -> Lists | None:
        """Lists that fit, reached by moving layers from the fullest stage to the emptiest; None if none are found."""
        if self._max_bytes is None:
            return start
        lists: Lists | None = start
        for _ in range(_MAX_MOVES):
            of_stages = one.memory.of_stages(lists.placement)
            most = max(of_stages)
            if most <= self._max_bytes:
                return lists
            if most > _WORTH_MOVING * self._max_bytes or fmean(of_stages) > self._max_bytes:
                return None
            moves = lists.moves_between(of_stages.index(most), of_stages.index(min(of_stages)))
            lists = next((moved for moved in moves if max(one.memory.of_stages(moved.placement)) < most), None)
            if lists is None:
                return None
        return None

    def _ladder(self, choice: Choice) -> Sequence[str]:
        """Recomputations to try, from fast to small."""
        names = list(RECOMPUTE)
        return names[names.index(choice.recompute) :] if choice.recompute in names else [choice.recompute]

    def _with_best_lists(self, one: _Open, start: Lists) -> tuple[float, _Open, Lists]:
        workload = self._workload(one.run, NUM_STEPS)
        costs = list_costs(one.predictor, one.memory, workload, self._max_bytes, num_simulated=1, is_rough=True)
        lists, seconds = best_lists(start, costs, is_even=True) if one.choice.num_stages > 1 else (start, float(
            costs.costs([start])[0]))
        return seconds + one.rest, one, lists

    def _smallest(self, too_large: Sequence[Choice], num_steps: int) -> Planned:
        choice = min(too_large, key=lambda one: self._even_size(one.applied(self._run)).total_bytes)
        choice = replace(choice, recompute=self._ladder(choice)[-1])
        return self.planned(choice, choice.applied(self._run), num_steps)

    def _predictor(self, choice: Choice, run: Run) -> Predictor:
        key = choice.tp_size, choice.cp_size, choice.num_stages, choice.encoder, choice.recompute
        if key not in self._predictors:
            self._predictors[key] = Predictor(run, self._calibrate(run))
        return self._predictors[key]

    def _workload(self, run: Run, num_steps: int) -> Workload:
        in_packs = (run.num_stages, run.microbatch_unit) if run.data.packs else ()
        key = run.dp_size, run.args.micro_batch_size, sampler_name(run.data), in_packs, num_steps
        if key not in self._workloads:
            self._workloads[key] = workload_of(run, self._lengths, num_steps, sizes=self._sample_sizes)
        return self._workloads[key]

    def _even_size(self, run: Run) -> StageSize:
        """States of one rank if all stages were equal."""
        key = run.tp_size, run.model.encodes_whole, run.dp_size * run.cp_size, run.args.use_distributed_optimizer
        if key not in self._sizes:
            self._sizes[key] = reduce(StageSize.__add__, stage_sizes(run, run.model.placement()))
        return self._sizes[key].divided(run.num_stages)


def _best_of_groups(fitting: Sequence[tuple[float, _Open, Lists]]) -> list[tuple[float, _Open, Lists]]:
    found = dict[tuple[int, int, int], tuple[float, _Open, Lists]]()
    for one in sorted(fitting, key=lambda one: one[0]):
        found.setdefault(one[1].choice.group, one)
    return list(found.values())


def _placed(run: Run, lists: Lists) -> Run:
    return replace(run, model=lists.applied(run.model))
