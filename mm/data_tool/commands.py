"""The commands of ``mm-data``: check, show and mock."""

import dataclasses
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerBase

from mm.batch import IGNORE_INDEX, Microbatch
from mm.config.data import read_data
from mm.config.model import ModelConfig, read_model
from mm.console import Progress, ongoing
from mm.data.encode import SampleEncoder, load_tokenizer
from mm.data.index.dataset import Dataset, Split, datasets, notes_of
from mm.data.index.index import Measure
from mm.data.sample import BadSample, Sample
from mm.data.sampler.balance import Budget, fullest_packs
from mm.data.sampler.cost import SampleSizes
from mm.data.workers import in_processes
from mm.data_tool.flags import CheckFlags, DataFlags, MockFlags, ShowFlags
from mm.errors import MAX_PROBLEMS, NoEffect, UserError, counted, printable, refuse
from mm.report import Histogram, Problem, Report, check_page, page, render, write_page

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
    problems = (Problem(bad.where, bad.what, kind_of(bad.reason, bad.path)) for bad in (*skipped, *damaged))
    return Report(f"Samples of {data_json}", facts, problems=tuple(problems),
                  notes=tuple(notes_of(splits)),
                  sections=tuple(_section(name, dataset, model, seq_length) for name, dataset in splits.items()))


def kind_of(reason: str, path: str | None = None) -> str:
    """The kind of a problem: its text without paths (above all ``path``, which may have spaces), numbers and quotes."""
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


@dataclass(frozen=True)
class Shown:
    """A sample, prepared for display."""

    where: str
    groups: tuple[tuple[str, str], ...]
    """Consecutive tokens of one kind ("target", "context" or "media"), and their text."""
    num_tokens: int
    num_target_tokens: int
    frames: tuple[np.ndarray, ...]
    """uint8 [height, width, 3]: each image, and each frame of a video."""

    @classmethod
    def of(cls, sample: Sample, encoder: SampleEncoder) -> "Shown":
        """Raises UserError as the encoder does."""
        encoded = encoder.encode(sample)
        return cls(sample.where, tuple(_groups(encoded, encoder)), encoded.num_tokens, encoded.num_target_tokens,
                   tuple(_frames(encoded, encoder)))

    def text(self) -> str:
        """For the terminal, with target tokens between [[ and ]]."""
        body = "".join(f"[[{text}]]" if kind == "target" else text for kind, text in self.groups)
        return printable(f"{self.where}: {self._counts}\n\n{body}")

    def html(self) -> str:
        """A self-contained page."""
        frames = [(frame.shape[1], frame.shape[0], _png(frame)) for frame in self.frames]
        return page(self.where, render("sample.html", counts=self._counts, frames=frames, groups=self.groups))

    @property
    def _counts(self) -> str:
        return (f"{self.num_tokens:,} tokens, {self.num_target_tokens:,} of them targets, {len(self.frames):,} images "
                f"and frames")


def _groups(encoded: Microbatch, encoder: SampleEncoder) -> Iterator[tuple[str, str]]:
    """Runs of tokens of one kind; the tokens of an image or video are replaced by their number."""
    media, ids = (encoder.chat.image_token_id, encoder.chat.video_token_id), encoded.token_ids.tolist()
    is_target = [False, *(label != IGNORE_INDEX for label in encoded.labels.tolist()[:-1])]
    kinds = ["media" if token in media else "target" if is_one else "context"
             for token, is_one in zip(ids, is_target, strict=True)]
    start = 0
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or kinds[stop] != kinds[start]:
            text = f"[{stop - start} visual tokens]" if kinds[start] == "media" else (
                str(encoder.chat.tokenizer.decode(ids[start:stop])))
            yield kinds[start], text
            start = stop


def _frames(encoded: Microbatch, encoder: SampleEncoder) -> Iterator[np.ndarray]:
    if encoded.pixel_values is None:
        return
    sizes = [t * h * w for t, h, w in encoded.image_grids]
    for patches, grid in zip(encoded.pixel_values.split(sizes), encoded.image_grids, strict=True):
        frames = encoder.images.joined(patches, grid)
        is_still = grid[0] == 1 and bool((frames == frames[0]).all())
        yield from (frame.numpy() for frame in (frames[:1] if is_still else frames))


