"""The microbatches of each step, prepared ahead by worker processes (``mm.data.workers``), and what validation reads.

Microbatches of a validation depend on the samples alone, so any number of replicas computes the same sums.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count, islice
from typing import Any

import numpy as np
import torch

from mm.batch import IGNORE_INDEX, Microbatch
from mm.config.run import Run
from mm.data.encode import Outline, SampleEncoder
from mm.data.index.dataset import Dataset
from mm.data.index.index import Measure
from mm.data.loader.feature_cache import FeatureCache
from mm.data.sample import BadSample, HasLengths
from mm.data.sampler.balance import Sizes, fullest_packs
from mm.data.sampler.cost import SampleSizes
from mm.data.sampler.sampler import SampleOrder, StepSamples, budget_of
from mm.data.workers import Prepared
from mm.errors import UserError, add_note
from mm.parallel.context import deal

_PLANNED_AHEAD = 2
"""Steps planned before they are requested."""


@dataclass(frozen=True)
class ReadStep:
    """The microbatches of one data-parallel rank in one optimizer step."""

    microbatches: list[Microbatch]
    bad: tuple[BadSample, ...] = ()
    """Samples that could not be used.  Each is replaced by one token that is not a target."""
    is_validation: bool = False


class StepLoader(Iterator[ReadStep]):
    """Iterator over the optimizer steps of one data-parallel rank.

    What it yields depends only on its arguments, not on ``num_workers`` or timing.  Workers start at once.
    """

    def __init__(
        self, dataset: Dataset, encoder: SampleEncoder, steps: Iterable[StepSamples], num_workers: int = 2,
        prefetch_factor: int = 2, skips_bad: bool = False, features: FeatureCache | None = None,
    ) -> None:
        """``steps``, perhaps endless, gives the samples of each microbatch; one without any gets a token without loss.

        Each worker prepares ``prefetch_factor`` microbatches ahead; without workers the calling thread encodes.
        ``skips_bad``: samples that cannot be used are left out and reported.  ``features``: the cache of ViT outputs,
        used instead of pixels if it has all media of a microbatch.
        """
        read = _ReadMicrobatch(dataset, encoder, skips_bad, features)
        self._microbatches = Prepared(read, _in_one_row(steps), num_workers, prefetch_factor)

    def __next__(self) -> ReadStep:
        """The next step.  Raises UserError naming a sample that cannot be used, unless bad samples are left out."""
        step, bad, is_last = [], [], False
        while not is_last:
            item, found, is_last = next(self._microbatches)
            if isinstance(item, UserError):
                raise item
            step.append(item)
            bad += found
        return ReadStep(step, tuple(bad))

    def close(self) -> None:
        """End the workers.  The loader yields no more steps."""
        self._microbatches.close()


def planned_steps(make_order: Callable[[], SampleOrder], num_workers: int) -> Iterator[StepSamples]:
    """The endless steps of one replica, planned ahead by a process of their own; without workers, by this thread.

    A global batch of 100,000 samples takes a second of Python, in which this process could launch no work.
    """
    return Prepared(_PlanStep(make_order), count(), min(num_workers, 1), _PLANNED_AHEAD)


@dataclass(frozen=True)
class _PlanStep:
    """Plans a step, given its number.  Pickles small: the order is made where it is used."""

    make_order: Callable[[], SampleOrder]

    @cached_property
    def _order(self) -> SampleOrder:
        return self.make_order()

    def __call__(self, number: int) -> StepSamples:
        return self._order.step(number)


def _in_one_row(steps: Iterable[StepSamples]) -> Iterator[tuple[list[int], bool]]:
    """Each microbatch of all steps, with whether it is the last of its step: steps differ in their numbers of them."""
    for step in steps:
        assert step, "a step without microbatches would never end"
        for number, indices in enumerate(step):
            yield indices, number == len(step) - 1


@dataclass(frozen=True)
class _ReadMicrobatch:
    """Reads one microbatch; returns it with bad samples, and whether it is the last of its step.

    A UserError is returned, because raised in a worker it would have a traceback.
    """

    dataset: Dataset
    encoder: SampleEncoder
    skips_bad: bool
    features: FeatureCache | None

    def __call__(self, one: tuple[list[int], bool]) -> tuple[Microbatch | UserError, list[BadSample], bool]:
        indices, is_last = one
        bad: list[BadSample] = []
        try:
            outlines = [self._attempt(index, partial(self._outline, index), bad) for index in indices]
            outlines = self._looked_up(outlines)
            samples = [self._attempt(index, partial(self._filled, outline), bad).microbatch
                       for index, outline in zip(indices, outlines, strict=True)]
        except UserError as error:
            return error, [], is_last
        return Microbatch.join(samples or [_stand_in()]), bad, is_last

    def _attempt(self, index: int, work: Callable[[], Outline], bad: list[BadSample]) -> Outline:
        """The result of ``work``, or a stand-in for sample ``index`` if it fails and bad samples are skipped."""
        try:
            return work()
        except UserError as error:
            if not self.skips_bad:
                raise
            bad.append(self.dataset.bad_sample(index, error))  # raises if the whole file has changed
            return Outline(_stand_in(index), (), "")

    def _outline(self, index: int) -> Outline:
        sample = self.dataset[index]
        with _noting(sample.where):
            outline = self.encoder.outline(sample)
            self.dataset.refuse_changed(index, outline.microbatch)
        return replace(outline, microbatch=replace(outline.microbatch, samples=(index,)))

    def _looked_up(self, outlines: list[Outline]) -> list[Outline]:
        """Add the cached ViT outputs if all are cached, otherwise the keys of the missing ones."""
        if self.features is None:
            return outlines
        found_keys, found = self.features.look_up(
            [one for outline in outlines for one in outline.media], self.encoder.videos)
        keys, features, filled = iter(found_keys), iter(found or ()), []
        for outline in outlines:
            own = tuple(islice(features, len(outline.media)))
            changes: dict[str, Any] = {"feature_keys": tuple(islice(keys, len(outline.media)))}
            if own:
                changes |= {"features": torch.cat(own), "feature_bytes": self.features.row_bytes}
            filled.append(replace(outline, microbatch=replace(outline.microbatch, **changes)))
        return filled

    def _filled(self, outline: Outline) -> Outline:
        """Add the pixels, unless cached features replace the ViT."""
        if outline.microbatch.skips_vision:
            return outline
        with _noting(outline.where):
            return replace(outline, microbatch=self.encoder.filled(outline))


@contextmanager
def _noting(where: str) -> Iterator[None]:
    """Add a note with the sample to errors that are not the user's."""
    try:
        yield
    except Exception as error:
        add_note(error, f"while encoding sample {where}")
        raise


