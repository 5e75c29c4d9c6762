"""What validation reads: which samples, in which microbatches, and after which training steps.

Microbatches depend on the samples alone, not on the layout, so any number of replicas computes the same sums.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from mm.config.run import Run
from mm.data.index.dataset import Dataset
from mm.data.index.measure import Measure
from mm.data.loader.loader import ReadStep, StepLoader
from mm.data.sample import HasLengths
from mm.data.sampler.balance import Sizes, fullest_packs
from mm.data.sampler.cost import SampleSizes
from mm.data.sampler.sampler import StepSamples, budget_of
from mm.parallel.context import deal


@dataclass(frozen=True)
class ValidationOrder:
    """Which replica computes which samples in one validation."""

    num_samples: int
    steps: list[list[StepSamples]]
    """By step and replica.  If a replica has too few microbatches for the schedule, empty ones are added."""


def validation_order(run: Run, lengths: HasLengths) -> ValidationOrder:
    """Each sample once, or the same random subset each time if ``--eval-iters`` allows fewer than all.

    A step has about as many microbatches as a training step, so it takes as much memory; the last one has the rest.
    Within a step they are distributed over the replicas by cost.
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

    dataset: Dataset
    order: ValidationOrder
    measure: Measure
    run: Run
    dp_rank: int

    @classmethod
    def of(cls, run: Run, dataset: Dataset, measure: Measure, dp_rank: int) -> "ValidationReader":
        """A reader of ``dataset``, the samples for validation."""
        return cls(dataset, validation_order(run, dataset.columns), measure, run, dp_rank)

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
