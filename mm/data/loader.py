"""Optimizer steps' worth of microbatches, prepared ahead by worker processes (``mm.data.workers``)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from mm.batch import IGNORE_INDEX, Microbatch
from mm.data.dataset import Dataset
from mm.data.encode import SampleEncoder
from mm.data.order import Step
from mm.data.quarantine import BadSample
from mm.data.workers import Prepared
from mm.errors import UserError


@dataclass(frozen=True)
class ReadStep:
    """The microbatches of one data-parallel rank in one optimizer step."""

    microbatches: list[Microbatch]
    bad: tuple[BadSample, ...] = ()
    """Samples that could not be used: in the place of each there is one token from which nothing is learnt."""
    is_validation: bool = False


class StepLoader(Iterator[ReadStep]):
    """Iterator over optimizer steps, of one data-parallel rank.

    What it yields depends on its arguments only, not on ``num_workers`` or timing.  Workers begin at once.
    """

    def __init__(
        self, dataset: Dataset, encoder: SampleEncoder, steps: Iterable[Step], num_workers: int = 2,
        prefetch_factor: int = 2, skips_bad: bool = False,
    ) -> None:
        """``steps`` says which samples each microbatch of each step holds, and may have no end.  In the place of a
        microbatch without samples there is one token from which nothing is learnt.

        It is asked as far ahead as workers prepare: ``prefetch_factor`` microbatches each.  Without workers the calling
        thread encodes.  ``skips_bad``: a sample that cannot be used is left out, and told.
        """
        read = _ReadMicrobatch(dataset, encoder, skips_bad)
        self._microbatches = Prepared(read, _in_one_row(steps), num_workers, prefetch_factor)

    def __next__(self) -> ReadStep:
        """The next step.  Raises UserError for a sample that cannot be used, naming it, unless it is left out."""
        step, bad, is_last = [], [], False
        while not is_last:
            item, found, is_last = next(self._microbatches)
            if isinstance(item, UserError):
                raise item
            step.append(item)
            bad += found
        return ReadStep(step, tuple(bad))

    def close(self) -> None:
        """End the workers.  The loader yields nothing more."""
        self._microbatches.close()


def _in_one_row(steps: Iterable[Step]) -> Iterator[tuple[list[int], bool]]:
    """The microbatches of all steps, and whether each is the last of its step: steps need not have equally many."""
    for step in steps:
        assert step, "a step without microbatches would never end"
        for number, indices in enumerate(step):
            yield indices, number == len(step) - 1


@dataclass(frozen=True)
class _ReadMicrobatch:
    """Reads the microbatch of some samples, and tells with it whether its step ends there.

    A UserError is returned: raised in a worker, its sentences would be buried in a traceback.
    """

    dataset: Dataset
    encoder: SampleEncoder
    skips_bad: bool

    def __call__(self, one: tuple[list[int], bool]) -> tuple[Microbatch | UserError, list[BadSample], bool]:
        indices, is_last = one
        samples, bad = [], []
        for index in indices:
            try:
                samples.append(self._encode(index))
            except UserError as error:
                if not self.skips_bad:
                    return error, [], is_last
                samples.append(_stand_in(index))
                try:
                    bad.append(self.dataset.bad_sample(index, error))
                except UserError as changed:  # the whole file is another one
                    return changed, [], is_last
        return Microbatch.join(samples or [_stand_in()]), bad, is_last

    def _encode(self, index: int) -> Microbatch:
        sample = self.dataset[index]
        try:
            return replace(self.encoder.encode(sample), samples=(index,))
        except Exception as error:
            error.add_note(f"while encoding sample {sample.source}")
            raise


def _stand_in(*samples: int) -> Microbatch:
    """In the place of a sample that is left out: so no rank, and no plan of packs, is without its part.

    Token 0 is in every vocabulary.
    """
    nothing = torch.zeros(1, dtype=torch.int64)
    return Microbatch(nothing, nothing + IGNORE_INDEX, nothing.expand(3, 1), (1,), (), None, samples=samples)