def _stand_in(*samples: int) -> Microbatch:
    """One token without loss in place of a sample that is left out, so that no rank and no pack becomes empty."""
    nothing = torch.zeros(1, dtype=torch.int64)
    return Microbatch(nothing, nothing + IGNORE_INDEX, nothing.expand(3, 1), (1,), (), None, samples=samples)


@dataclass(frozen=True)
class ValidationOrder:
    """Which replica computes which samples in one validation."""

    num_samples: int
    steps: list[list[StepSamples]]
    """By step and replica.  If a replica has too few microbatches for the schedule, empty ones are added."""


def validation_order(run: Run, lengths: HasLengths) -> ValidationOrder:
    """Each sample once, or the same random subset each time if ``--eval-iters`` allows fewer than all.

    A step has as many microbatches as a training step, distributed over the replicas by cost.
    """
    samples = _taken(run, len(lengths))
    sizes = SampleSizes(run.model, lengths).of(np.arange(len(lengths)))
    microbatches = _microbatches(run, samples, sizes)
    size, least = run.dp_size * run.held_microbatches, run.num_stages if run.num_chunks > 1 else 1
    steps = []
    for first in range(0, len(microbatches), size):
        some = microbatches[first : first + size]
        own: list[StepSamples] = [[] for _ in range(run.dp_size)]
        for one, replica in zip(some, deal([int(sizes.costs[one].sum()) for one in some], run.dp_size), strict=True):
            own[replica].append(one)
        steps.append([step + [[]] * (least - len(step)) for step in own])
    return ValidationOrder(len(samples), steps)


def _taken(run: Run, num_samples: int) -> np.ndarray:
    """int64, ascending.  A subset is drawn at random, because files may be sorted."""
    num_batches = run.args.eval_iters
    if num_batches is None or num_batches * run.global_batch_size >= num_samples:
        return np.arange(num_samples)
    drawn = np.random.default_rng(run.args.seed).permutation(num_samples)
    return np.sort(drawn[: num_batches * run.global_batch_size])


def _microbatches(run: Run, samples: np.ndarray, sizes: Sizes) -> StepSamples:
    """Packs, or ``--micro-batch-size`` samples in file order."""
    size = run.args.micro_batch_size
    if not run.data.packs:
        return [samples[first : first + size].tolist() for first in range(0, len(samples), size)]
    own = sizes.of(samples)
    packs = fullest_packs(own.num_tokens, own.num_patches, budget_of(run))
    return [samples[pack].tolist() for pack in packs]


@dataclass(frozen=True)
class ValidationPlan:
    """The facts about a run's validations that every rank knows."""

    num_plans: int
    num_samples: int
    num_of_all: int
    """All validation samples; ``--eval-iters`` may allow fewer."""
    fingerprint: str
    """Identifies the samples in use."""


@dataclass(frozen=True)
class ValidationReader:
    """Reads the validation samples on a data owner, again for each validation."""

    run: Run
    dataset: Dataset
    measure: Measure
    dp_rank: int

    @cached_property
    def order(self) -> ValidationOrder:
        return validation_order(self.run, self.dataset.columns)

    def plan(self) -> ValidationPlan:
        """What a data owner sends to all ranks; the same on each."""
        facts = self.order.num_samples, [one.identity for one in self.dataset.fingerprints()]
        fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return ValidationPlan(len(self.order.steps), self.order.num_samples, len(self.dataset), fingerprint)

    def loader(self) -> StepLoader:
        """A loader for one validation."""
        steps = [step[self.dp_rank] for step in self.order.steps]
        args, data = self.run.args, self.run.data
        num_workers = min(args.num_workers, sum(map(len, steps)))
        return StepLoader(self.dataset, self.measure.encoder, steps, num_workers, data.prefetch_factor,
                          skips_bad=args.bad_sample == "skip")


def in_between(
    training: Iterator[ReadStep], is_due: Iterable[bool], open_loader: Callable[[], StepLoader]
) -> Iterator[ReadStep]:
    """The training steps, with a whole validation after each step for which ``is_due`` is true.

    Its workers end with it.
    """
    for due in is_due:
        yield next(training)
        if due:
            loader = open_loader()
            try:
                for step in loader:
                    yield replace(step, is_validation=True)
            finally:
                loader.close()
