"""The search for the fastest layout of a run that fits into memory, and a lower bound for all layouts.

Layouts are judged with even lists in the order of their estimated steps, until the next estimate is well above the best
ones.  Then the lists of the best are searched.  The lower bound holds for all lists of every layout that is not
certainly too large, so it limits how much the search can have missed.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from statistics import fmean

from mm.config.run import Run
from mm.console import Progress
from mm.cost.calibration import Calibration
from mm.cost.model_states import StageSize, stage_sizes
from mm.cost.predict import Predictor, StepPrediction
from mm.cost.stage_memory import ChunkSizes, PeakMemory
from mm.cost.workload import COUNTS, Workload, sample_counts, workload_of
from mm.data.sample import HasLengths
from mm.data.sampler.cost import SampleSizes
from mm.data.sampler.sampler import PACKS_OF_STAGE, order_of, sampler_name
from mm.errors import UserError
from mm.plan.choices import RECOMPUTE, Choice
from mm.plan.lists import Lists, best_lists, list_costs

NUM_SEARCH_STEPS = 1
"""Steps that the search looks at: the same samples for every layout.  What it finds is predicted over more."""
SLACK = 1.03
"""The search ends when the next layout's estimate exceeds the step of the best ones by this factor."""
NUM_OF_GROUP = 4
"""Most layouts of a group that get lists: those that fit and have the best estimates."""
_NUM_SEARCHED = 6
"""Groups whose fastest layout's lists are searched, or more if more are kept."""
_LEAST_GAIN = 0.01
"""A larger encoder batch, which needs more memory, must make the step shorter by this share."""
_MAX_MOVES, _WORTH_MOVING = 8, 1.2
"""Most layers moved between stages to make even lists fit; it is tried if the fullest stage needs at most so many times
the limit."""


@dataclass(frozen=True)
class Planned:
    """A layout with its lists, and the prediction of its step."""

    choice: Choice
    run: Run
    step: StepPrediction
    stage_bytes: tuple[int, ...]
    """Peak memory of a rank of each stage."""
    predictor: Predictor
    workload: Workload

    @property
    def peak_bytes(self) -> int:
        """Memory of the fullest rank."""
        return max(self.stage_bytes)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    ranking: tuple[Planned, ...]
    """The fastest layouts that fit, fastest first."""
    least: float
    """No layout that was considered takes fewer seconds, whatever its lists."""
    num_considered: int
    num_too_large: int
    """Layouts for which no lists were found that fit."""
    refusals: tuple[str, ...]
    """Reasons why layouts could not be predicted, each once."""
    smallest: Planned | None
    """If none fits, the layout with the smallest states, with the most recomputation that is allowed."""


@dataclass(frozen=True)
class _Open:
    """A layout that can be predicted."""

    choice: Choice
    run: Run
    predictor: Predictor
    memory: PeakMemory
    bound: float
    """A lower bound of the seconds of a step."""
    estimate: float
    """Estimated seconds of a step."""
    rest: float
    """Seconds of the reduction and the update of ``states``."""
    states: StageSize
    """States of a rank if all stages had the same number of parameters."""


@dataclass(frozen=True)
class _Listed:
    """A layout with lists that fit."""

    layout: _Open
    lists: Lists
    seconds: float
    """Estimated seconds of a step."""


