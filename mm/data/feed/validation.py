"""What validation reads: which samples, in which microbatches, and between which steps of the training.

Microbatches are made of the samples alone, whatever ranks there are, so that every number of replicas computes the same
sums.  What becomes of the losses is not known here.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from mm.config.run import Run
from mm.data.feed.loader import ReadStep, StepLoader
from mm.data.index.dataset import Dataset
from mm.data.index.gauge import Gauge
from mm.data.lengths import HasLengths
from mm.data.order.balance import Sizes
from mm.data.order.cost import SampleSizes
from mm.data.order.pack import fullest_packs
from mm.data.order.sampler import budget_of
from mm.data.order.stream import Step
from mm.parallel.context import deal


@dataclass(frozen=True)
class ValidationOrder:
    """Who computes what in one validation."""

    num_samples: int
    steps: list[list[Step]]
    """By step and replica.  A microbatch without samples stands where a replica has too few for the schedule."""


def validation_order(run: Run, lengths: HasLengths) -> ValidationOrder:
    """Each sample once, or the same drawn ones each time where ``--eval-iters`` allows fewer than all.

    A step has about as many microbatches as one of the training, so that as much of it is in memory; the last has what
    is left.  Within a step they are dealt to the replicas by cost.
    """
    samples = _taken(run, len(lengths))
    sizes = SampleSizes(run.model, lengths).of(np.arange(len(lengths)))
    microbatches = _microbatches(run, samples, sizes)
    size, least = run.dp_size * run.held_microbatches, run.num_stages if run.num_chunks > 1 else 1
    steps = []
    for first in range(0, len(microbatches), size):
        some = microbatches[first : first + size]
        own: list[Step] = [[] for _ in range(run.dp_size)]
        for one, replica in zip(some, deal([int(sizes.costs[one].sum()) for one in some], run.dp_size), strict=True):
            own[replica].append(one)
        steps.append([step + [[]] * (least - len(step)) for step in own])
    return ValidationOrder(len(samples), steps)


def _taken(run: Run, num_samples: int) -> np.ndarray:
    """int64, ascending: with fewer than all, drawn, because files may be sorted."""
    num_batches = run.args.eval_iters
    if num_batches is None or num_batches * run.global_batch_size >= num_samples:
        return np.arange(num_samples)
    drawn = np.random.default_rng(run.args.seed).permutation(num_samples)
    return np.sort(drawn[: num_batches * run.global_batch_size])


def _microbatches(run: Run, samples: np.ndarray, sizes: Sizes) -> Step:
    """Packs, or ``--micro-batch-size`` samples in the order of the files."""
    size = run.args.micro_batch_size
    if not run.data.packs:
        return [samples[first : first + size].tolist() for first in range(0, len(samples), size)]
    own = sizes.of(samples)
    packs = fullest_packs(own.num_tokens, own.num_patches, budget_of(run))
    return [samples[pack].tolist() for pack in packs]


@dataclass(frozen=True)
class ValidationPlan:
    """What every rank knows of each validation of a run."""

    num_plans: int
    num_samples: int
    num_of_all: int
    """Samples for validation; ``--eval-iters`` may allow fewer."""
    fingerprint: str
    """A fingerprint of the samples that are taken."""


@dataclass(frozen=True)
class ValidationReader:
    """Reads the samples for validation on a rank that owns data, each time anew."""

    dataset: Dataset
    order: ValidationOrder
    gauge: Gauge
    run: Run
    dp_rank: int

    @classmethod
    def of(cls, run: Run, dataset: Dataset, gauge: Gauge, dp_rank: int) -> "ValidationReader":
        """A reader of ``dataset``, the samples for validation."""
        return cls(dataset, validation_order(run, dataset.columns), gauge, run, dp_rank)

    def plan(self) -> ValidationPlan:
        """The same on every rank that owns data."""
        facts = self.order.num_samples, [one.identity for one in self.dataset.contents()]
        fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return ValidationPlan(len(self.order.steps), self.order.num_samples, len(self.dataset), fingerprint)

    def loader(self) -> StepLoader:
        """The loader of one validation."""
        steps = [step[self.dp_rank] for step in self.order.steps]
        args, data = self.run.args, self.run.data
        num_workers = min(args.num_workers, sum(map(len, steps)))
        return StepLoader(self.dataset, self.gauge.encoder, steps, num_workers, data.prefetch_factor,
                          skips_bad=args.bad_sample == "skip")


def in_between(
    training: Iterator[ReadStep], is_due: Iterable[bool], open_loader: Callable[[], StepLoader]
) -> Iterator[ReadStep]:
    """The training's steps, and after each for which ``is_due`` says so a whole validation.

    Its workers live no longer than it.
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
