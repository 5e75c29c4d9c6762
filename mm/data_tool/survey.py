"""Facts about a dataset before training on it: statistics of its samples, and their problems, for ``mm.report``."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mm.config.model import ModelConfig
from mm.data.encode.encoder import SampleEncoder
from mm.data.index.dataset import Dataset, notes_of
from mm.data.index.sample_files import Split
from mm.data.records.record_name import BadSample
from mm.data.sampler.cost import SampleSizes
from mm.data.sampler.pack import Budget, fullest_packs
from mm.data.workers import in_processes
from mm.errors import UserError
from mm.progress import Progress
from mm.report import Histogram, Problem, Report

_NUM_AT_A_TIME = 64
"""Samples that one process decodes before it reports."""
_OF_ONE_SAMPLE = re.compile(
    r"""(?<!\w)'[^']*'|"[^"]*"  # quoted
    |(?<![\w.-])(?:[.~]{0,2}/[\w./~-]+|[\w./-]+/[\w-]+\.[\w.-]+)  # a path
    |(?<![\w.])\d(?:[\d,.]*\d)?  # a number""", re.VERBOSE)
"""What differs between the problems of one kind."""


def survey(
    data_json: str, splits: Mapping[Split, Dataset], model: ModelConfig, seq_length: int, damaged: Sequence[BadSample]
) -> Report:
    """A report on the samples of each split, which must have been measured, and those with ``damaged`` media."""
    skipped = dict.fromkeys(bad for dataset in splits.values() for bad in dataset.skipped)  # splits may share files
    facts = (("samples whose media are damaged", f"{len(damaged):,}, counted as usable"),) if damaged else ()
    return Report(f"Samples of {data_json}", facts, problems=tuple(map(_problem, (*skipped, *damaged))),
                  notes=tuple(notes_of(splits)),
                  sections=tuple(_section(name, dataset, model, seq_length) for name, dataset in splits.items()))


def _problem(bad: BadSample) -> Problem:
    return Problem(bad.where, bad.what, kind_of(bad.reason, bad.path))


def kind_of(reason: str, path: str | None = None) -> str:
    """The kind of a problem: its text without what differs between samples, such as paths, numbers and quotes.

    ``path``: the image or video that causes it, which may have spaces in its name.
    """
    return _OF_ONE_SAMPLE.sub("…", reason if path is None else reason.replace(path, "…")).removeprefix("…: ")


def _section(name: Split, dataset: Dataset, model: ModelConfig, seq_length: int) -> Report:
    lengths = dataset.lengths
    sizes = SampleSizes(model, lengths).of(np.arange(len(dataset)))
    tokens, dropped = sizes.num_tokens, dataset.column("num_dropped_tokens")
    packs = fullest_packs(sizes.num_tokens, sizes.num_patches, Budget(seq_length))
    num_usable = dataset.num_records - dataset.num_bad - dataset.num_too_long
    of_all = f", of {num_usable:,} usable ones (val_rate, rates in %, max_samples)" * (len(dataset) != num_usable)
    facts = {
        "records in the files": f"{dataset.num_records:,}",
        "unusable": f"{dataset.num_bad:,}",
        "too long": f"{dataset.num_too_long:,} ({dataset.num_too_long / dataset.num_records:.1%})",
        f"samples for {name}": f"{len(dataset):,}{of_all}",
        "tokens": f"{tokens.sum():,}, {tokens.mean():,.0f} per sample, {tokens.max():,} at most",
        "target tokens": f"{lengths.num_target_tokens.sum(dtype=np.int64) / tokens.sum():.1%}",
        "images and videos": f"{lengths.num_media.sum(dtype=np.int64):,}",
        "patches": f"{sizes.num_patches.sum():,}",
        "samples truncated to --seq-length": f"{np.count_nonzero(dropped):,} ({np.mean(dropped > 0):.1%}); tokens "
                                             f"dropped: {dropped.sum(dtype=np.int64):,}",
        "packs of --seq-length tokens": f"{len(packs):,}, {tokens.sum() / (len(packs) * seq_length):.1%} full",
    }
    histograms = [Histogram.of("Tokens", "per sample", tokens),
                  Histogram.of("Patches", "per sample", sizes.num_patches),
                  Histogram.of("Images and videos", "per sample", lengths.num_media)]
    return Report(f"{name.capitalize()} samples", tuple(facts.items()), histograms=tuple(histograms))


def damaged_samples(splits: Mapping[Split, Dataset], encoder: SampleEncoder) -> list[BadSample]:
    """The samples that cannot be encoded: decodes the media of all, as the trainer does, on all CPUs."""
    blocks: list[tuple[Split, range]] = [
        (name, range(start, min(start + _NUM_AT_A_TIME, len(dataset))))
        for name, dataset in splits.items() for start in range(0, len(dataset), _NUM_AT_A_TIME)]
    found: list[BadSample] = []
    results = in_processes(_Encode(splits, encoder), blocks, len(os.sched_getaffinity(0)))
    with Progress("decoding media", sum(map(len, splits.values())), "samples") as progress:
        for (_, block), bad in zip(blocks, results, strict=True):
            found += bad
            progress.update(len(block))
    return found


@dataclass
class _Encode:
    """Encodes a block of samples, and returns the bad ones.  Pickles into processes."""

    splits: Mapping[Split, Dataset]
    encoder: SampleEncoder

    def __call__(self, block: tuple[Split, range]) -> list[BadSample]:
        found, dataset = list[BadSample](), self.splits[block[0]]
        for index in block[1]:
            try:
                dataset.refuse_changed(index, self.encoder.encode(dataset[index]))
            except UserError as error:
                found.append(dataset.bad_sample(index, error))
        return found