def _png(frame: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(frame).save(stream, "PNG")
    return stream.getvalue()


def _check(flags: CheckFlags) -> None:
    check_page(flags.html)
    problems: list[str] = []
    splits, measure, model = _measured(flags, problems, flags.again)
    if splits:
        damaged = damaged_samples(splits, measure.encoder) if flags.deep else []
        with ongoing("computing the statistics"):
            report = survey(flags.mm_data, splits, model, flags.seq_length, damaged)
        report = dataclasses.replace(report, notes=(*report.notes, *_key_notes(flags.mm_data)))
        print(report.text())
        if flags.html is not None:
            print("\n" + write_page(flags.html, report.html()))
        if count := len(report.problems):
            listed = "" if count <= MAX_PROBLEMS or flags.html else (
                f", of which {MAX_PROBLEMS} are shown (--html PAGE lists all)")
            problems.append(f"{counted(count, 'problem')}{listed}; repair or remove these samples, or train "
                            f"with --bad-sample skip")
    refuse(problems)


def _key_notes(path: str) -> Iterator[str]:
    """Notes about the keys of the data JSON ``path``: above all, which have no effect, and why."""
    notes = read_data(path).notes
    yield from notes
    if any(isinstance(note, NoEffect) for note in notes):
        yield f"all other keys of {path} are used, or have the only value that is possible here"


def _measured(
    flags: DataFlags, problems: list[str], again: bool = False
) -> tuple[Mapping[Split, Dataset], Measure, ModelConfig]:
    """The usable samples; a split without any is left out, and its errors are added to ``problems``."""
    data, model = read_data(flags.mm_data).value, read_model(flags.mm_model).value
    data = dataclasses.replace(data, overwrite_cache=again or data.overwrite_cache)
    measure = Measure.from_config(data, model, flags.seq_length)
    return datasets(data, problems, True, measure, flags.seed), measure, model


def _show(flags: ShowFlags) -> None:
    check_page(flags.html)
    problems: list[str] = []
    splits, measure, _ = _measured(flags, problems)
    dataset = splits.get(flags.split)
    if dataset is None:
        raise UserError(
            problems or f"--split is {flags.split}, but {flags.mm_data} has neither val_dataset nor val_rate")
    refuse([] if 0 <= flags.sample < len(dataset) else [
        f"--sample is {flags.sample}; there are {len(dataset)} samples for {flags.split}, counted from 0"])
    shown = Shown.of(dataset[flags.sample], measure.encoder)
    print(shown.text())
    if flags.html is not None:
        print("\n" + write_page(flags.html, shown.html()))


def _mock(flags: MockFlags) -> None:
    print(f"written: {write_mock(flags)}")


_WORDS = ("the", "a", "picture", "shows", "two", "red", "small", "house", "on", "green", "field", "and", "one", "old",
          "tree", "near", "water", "under", "open", "sky")  # fmt: skip
"""Each is one token of Qwen's tokenizer when preceded by a space."""


def write_mock(flags: MockFlags) -> Path:
    """Write ``data.jsonl`` and ``images/``; returns the path of the former.  Raises UserError if it already exists."""
    target = flags.output / "data.jsonl"
    refuse([f"{target} already exists; give another directory, or remove it"] if target.exists() else [])
    tokenizer = load_tokenizer(flags.tokenizer) if flags.tokenizer else None
    (flags.output / "images").mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(flags.seed)
    names = [f"images/{number:05}.jpg" for number in range(flags.num_pictures if flags.num_images else 0)]
    for name in Progress("drawing images", len(names), "images").each(names):
        coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        coarse.resize((flags.width, flags.height), Image.Resampling.BICUBIC).save(flags.output / name, quality=90)
    with open(target, "w", encoding="utf-8") as stream:
        for number in Progress("writing samples", flags.num_samples, "samples").each(range(flags.num_samples)):
            images = [names[(number * flags.num_images + at) % len(names)] for at in range(flags.num_images)]
            question = "<image>" * len(images) + f"Question {number}: what is there to be seen?"
            stream.write(json.dumps({"id": number, "images": images, "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": _text(flags.text_length, random, tokenizer)}]}) + "\n")
    return target


def _text(length: int, random: np.random.Generator, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Random words, cut to ``length``."""
    words = [_WORDS[index] for index in random.integers(0, len(_WORDS), length)]
    if tokenizer is None:
        return " ".join(words)
    while len(ids := tokenizer(" ".join(words), add_special_tokens=False)["input_ids"]) < length:
        words += words
    return str(tokenizer.decode(ids[:length]))


_COMMANDS: Mapping[type, Callable[[Any], None]] = {
    CheckFlags: _check, ShowFlags: _show, MockFlags: _mock}


def run(flags: DataFlags | MockFlags) -> None:
    """Run the command that the flags belong to; raises UserError for errors that the user can fix."""
    _COMMANDS[type(flags)](flags)
