"""The layouts that a run could have, the search for the fastest that fits into memory, and a lower bound for all.

Layouts differ in tensor, context and pipeline sizes, chunks, samples per microbatch, packing, encoder placement and
batch, and recomputation.  All train on the same samples in each step, with the same loss and gradients.

They are judged with even lists in the order of their estimated steps, until the next estimate is well above the best
ones.  Then the lists of the best are searched.  The lower bound holds for all lists of every layout that is not
certainly too large, so it limits how much the search can have missed.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import product
from statistics import fmean
from typing import Any, get_args

from mm.config.data import DataConfig
from mm.config.layers import RecomputeConfig
from mm.config.model import EncoderPlacement, ModelConfig
from mm.config.rules import loss_problems, parallel_problems
from mm.config.run import Run
from mm.console import Progress
from mm.cost.calibration import Calibration
from mm.cost.predict import Predictor, StepPrediction
from mm.cost.stage_memory import ChunkSizes, PeakMemory, StageSize, stage_sizes
from mm.cost.workload import COUNTS, Workload, sample_counts, workload_of
from mm.data.sample import HasLengths
from mm.data.sampler.cost import SampleSizes
from mm.data.sampler.sampler import PACKS_OF_STAGE, order_of, sampler_name
from mm.errors import UserError
from mm.plan.lists import Lists, best_lists, list_costs

AS_GIVEN, BALANCED, PACKS = "as given", "balanced", "balanced packs"
SAMPLERS = (AS_GIVEN, BALANCED, PACKS)
"""How samples become microbatches: as the data JSON says, or balanced by cost, unpacked or in packs."""
_NONE, _SELECTIVE, _FULL = RecomputeConfig(), RecomputeConfig("selective"), RecomputeConfig("full", "uniform", 1)
RECOMPUTE: Mapping[str, tuple[RecomputeConfig, RecomputeConfig]] = {
    "none": (_NONE, _NONE), "selective": (_SELECTIVE, _SELECTIVE), "ViT full": (_FULL, _SELECTIVE),
    "LLM full": (_SELECTIVE, _FULL), "full": (_FULL, _FULL),
}  # fmt: skip
"""Settings of the ViT and of the LLM, from fast to small.  A frozen tower keeps no activations, so they have no effect
there."""
ENCODERS: Sequence[EncoderPlacement] = get_args(EncoderPlacement)
ENCODER_BATCH_SIZES = (1, 2, 4, 8)
"""Microbatches whose images pass the ViT together, as the search tries them."""
_BUCKETS = "BucketBatchSampler"
_MAX_CHUNKS, _MAX_SLOTS = 4, 64
_MAX_SAMPLES = 8
"""Most samples in a microbatch: with more, few microbatches are left, and matrix products hardly get faster."""
_MAX_CP_SIZE = 16
_MIN_TOKENS = 2048
"""Fewest tokens of the longest sample per context-parallel rank: fewer make small matrix products, and such short
samples fit anyway."""


@dataclass(frozen=True, order=True)
class Choice:
    """One layout, without its lists."""

    tp_size: int
    cp_size: int
    num_stages: int
    num_chunks: int
    micro_batch_size: int
    sampler: str
    encoder: EncoderPlacement
    """``encoder_placement`` of the model JSON."""
    recompute: str
    encoder_batch: int = 1
    """``encoder_batch_microbatches`` of the model JSON."""

    @property
    def group(self) -> tuple[int, int, int]:
        """Layouts with the same group differ in chunks, microbatches, the encoder and recomputation only."""
        return self.tp_size, self.cp_size, self.num_stages

    def applied(self, run: Run) -> Run:
        """``run`` with this layout and the same number of samples per step.  Its lists are legal, but not the best."""
        dp_size = max(1, run.world_size // (self.tp_size * self.cp_size * self.num_stages))
        args = replace(
            run.args, tensor_model_parallel_size=self.tp_size, sequence_parallel=self.tp_size > 1,
            context_parallel_size=self.cp_size, pipeline_model_parallel_size=None,
            virtual_pipeline_model_parallel_size=None, micro_batch_size=self.micro_batch_size,
            global_batch_size=run.global_batch_size,
            use_distributed_optimizer=run.args.splits_optimizer or (
                run.args.data_parallel_sharding_strategy is None and dp_size * self.cp_size > 1))
        model = replace(_applied(run.model, self.num_stages, self.num_chunks, self.encoder, self.recompute),
                        encoder_batch_microbatches=self.encoder_batch)
        return replace(run, args=args, model=model, data=self._data(run.data))

    def _data(self, data: DataConfig) -> DataConfig:
        if self.sampler == AS_GIVEN:
            return data
        # packing would change the default truncation of long samples, so it is stated
        truncation = "turns" if data.drops_turns else "tokens"
        packs = self.sampler == PACKS or data.packs
        return replace(data, sampler_type="BalancedBatchSampler", packing=packs, truncation=truncation)


@lru_cache(1024)
def _applied(
    model: ModelConfig, num_stages: int, num_chunks: int, encoder: EncoderPlacement, recompute: str
) -> ModelConfig:
    """``model`` with its own lists if they have these stages and chunks, or else lists of about equal length."""
    lists = Lists.of(model)
    if (num_stages, num_chunks) != (model.num_stages, model.num_chunks):
        lists = Lists.spread(model.vision.num_layers, model.language.num_layers, num_stages, num_chunks)
    model = replace(lists.applied(model), encoder_placement=encoder)
    if recompute == AS_GIVEN:
        return model
    towers = zip((model.vision, model.language), RECOMPUTE[recompute], strict=True)
    vision, language = (replace(tower, recompute=how) for tower, how in towers)
    return replace(model, vision=vision, language=language)


def present_choice(run: Run) -> Choice:
    """The layout that ``run`` has."""
    return Choice(run.tp_size, run.cp_size, run.num_stages, run.num_chunks, run.args.micro_batch_size, AS_GIVEN,
                  run.model.encoder_placement, AS_GIVEN, run.model.encoder_batch_microbatches)


NAMES = {"TP": "tp_size", "CP": "cp_size", "PP": "num_stages", "VPP": "num_chunks", "MBS": "micro_batch_size",
         "SAMPLER": "sampler", "ENCODER": "encoder", "RECOMPUTE": "recompute", "EB": "encoder_batch"}
"""Words of ``--fix`` -> fields of ``Choice``; DP follows from the others."""


def choices(run: Run, fixed: Mapping[str, Sequence[object]], node_size: int) -> Iterator[Choice]:
    """Every legal layout, with the fastest recomputation and the smallest encoder batch that ``fixed`` allows.

    Tensor-parallel ranks stay within a node, and context-parallel ranks get at least ``_MIN_TOKENS`` tokens.
    Microbatches and packing are as given if the loss is a mean over microbatches.
    """
    is_free, model, most_tokens = run.args.loss_unit != "microbatch", run.model, run.args.seq_length
    num_layers = model.vision.num_layers + model.language.num_layers
    options: dict[str, Sequence[object]] = {
        "tp_size": [size for size in replace(model, encoder_placement="tensor_ranks").tp_sizes if size <= node_size],
        "cp_size": [size for size in _powers(_MAX_CP_SIZE) if size == 1 or most_tokens // size >= _MIN_TOKENS],
        "num_stages": [size for size in range(1, num_layers + 1) if run.world_size % size == 0],
        "num_chunks": [*range(1, _MAX_CHUNKS + 1)],
        "micro_batch_size": _powers(_MAX_SAMPLES) if is_free else [run.args.micro_batch_size],
        "sampler": _samplers(run.data) if is_free else [AS_GIVEN],
        "encoder": ENCODERS,
    } | {name: values for name, values in fixed.items() if name not in ("recompute", "encoder_batch")}
    of_all: dict[str, Any] = {"recompute": recomputations(fixed)[0], "encoder_batch": encoder_batch_sizes(fixed)[0]}
    for values in product(*options.values()):
        choice = replace(present_choice(run), **of_all, **dict(zip(options, values, strict=True)))
        if choice.tp_size == 1 and choice.encoder != options["encoder"][0]:
            continue  # one rank holds the whole ViT in either placement
        if not _is_divisible(choice, run):
            continue
        applied = choice.applied(run)
        if not [*parallel_problems(applied), *loss_problems(applied.args, applied.data)]:
            yield choice


def fixed_problems(run: Run, fixed: Mapping[str, Sequence[object]]) -> Iterator[str]:
    """Values of ``fixed`` that would change what is learnt."""
    is_of_microbatches, present = run.args.loss_unit == "microbatch", run.args.micro_batch_size
    if is_of_microbatches and {*fixed.get("micro_batch_size", ())} - {present}:
        yield (f"--fix: MBS must stay {present}, because --calculate-per-microbatch-loss gives a sample another weight "
               f"in another microbatch; train with --calculate-per-sample-loss")
    if {*fixed.get("sampler", ())} - {AS_GIVEN} and (is_of_microbatches or run.data.sampler_type == _BUCKETS):
        yield (f"--fix: SAMPLER must stay {AS_GIVEN!r}, because with this loss or BucketBatchSampler another one would "
               f"change what is learnt; leave it out")


def recomputations(fixed: Mapping[str, Sequence[object]]) -> list[str]:
    """The kinds of recomputation allowed, from fast to small; ``AS_GIVEN`` comes last."""
    return [name for name in (*RECOMPUTE, AS_GIVEN) if name in fixed.get("recompute", RECOMPUTE)]


def encoder_batch_sizes(fixed: Mapping[str, Sequence[object]]) -> list[int]:
    """The encoder batches allowed, smallest first."""
    return sorted(value for value in fixed.get("encoder_batch", ENCODER_BATCH_SIZES) if isinstance(value, int))


def _is_divisible(choice: Choice, run: Run) -> bool:
    """Whether the sizes divide evenly and no chunk is empty: a quick filter before ``parallel_problems``."""
    replica_size = choice.tp_size * choice.cp_size * choice.num_stages
    if run.world_size % replica_size or (choice.num_chunks > 1 and choice.num_stages == 1):
        return False
    dp_size = run.world_size // replica_size
    packs = choice.sampler == PACKS or run.data.packs
    num_microbatches, rest = divmod(run.global_batch_size, dp_size if packs else dp_size * choice.micro_batch_size)
    if packs and choice.num_chunks == 1:
        return num_microbatches > 0
    num_layers = run.model.vision.num_layers + run.model.language.num_layers
    return not rest and (choice.num_chunks == 1 or (
        num_microbatches >= choice.num_stages and choice.num_chunks * choice.num_stages <= min(_MAX_SLOTS, num_layers)))


def _samplers(data: DataConfig) -> list[str]:
    """The samplers that keep the samples of each step; a bucket sampler decides which share one."""
    if data.sampler_type == _BUCKETS:
        return [AS_GIVEN]
    return [PACKS] if data.packs else [BALANCED, PACKS]


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


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
    """The layouts that a search has found."""

    ranking: tuple[Planned, ...]
    """Those that fit, fastest first."""
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
        """Judge layouts over ``num_steps`` steps with the laws that ``calibrate`` has for each, or raises UserError.

        ``max_bytes``: of a rank.  ``recomputations``: those that may be tried, from fast to small.
        """
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
        """Whether the layout's states alone, divided evenly, are too large."""
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
        """``even``, if need be with layers moved from the fullest to the emptiest stage; None if that does not fit."""
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
        best = self.planned(choice, _with_lists(one.layout.run, lists))
        if not lists.placement.has_whole_vit:
            return best
        for size in encoder_batch_sizes:
            if size == choice.encoder_batch:
                continue
            other = replace(choice, encoder_batch=size)
            found = self.planned(other, _with_lists(other.applied(self._run), lists))
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


def _with_lists(run: Run, lists: Lists) -> Run:
    return replace(run, model=lists.applied(run.model))