class LayoutSearch:
    """Judges layouts of one run on its own data."""

    def __init__(
        self, run: Run, calibrate: Callable[[Run], Calibration], lengths: HasLengths, max_bytes: int | None,
        num_steps: int, recomputations: Sequence[str] = tuple(RECOMPUTE),
    ) -> None:  # fmt: skip
        """``calibrate`` returns the calibration for a layout, or raises UserError.  ``max_bytes`` is the memory of a
        rank, None without a limit.  Layouts are predicted over ``num_steps`` steps.  ``recomputations``: the kinds of
        recomputation that may be tried, from fast to small."""
        self._run, self._calibrate, self._lengths, self._max_bytes = run, calibrate, lengths, max_bytes
        self._num_steps, self._sample_sizes = num_steps, SampleSizes(run.model, lengths)
        self._allowed = list(recomputations)
        one_replica = replace(run, world_size=run.tp_size * run.cp_size * run.num_stages)
        order = order_of(one_replica, lengths, dp_rank=0, consumed_samples=0, sizes=self._sample_sizes)
        samples = order.stream.samples(0, num_steps * run.global_batch_size)
        self._mean_samples = sample_counts(lengths.of(samples)) / num_steps
        self._predictors: dict[object, Predictor] = {}
        self._workloads: dict[object, Workload] = {}
        self._sizes: dict[object, StageSize] = {}
        self._chunks: dict[object, ChunkSizes] = {}

    def planned(self, choice: Choice, run: Run) -> Planned:
        """``run``, which has the layout ``choice``, with its lists."""
        workload, predictor = self._workload(run, self._num_steps), self._predictor(choice, run)
        return Planned(choice, run, predictor.predict(workload, run),
                       tuple(PeakMemory(run).of_stages(run.model.placement())), predictor, workload)

    def best(
        self, choices: Iterable[Choice], num_kept: int, encoder_batch_sizes: Sequence[int] = ()
    ) -> SearchResult:
        """The ``num_kept`` fastest layouts.  ``encoder_batch_sizes``: other encoder batches to try for these."""
        considered = list(choices)
        opened, refusals = list[_Open](), dict[str, None]()
        for choice in Progress("estimating layouts", len(considered), "layouts").each(considered):
            try:
                opened.append(self._opened(choice))
            except UserError as error:
                refusals |= dict.fromkeys(error.problems)
        opened.sort(key=lambda one: one.estimate)
        fitting, too_large = self._fitting(opened, num_kept)
        promising = _best_of_groups(fitting)[: max(_NUM_SEARCHED, num_kept)]
        listed = map(self._with_best_lists, promising)
        searched = sorted(Progress("searching lists", len(promising), "layouts").each(listed),
                          key=lambda one: one.seconds)
        ranking = sorted((self._with_best_batch(one, encoder_batch_sizes) for one in searched[:num_kept]),
                         key=lambda one: one.step.seconds)
        smallest = self._smallest(too_large) if too_large and not ranking else None
        bounds = [one.bound for one in opened if not self._is_too_large(one)]
        return SearchResult(tuple(ranking), min(bounds, default=0.0), len(considered), len(too_large), tuple(refusals),
                            smallest)

    def _fitting(self, opened: Sequence[_Open], num_kept: int) -> tuple[list[_Listed], list[_Open]]:
        """Layouts with even lists, and layouts for which no lists that fit were found."""
        fitting, too_large = list[_Listed](), list[_Open]()
        num_tried = Counter[tuple[int, int, int]]()
        for one in Progress("predicting layouts", unit="layouts").each(opened):
            fastest = _best_of_groups(fitting)[:num_kept]
            if len(fastest) == num_kept and one.estimate > fastest[-1].seconds * SLACK:
                break
            if num_tried[one.choice.group] >= NUM_OF_GROUP:
                continue
            found = self._with_even_lists(one)
            if found is None:
                too_large.append(one)
            else:
                fitting.append(found)
                num_tried[one.choice.group] += 1
        return fitting, too_large

    def _opened(self, choice: Choice) -> _Open:
        run = choice.applied(self._run)
        predictor, states = self._predictor(choice, run), self._even_size(run)
        num_microbatches = self._num_microbatches(run)
        rest = sum(predictor.after([states], num_microbatches[1]))
        bound, estimate = predictor.estimated(self._mean_samples, *num_microbatches, choice.num_chunks)
        return _Open(choice, run, predictor, self._memory(choice, run), bound + rest, estimate + rest, rest, states)

    def _num_microbatches(self, run: Run) -> tuple[float, float]:
        """Microbatches of a replica, which is an estimate with packs, and a lower bound of their mean."""
        if run.num_microbatches is not None:
            return run.num_microbatches, run.num_microbatches
        num_samples, budget = run.global_batch_size // run.dp_size, run.args.seq_length * run.args.micro_batch_size
        num_tokens = float(self._mean_samples[:, COUNTS.index("num_tokens")].sum()) / run.dp_size
        wanted = PACKS_OF_STAGE * run.num_stages if run.num_stages > 1 and run.data.is_balanced else 1
        least = min(max(1.0, num_tokens / budget), num_samples)
        return min(num_samples, max(math.ceil(least), wanted)), least

    def _is_too_large(self, one: _Open) -> bool:
        """Whether the layout is certainly too large: its states alone, divided evenly."""
        return self._max_bytes is not None and one.states.total_bytes > self._max_bytes

    def _with_even_lists(self, one: _Open) -> _Listed | None:
        """The layout with even lists and the least recomputation that fits; None if none does."""
        for recompute in () if self._is_too_large(one) else self._recomputations(one.choice):
            layout = one if recompute == one.choice.recompute else self._opened(replace(
                one.choice, recompute=recompute))
            choice, workload = layout.choice, self._search_workload(layout)
            even = Lists.even(*layout.predictor.layer_work(workload), choice.num_stages, choice.num_chunks)
            lists = self._made_to_fit(layout, even)
            if lists is not None:
                return _Listed(layout, lists, layout.predictor.about(workload, lists.placement) + layout.rest)
        return None

    def _made_to_fit(self, layout: _Open, even: Lists) -> Lists | None:
        """``even`` if it fits; otherwise lists that fit after layers moved from the fullest to the emptiest stage, or
        None."""
        if self._max_bytes is None:
            return even
        lists = even
        for _ in range(_MAX_MOVES):
            of_stages = layout.memory.of_stages(lists.placement)
            most = max(of_stages)
            if most <= self._max_bytes:
                return lists
            if most > _WORTH_MOVING * self._max_bytes or fmean(of_stages) > self._max_bytes:
                return None
            moves = lists.moves_between(of_stages.index(most), of_stages.index(min(of_stages)))
            smaller = (moved for moved in moves if max(layout.memory.of_stages(moved.placement)) < most)
            if (found := next(smaller, None)) is None:
                return None
            lists = found
        return None

    def _recomputations(self, choice: Choice) -> Sequence[str]:
        """The kinds of recomputation to try for a layout, from its own to the smallest."""
        own, allowed = choice.recompute, self._allowed
        return allowed[allowed.index(own) :] if own in allowed else [own]

    def _with_best_lists(self, one: _Listed) -> _Listed:
        layout = one.layout
        costs = list_costs(layout.predictor, layout.memory, self._search_workload(layout), self._max_bytes,
                           is_rough=True)
        lists, seconds = best_lists(one.lists, costs, is_even=True)
        return _Listed(layout, lists, seconds + layout.rest)

    def _with_best_batch(self, one: _Listed, encoder_batch_sizes: Sequence[int]) -> Planned:
        """The layout with another encoder batch if one that fits makes it noticeably faster."""
        choice, lists = one.layout.choice, one.lists
        best = self.planned(choice, _placed(one.layout.run, lists))
        if not lists.placement.has_whole_vit:
            return best
        for size in encoder_batch_sizes:
            if size == choice.encoder_batch:
                continue
            other = replace(choice, encoder_batch=size)
            found = self.planned(other, _placed(other.applied(self._run), lists))
            fits = self._max_bytes is None or found.peak_bytes <= self._max_bytes
            if fits and found.step.seconds < best.step.seconds * (1 - _LEAST_GAIN):
                best = found
        return best

    def _smallest(self, too_large: Sequence[_Open]) -> Planned:
        choice = min(too_large, key=lambda one: one.states.total_bytes).choice
        choice = replace(choice, recompute=self._recomputations(choice)[-1])
        return self.planned(choice, choice.applied(self._run))

    def _predictor(self, choice: Choice, run: Run) -> Predictor:
        towers = run.model.vision, run.model.language
        # the first layers of each chunk are recomputed by "block", and offloaded
        is_by_chunk = any(one.recompute.method == "block" or one.offload.is_on for one in towers)
        key = (choice.tp_size, choice.cp_size, choice.num_stages, choice.encoder, choice.recompute,
               choice.encoder_batch, choice.num_chunks if is_by_chunk else 1)
        if key not in self._predictors:
            self._predictors[key] = Predictor(run, self._calibrate(run))
        return self._predictors[key]

    def _memory(self, choice: Choice, run: Run) -> PeakMemory:
        key = (choice.tp_size, choice.cp_size, choice.num_stages, choice.num_chunks, choice.encoder, choice.recompute,
               choice.encoder_batch)
        return PeakMemory(run, self._chunks.setdefault(key, {}))

    def _search_workload(self, layout: _Open) -> Workload:
        """For each step of the search, the replica with the most work."""
        steps = self._workload(layout.run, NUM_SEARCH_STEPS).steps
        return Workload(tuple((layout.predictor.slowest(step),) for step in steps))

    def _workload(self, run: Run, num_steps: int) -> Workload:
        in_packs = (run.num_stages, run.microbatch_unit) if run.data.packs else ()
        key = run.dp_size, run.args.micro_batch_size, sampler_name(run.data), in_packs, num_steps
        if key not in self._workloads:
            self._workloads[key] = workload_of(run, self._lengths, num_steps, sizes=self._sample_sizes)
        return self._workloads[key]

    def _even_size(self, run: Run) -> StageSize:
        """States of one rank if all stages had the same number of parameters."""
        key = run.tp_size, run.model.encodes_whole, run.num_copies, run.args.sharding
        if key not in self._sizes:
            self._sizes[key] = reduce(StageSize.__add__, stage_sizes(run, run.model.placement()))
        return self._sizes[key].divided(run.num_stages)


def _best_of_groups(fitting: Sequence[_Listed]) -> list[_Listed]:
    """The fastest layout of each group, fastest first."""
    found = dict[tuple[int, int, int], _Listed]()
    for one in sorted(fitting, key=lambda one: one.seconds):
        found.setdefault(one.layout.choice.group, one)
    return list(found.values())


def _placed(run: Run, lists: Lists) -> Run:
    return replace(run, model=lists.applied(run.model))
