"""Facts about a dataset before training on it: statistics of its samples, their problems, and how evenly and fully each
sampler would use it.  ``mm.report`` displays them.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from mm.config.model import ModelConfig
from mm.data.encode.encoder import SampleEncoder
from mm.data.index.dataset import Dataset, notes_of
from mm.data.index.sample_files import Split
from mm.data.media.picture import image_remarks
from mm.data.order.balance import Sizes
from mm.data.order.cost import SampleSizes
from mm.data.order.pack import Budget, fullest_packs
from mm.data.order.sampler import SAMPLERS, BatchShares
from mm.data.order.stream import Deal, Stream
from mm.data.record_name import BadSample
from mm.data.sample import Image
from mm.data.workers import decoding, in_processes
from mm.data_tool.kinds import kind_of
from mm.errors import UserError, counted
from mm.progress import Progress
from mm.report import Histogram, Problem, Report, Table

DP_SIZES = (8, 64)
SAMPLES_OF_RANK = 32
"""Samples per rank in a global batch, if the dataset has enough."""
_NUM_STEPS = 4
"""The imbalance is averaged over this many steps."""
_NUM_AT_A_TIME = 64
"""Samples that one process decodes before it reports."""


def survey(
    data_json: str, splits: Mapping[Split, Dataset], model: ModelConfig, seq_length: int, found: "MediaFindings"
) -> Report:
    """A report on the samples of each split, which must have been measured.  ``found`` is the result of checking their
    media."""
    skipped = dict.fromkeys(bad for dataset in splits.values() for bad in dataset.skipped)  # splits may share files
    damaged = (("samples whose media are damaged", f"{len(found.problems):,}, counted as usable"),)
    problems = (*map(_problem, skipped), *found.problems)
    return Report(f"Samples of {data_json}", damaged if found.problems else (), problems=problems,
                  notes=(*notes_of(splits), *found.notes),
                  sections=tuple(_section(name, dataset, model, seq_length) for name, dataset in splits.items()))


def _section(name: Split, dataset: Dataset, model: ModelConfig, seq_length: int) -> Report:
    lengths = dataset.lengths
    sizes = SampleSizes(model, lengths).of(np.arange(len(dataset)))
    tokens = sizes.num_tokens
    packs = fullest_packs(sizes.num_tokens, sizes.num_patches, Budget(seq_length))
    dropped, turns = dataset.column("num_dropped_tokens"), dataset.column("num_dropped_turns").sum(dtype=np.int64)
    facts = {
        "records in the files": f"{dataset.num_records:,}",
        "unusable": f"{dataset.num_bad:,}",
        "too long": f"{dataset.num_too_long:,} ({dataset.num_too_long / dataset.num_records:.1%})",
        f"samples for {name}": _taken(dataset),
        "tokens": f"{tokens.sum():,}, {tokens.mean():,.0f} per sample, {tokens.max():,} at most",
        "target tokens": f"{lengths.num_target_tokens.sum(dtype=np.int64) / tokens.sum():.1%}",
        "images and videos": f"{lengths.num_media.sum(dtype=np.int64):,}",
        "video frames": f"{dataset.column('num_frames').sum(dtype=np.int64):,}",
        "patches": f"{sizes.num_patches.sum():,}",
        "samples truncated to --seq-length": f"{np.count_nonzero(dropped):,} ({np.mean(dropped > 0):.1%}); turns "
                                             f"dropped: {turns:,}, tokens: {dropped.sum(dtype=np.int64):,}",
        "words like control tokens, read as text": f"{dataset.column('num_control_words').sum(dtype=np.int64):,}",
        "packs of --seq-length tokens": f"{len(packs):,}, {tokens.sum() / (len(packs) * seq_length):.1%} full",
    }
    histograms = [Histogram.of("Tokens", "per sample", tokens),
                  Histogram.of("Patches", "per sample", sizes.num_patches),
                  Histogram.of("Images and videos", "per sample", lengths.num_media)]
    return Report(f"{name.capitalize()} samples", tuple(facts.items()), tuple(_imbalance(sizes, seq_length)),
                  tuple(histograms))


def _taken(dataset: Dataset) -> str:
    """The number of samples in use, and of usable ones if that differs."""
    num_usable = dataset.num_records - dataset.num_bad - dataset.num_too_long
    of_all = f", of {num_usable:,} usable ones (val_rate, rates in %, max_samples)"
    return f"{len(dataset):,}{of_all if len(dataset) != num_usable else ''}"


def _imbalance(sizes: Sizes, seq_length: int) -> Iterator[Table]:
    """The cost of the costliest rank relative to the mean, for each sampler."""
    num_samples = len(sizes.costs)
    dp_sizes = [size for size in DP_SIZES if num_samples >= 2 * size] or [2] * (num_samples >= 4)
    if not dp_sizes:
        return
    rows: dict[str, list[str]] = {}
    for dp_size in dp_sizes:
        global_batch_size = dp_size * min(SAMPLES_OF_RANK, num_samples // dp_size)
        for name, sampler in SAMPLERS.items():  # one sample per microbatch, or packs
            stream, deal = sampler.order(sizes, BatchShares(dp_size, Budget(seq_length)), seed=0)
            rows.setdefault(name, []).append(f"{_mean_imbalance(stream, deal, sizes, global_batch_size):.3f}")
    yield Table("Work of the busiest data-parallel rank, for which the others wait (FLOPs; 1 = the mean of all ranks)",
                ("sampler_type", *(f"with {counted(size, 'rank')}" for size in dp_sizes)),
                tuple((name, *values) for name, values in rows.items()))


def _mean_imbalance(stream: Stream, deal: Deal, sizes: Sizes, global_batch_size: int) -> float:
    """The cost of the costliest rank over the mean, averaged over the first steps."""
    found: list[float] = []
    for step in range(_NUM_STEPS):
        ranks = deal(stream.samples(step * global_batch_size, global_batch_size))
        work = np.array([sum(int(sizes.costs[one].sum()) for one in rank) for rank in ranks])
        found.append(work.max() / work.mean())
    return float(np.mean(found))


@dataclass(frozen=True)
class MediaFindings:
    """The result of checking the media of a dataset."""

    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


def look(splits: Mapping[Split, Dataset], encoder: SampleEncoder, decodes: bool) -> MediaFindings:
    """Read the headers of all images, and with ``decodes`` encode all samples as the trainer does, on all CPUs."""
    blocks: list[tuple[Split, range]] = [
        (name, range(start, min(start + _NUM_AT_A_TIME, len(dataset))))
        for name, dataset in splits.items() for start in range(0, len(dataset), _NUM_AT_A_TIME)]
    problems, remarks, first = [], Counter[str](), {}
    ids, media = _Repeated(), _Repeated()
    work: Callable[[tuple[Split, range]], _Seen] = _Look(splits, encoder, decodes)
    found = in_processes(work, blocks, len(os.sched_getaffinity(0)))
    num_samples = sum(map(len, splits.values()))
    with Progress("looking at media", num_samples, "samples") as progress:
        for (_, block), seen in zip(blocks, found, strict=True):
            problems += seen.problems
            for remark, path in seen.remarks:
                remarks[remark] += 1
                first.setdefault(remark, path)
            for one, where in seen.ids:
                ids.add(one, where)
            for one, where in seen.media:
                media.add(one, where)
            progress.update(len(block))
    notes = [f"{counted(count, 'image')} {remark}; the first is {first[remark]}" for remark, count in remarks.items()]
    notes += [*ids.message("id"), *media.message("image or video")]
    return MediaFindings(tuple(problems), tuple(notes))


class _Repeated:
    """Values found in more than one record, on purpose or because a file was appended to itself."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._others: dict[str, str] = {}

    def add(self, one: str, where: str) -> None:
        """Add a value, found in the record ``where``, which a rate above 100% repeats."""
        if self._first.setdefault(one, where) != where:
            self._others.setdefault(one, where)

    def message(self, what: str) -> Iterator[str]:
        """A sentence, if any value is repeated."""
        for one, other in [*self._others.items()][:1]:
            yield (f"{len(self._others)} x the same {what} in more than one record; the first is {one}, in "
                   f"{self._first[one]} and {other}")


