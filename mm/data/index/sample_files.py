"""The files that contain the samples of a data JSON, each opened and checked once per content."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from mm.config.data import DataConfig
from mm.config.dataset_files import DatasetFile, training_files, validation_files
from mm.data.index.index import Checker, Reader, make_index, span_of, still_bad
from mm.data.index.measure import TOO_LONG, Gauge, is_usable
from mm.data.index.store import RecordIndex, Store, key_of
from mm.data.records.record_name import BadSample, name_of, record_place
from mm.data.records.records import open_records
from mm.data.records.roots import MediaRoots
from mm.data.sample import Sample
from mm.data.sampler.selection import num_chosen
from mm.errors import MAX_PROBLEMS, UserError, collected, counted, naming, printable

Split = Literal["training", "validation"]
_SKIP_HINT = " (--bad-sample skip leaves such samples out and lists them in a file.)"
NUM_NAMED = 3


@dataclass
class IndexedFile:
    """One file of a dataset with its index.  Pickles small into data workers."""

    source: DatasetFile
    reader: Reader
    index: RecordIndex
    file_sha256: str | None
    """If known."""
    num_samples: int = 0
    """Number of samples in use, including those set aside for validation."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"index": replace(self.index, bad=(), noted={})}

    @property
    def content(self) -> str:
        """SHA-256 of the file, which does not depend on where it is.  Raises UserError when it can no longer be read.
        """
        return self.file_sha256 or self.reader.file.content_hash()

    def usable(self) -> np.ndarray:
        """The numbers of the records that can be trained on."""
        return np.flatnonzero(is_usable(self.index.rows.array["num_tokens"]))

    def too_long(self) -> np.ndarray:
        """The numbers of the records in which no turn fits."""
        return np.flatnonzero(self.index.rows.array["num_tokens"] == TOO_LONG)

    def record(self, number: int) -> Any:
        """Record ``number``, which the check could read.  Raises UserError when the file has changed since."""
        return self.reader.file.read(span_of(self.index.rows.array[number]))

    def sample(self, number: int) -> Sample:
        """The sample of a good record.  Raises UserError as ``record`` does."""
        record = self.record(number)
        with naming(self.where(number)):
            return self.reader.sample(record, number)

    def bad_sample(self, number: int, reason: str) -> BadSample:
        """The entry of a record, found good by the check, in the list of bad samples.  Raises UserError as ``record``
        does."""
        record, sample = self.record(number), None
        with suppress(UserError):
            sample = self.reader.sample(record, number)
        where = printable(f"{self.where(number)}: ")
        return self.reader.bad_sample(number, self.index.rows.array[number], reason.removeprefix(where), record, sample)

    def where(self, number: int) -> str:
        """A record as ``Sample.where`` names it."""
        return record_place(self.reader.file.path, number)

    def named(self, number: int) -> str:
        """A record as notes name it."""
        return record_place(self.reader.file.path, number, name_of(self.record(number)))

    def notes(self, seq_length: int | None) -> Iterator[str]:
        """Oddities of good records, and those in which no turn fits; None: nothing was measured."""
        yield from self.reader.file.remarks()
        for what, (count, first) in self.index.noted.items():
            yield f"{counted(count, 'record')}, the first is {self.named(first)}: {what}"
        if seq_length is not None and len(numbers := self.too_long()):
            needed = self.index.rows.array["num_dropped_tokens"][numbers].max()
            yield (f"{counted(len(numbers), 'sample')} left out, because not even one question and answer of each fit "
                   f"in --seq-length {seq_length}: raise it to {needed}, use fewer or smaller images and videos "
                   f"(image_max_pixels), or shorten them.  {first_of(map(self.named, numbers.tolist()[:NUM_NAMED]))}")


def first_of(names: Iterator[str]) -> str:
    """The end of a note about samples."""
    return f"The first: {', '.join(names)}"


