"""Optimizer steps' worth of microbatches, prepared ahead by worker processes (``mm.data.workers``)."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from mm.batch import IGNORE_INDEX, Microbatch
from mm.data.encode.encoder import Outline, SampleEncoder
from mm.data.feed.features import FeatureCache
from mm.data.index.dataset import Dataset
from mm.data.order.stream import Step
from mm.data.record_name import BadSample
from mm.data.workers import Prepared
from mm.errors import UserError


@dataclass(frozen=True)
class ReadStep:
    """The microbatches of one data-parallel rank in one optimizer step."""

    microbatches: list[Microbatch]
    bad: tuple[BadSample, ...] = ()
    """Samples that could not be used: in the place of each there is one token from which nothing is learnt."""
    notes: tuple[str, ...] = ()
    """What the user should know besides."""
    is_validation: bool = False


class StepLoader(Iterator[ReadStep]):
    """Iterator over optimizer steps, of one data-parallel rank.

    What it yields depends on its arguments only, not on ``num_workers`` or timing.  Workers begin at once.
    """

    def __init__(
        self, dataset: Dataset, encoder: SampleEncoder, steps: Iterable[Step], num_workers: int = 2,
        prefetch_factor: int = 2, skips_bad: bool = False, features: FeatureCache | None = None,
    ) -> None:
        """``steps`` says which samples each microbatch of each step holds, and may have no end.  In the place of a
        microbatch without samples there is one token from which nothing is learnt.

        It is asked as far ahead as workers prepare: ``prefetch_factor`` microbatches each.  Without workers the calling
        thread encodes.  ``skips_bad``: a sample that cannot be used is left out, and told.
        ``features``: what is kept of the ViT's work, which takes the place of pixels where a microbatch's is there
        whole.
        """
        read = _ReadMicrobatch(dataset, encoder, skips_bad, features)
        self._microbatches = Prepared(read, _in_one_row(steps), num_workers, prefetch_factor)

    def __next__(self) -> ReadStep:
        """The next step.  Raises UserError for a sample that cannot be used, naming it, unless it is left out."""
        step, bad, notes, is_last = [], [], [], False
        while not is_last:
            item, found, told, is_last = next(self._microbatches)
            if isinstance(item, UserError):
                raise item
            step.append(item)
            bad += found
            notes += told
        return ReadStep(step, tuple(bad), tuple(notes))

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
    """Reads the microbatch of some samples, and tells with it what was bad, notes, and whether its step ends there.

    A UserError is returned: raised in a worker, its sentences would be buried in a traceback.
    """

    dataset: Dataset
    encoder: SampleEncoder
    skips_bad: bool
    features: FeatureCache | None

    def __call__(
        self, one: tuple[list[int], bool]
    ) -> tuple[Microbatch | UserError, list[BadSample], list[str], bool]:
        indices, is_last = one
        bad: list[BadSample] = []
        try:
            outlines = [self._attempt(index, partial(self._outline, index), bad) for index in indices]
            outlines, notes = self._looked_up(outlines)
            samples = [self._attempt(index, partial(self._filled, outline), bad).microbatch
                       for index, outline in zip(indices, outlines, strict=True)]
        except UserError as error:
            return error, [], [], is_last
        return Microbatch.join(samples or [_stand_in()]), bad, notes, is_last

    def _attempt(self, index: int, work: Callable[[], Outline], bad: list[BadSample]) -> Outline:
        """``work``, or where it fails and that is allowed, what stands in the place of sample ``index``."""
        try:
            return work()
        except UserError as error:
            if not self.skips_bad:
                raise
            bad.append(self.dataset.bad_sample(index, error))  # raises where the whole file is another one
            return Outline(_stand_in(index), (), "")

    def _outline(self, index: int) -> Outline:
        sample = self.dataset[index]
        with _noting(sample.source):
            outline = self.encoder.outline(sample)
        return replace(outline, microbatch=replace(outline.microbatch, samples=(index,)))

    def _looked_up(self, outlines: list[Outline]) -> tuple[list[Outline], list[str]]:
        """With what is kept of the ViT's work, if that is there for all, else with keys for what is not."""
        if self.features is None:
            return outlines, []
        found = self.features.look_up([one for outline in outlines for one in outline.media], self.encoder.videos)
        keys, features, filled = iter(found.keys), iter(found.features or ()), []
        for outline in outlines:
            own = tuple(islice(features, len(outline.media)))
            changes: dict[str, Any] = {"feature_keys": tuple(islice(keys, len(outline.media)))}
            if own:
                changes |= {"features": torch.cat(own), "feature_bytes": self.features.row_bytes}
            filled.append(replace(outline, microbatch=replace(outline.microbatch, **changes)))
        return filled, found.notes

    def _filled(self, outline: Outline) -> Outline:
        """With pixels, unless the ViT has nothing to do."""
        if outline.microbatch.skips_vision:
            return outline
        with _noting(outline.source):
            return replace(outline, microbatch=self.encoder.filled(outline))


@contextmanager
def _noting(source: str) -> Iterator[None]:
    """Of an error that is no user's, say at which sample it came."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while encoding sample {source}")
        raise


def _stand_in(*samples: int) -> Microbatch:
    """In the place of a sample that is left out: so no rank, and no plan of packs, is without its part.

    Token 0 is in every vocabulary.
    """
    nothing = torch.zeros(1, dtype=torch.int64)
    return Microbatch(nothing, nothing + IGNORE_INDEX, nothing.expand(3, 1), (1,), (), None, samples=samples)