@dataclass(frozen=True)
class _Seen:
    """The result for a block of samples."""

    problems: list[Problem] = field(default_factory=list[Problem])
    remarks: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """With the image that each is about."""
    ids: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """With the record that has this id."""
    media: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Paths, each with its record."""


@dataclass
class _Look:
    """Checks a block of samples.  Pickles into processes."""

    splits: Mapping[Split, Dataset]
    encoder: SampleEncoder
    decodes: bool

    def __call__(self, block: tuple[Split, range]) -> _Seen:
        seen, dataset = _Seen(), self.splits[block[0]]
        for index in block[1]:
            try:
                sample = dataset[index]
                paths = [item.path for item in sample.media if isinstance(item, Image)]
                for path in paths:
                    with decoding(path):
                        seen.remarks.extend((remark, str(path)) for remark in image_remarks(path))
                files = {path for item in sample.media for path in item.files}
                seen.media.extend((path, sample.where) for path in sorted(files))
                name = dataset.name(index)
                seen.ids.extend([] if name is None else [(str(name), sample.where)])
                if self.decodes:
                    self.encoder.encode(sample)
            except UserError as error:
                seen.problems.append(_problem(dataset.bad_sample(index, error)))
        return seen


def _problem(bad: BadSample) -> Problem:
    return Problem(bad.where, bad.what, kind_of(bad.reason, bad.path), bad.path)