def open_files(
    config: DataConfig, store: Store, skips_bad: bool, gauge: Gauge | None, split: Split
) -> tuple[tuple[IndexedFile, ...], tuple[BadSample, ...]]:
    """The files with at least one good sample, and the samples that were left out because they cannot be used.

    Arguments and UserErrors are those of ``Dataset``.
    """
    has_files = split == "validation" and config.val_dataset  # otherwise it is a share of the training files
    sources = validation_files(config) if has_files else training_files(config)
    most = config.val_max_samples if has_files else config.max_samples
    files, skipped, problems = list[IndexedFile](), list[BadSample](), list[str]()
    for source in sources:
        left = None if most is None else most - sum(file.num_samples for file in files)
        if left == 0 or len(problems) >= MAX_PROBLEMS:
            break
        with collected(problems):
            file = _opened(source, config, store, skips_bad, gauge, left)
            files.append(file)
            if not len(file.index.rows) and not file.index.problems:
                problems.append(f"{source.path}: has no samples; expected a JSON list of objects, or one JSON object "
                                f"per line.")
            if skips_bad:
                skipped += file.index.bad
            elif found := [one.message() for one in file.index.bad]:
                problems += [found[0] + _SKIP_HINT * (not problems), *found[1:]]
            problems += file.index.problems
    if not problems and not sum(file.num_samples for file in files):
        notes = (note for file in files for note in file.notes(gauge and gauge.encoder.chat.seq_length))
        problems = [*(one.message() for one in skipped), *notes] or [
            f"{', '.join(one.entry for one in sources)}: no samples are used; raise the rates (%)."]
    if problems:
        more = ["There may be more problems: 'mm-data check' counts all, and its --html PAGE lists them."]
        raise UserError(problems[:MAX_PROBLEMS] + more * (len(problems) >= MAX_PROBLEMS))
    return tuple(files), tuple(skipped)


def _opened(
    source: DatasetFile, config: DataConfig, store: Store, skips_bad: bool, gauge: Gauge | None, left: int | None
) -> IndexedFile:
    """One file with its index.  ``left``: use at most this many samples."""
    roots = MediaRoots(source.media_root, (config.dataset_dir, *(config.media_roots or ())))
    reader = Reader(open_records(source.path), source.attr, roots, gauge)
    limit, most_bad = left if source.is_whole else None, None if skips_bad else MAX_PROBLEMS
    index, sha256 = _indexed(Checker(reader), config, store, limit, most_bad)
    file = IndexedFile(source, reader, index, sha256)
    count = num_chosen(len(file.usable()), source.rate_percent, source.num_samples)
    file.num_samples = count if left is None else min(count, left)
    return file


def _indexed(
    checker: Checker, config: DataConfig, store: Store, limit: int | None, most_bad: int | None
) -> tuple[RecordIndex, str | None]:
    """The index of a file and the file's checksum: from the store if it has them, otherwise checked now."""
    reader, path = checker.reader, checker.reader.file.path
    if reader.gauge is None:
        return make_index(checker, 1, limit, most_bad), None
    content = store.content_hash(reader.file)
    roots = [os.path.realpath(root) for root in reader.roots.all]
    key = key_of(content, asdict(reader.attr), roots, reader.gauge.fingerprint, limit)

    def kept() -> RecordIndex | None:
        found = None if config.overwrite_cache else store.load(key, path)
        return found if found is not None and still_bad(found, checker) else None

    if (index := kept()) is not None:
        return index, content
    with store.making(key, f"the index of {path}"):
        if (index := kept()) is not None:
            return index, content
        index = make_index(checker, config.preprocessing_num_workers or len(os.sched_getaffinity(0)), limit, most_bad)
        if index.problems or not len(index.rows) or (most_bad is not None and len(index.bad) >= most_bad):
            return index, content  # an error: the caller reports it
        store.save(key, index)
    return store.load(key, path) or index, content
