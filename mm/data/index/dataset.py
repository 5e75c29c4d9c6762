"""The samples of a data JSON, selected from files that were checked before training, and read one at a time.

Every record is checked and measured once per content of its file, and ``mm.data.index.index`` keeps the result: a bad
sample stops the run before it starts, and the next start takes seconds.  ``TrainedOn`` records in checkpoints which
samples a run used, and finds what has changed at a resume.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mm.batch import Microbatch
from mm.checkpoint.manifest import validated
from mm.config.data import DataConfig, DatasetFile, dataset_files
from mm.data.index.index import (
    BAD,
    NUMBER,
    TOO_LONG,
    Checker,
    Columns,
    Measure,
    Reader,
    RecordIndex,
    Rows,
    Store,
    is_usable,
    key_of,
    make_index,
    span_of,
    still_bad,
)
from mm.data.records.records import open_records
from mm.data.records.roots import MediaRoots
from mm.data.sample import BadSample, Lengths, Sample, name_of, record_place
from mm.data.sampler.sampler import chosen, num_chosen, split_off
from mm.errors import MAX_PROBLEMS, UserError, collected, counted, naming, printable
from mm.lock import making


@dataclass(frozen=True)
class Fingerprint:
    """The samples of one dataset."""

    dataset: str
    """Its name in the data JSON."""
    file_sha256: str
    num_samples: int
    """Number of samples in use."""
    samples_sha256: str
    """SHA-256 of the samples' int64 numbers in the file, in order of use."""

    @property
    def identity(self) -> tuple[str, str]:
        """What must not change; the name may."""
        return self.file_sha256, self.samples_sha256


@dataclass(frozen=True)
class TrainedOn:
    """The data of a run."""

    datasets: tuple[Fingerprint, ...]
    began_at: int = 0
    """Samples that the run consumed before it switched to these data or this order."""
    order: str | None = None
    """A description of the sample order; None in checkpoints of older versions."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any], folder: Path) -> "TrainedOn":
        """The inverse of ``to_json``, from the manifest in ``folder``; raises UserError for other content."""
        return validated(cls, content, folder, "data")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def followed_by(
        self, now: Sequence[Fingerprint], order: str, consumed_samples: int, may_differ: bool
    ) -> "TrainedOn":
        """The data of a run that resumes with the datasets ``now`` in this ``order``.

        Changed data or a changed order start at the first sample.  Raises UserError for changes unless they
        ``may_differ``.
        """
        changes = self.changes(now, order)
        if not changes:
            return replace(self, order=order)
        if not may_differ:
            raise UserError(
                f"the data differ from those of the checkpoint: {'; '.join(changes)}.  This changes the order of the "
                f"samples, so it is unknown which were trained on: give the same data and --seed; or add "
                f"--allow-new-data, which continues with the new data from their first sample; or --finetune, which "
                f"starts at step 0.")
        return TrainedOn(tuple(now), consumed_samples, order)

    def changes(self, now: Sequence[Fingerprint], order: str) -> list[str]:
        """How the datasets ``now`` in this ``order`` differ, one sentence per difference."""
        other = [] if self.order in (None, order) else [f"the samples were {self.order}, and are now {order}"]
        return [*changed(self.datasets, now), *other]


def changed(then: Sequence[Fingerprint], now: Sequence[Fingerprint]) -> list[str]:
    """The differences, one sentence per dataset.  Files that were only moved or renamed count as unchanged."""
    before, after = ([one.identity for one in datasets] for datasets in (then, now))
    if before == after:
        return []
    gone = [one for one in then if one.identity not in after]
    found: list[str] = []
    for one in now:
        if one.identity in before:
            continue
        same_file = next((other for other in gone if other.file_sha256 == one.file_sha256), None)
        same_name = next((other for other in gone if other.dataset == one.dataset), None)
        if (other := same_file or same_name) is None:
            found.append(f"{one.dataset} with {counted(one.num_samples, 'sample')} is new")
            continue
        gone.remove(other)
        numbers = f"({other.num_samples} then, {one.num_samples} now)"
        found.append(f"{other.dataset} has changed {numbers}" if same_file is None else
                     f"other samples of {other.dataset} are used {numbers}, because of a rate (%), max_samples, "
                     f"val_rate, --seed, --seq-length, or repaired samples")
    found += [f"{one.dataset} with {counted(one.num_samples, 'sample')} is missing" for one in gone]
    names = (", ".join(one.dataset for one in datasets) for datasets in (then, now))
    return found or ["the datasets were {}, and are now {}".format(*names)]


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
    """None if nothing was measured; see ``content``."""
    num_samples: int = 0
    """Number of samples in use, including those set aside for validation."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"index": replace(self.index, bad=(), noted={})}

    @property
    def content(self) -> str:
        """SHA-256 of the file.  Raises UserError when it can no longer be read."""
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
        """A record that the check found good.  Raises UserError as ``record`` does."""
        record, sample = self.record(number), None
        with suppress(UserError):
            sample = self.reader.sample(record, number)
        where = printable(f"{self.where(number)}: ")
        return self.reader.bad_sample(number, self.index.rows.array[number], reason.removeprefix(where), record, sample)

    def where(self, number: int) -> str:
        """A record as ``Sample.where`` names it."""
        return record_place(self.reader.file.path, number)

    def named(self, number: int) -> str:
        """The same with its id."""
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
    config: DataConfig, store: Store, skips_bad: bool, measure: Measure | None, split: Split
) -> tuple[tuple[IndexedFile, ...], tuple[BadSample, ...]]:
    """The files with at least one good sample, and the samples that were left out because they cannot be used.

    Arguments and UserErrors are those of ``Dataset``.
    """
    has_files = split == "validation" and config.val_dataset  # otherwise it is a share of the training files
    sources = dataset_files(config, "val_dataset" if has_files else "dataset")
    most = config.val_max_samples if has_files else config.max_samples
    files, skipped, problems = list[IndexedFile](), list[BadSample](), list[str]()
    for source in sources:
        left = None if most is None else most - sum(file.num_samples for file in files)
        if left == 0 or len(problems) >= MAX_PROBLEMS:
            break
        with collected(problems):
            file = _opened(source, config, store, skips_bad, measure, left)
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
        notes = (note for file in files for note in file.notes(measure and measure.encoder.chat.seq_length))
        problems = [*(one.message() for one in skipped), *notes] or [
            f"{', '.join(one.entry for one in sources)}: no samples are used; raise the rates (%)."]
    if problems:
        more = ["There may be more problems: 'mm-data check' counts all, and its --html PAGE lists them."]
        raise UserError(problems[:MAX_PROBLEMS] + more * (len(problems) >= MAX_PROBLEMS))
    return tuple(files), tuple(skipped)


def _opened(
    source: DatasetFile, config: DataConfig, store: Store, skips_bad: bool, measure: Measure | None, left: int | None
) -> IndexedFile:
    """One file with its index.  ``left``: use at most this many samples."""
    roots = MediaRoots(source.media_root, (config.dataset_dir, *(config.media_roots or ())))
    reader = Reader(open_records(source.path), source.attr, roots, measure)
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
    if reader.measure is None:
        return make_index(checker, 1, limit, most_bad), None
    content = store.content_hash(reader.file)
    roots = [os.path.realpath(root) for root in reader.roots.all]
    key = key_of(content, asdict(reader.attr), roots, reader.measure.fingerprint, limit)

    def kept() -> RecordIndex | None:
        found = None if config.overwrite_cache else store.load(key, path)
        return found if found is not None and still_bad(found, checker) else None

    if (index := kept()) is not None:
        return index, content
    with making(store.folder / f"{key}.lock", f"the index of {path}"):  # others wait, and look again
        if (index := kept()) is not None:
            return index, content
        index = make_index(checker, config.preprocessing_num_workers or len(os.sched_getaffinity(0)), limit, most_bad)
        if index.problems or not len(index.rows) or (most_bad is not None and len(index.bad) >= most_bad):
            return index, content  # an error: the caller reports it
        store.save(key, index)
    return store.load(key, path) or index, content


_BATCH = 1 << 20
"""Samples whose places are in memory at a time."""


class Dataset:
    """The samples of ``config.dataset`` in file order, or those set aside for validation.

    Positions and lengths are mapped from the index, so all processes of a node share them, and it pickles small into
    data workers.
    """

    def __init__(
        self, config: DataConfig, skips_bad: bool = False, measure: Measure | None = None, seed: int = 0,
        split: Split = "training",
    ) -> None:
        """Check every sample, unless the index has the result for the same content; of media only headers are read.

        Without ``measure`` nothing is measured, no index is kept, and media are only checked for existence.  ``seed``
        determines the samples drawn by a rate and those for validation.

        Raises UserError with up to 20 problems, each naming file, line and sample.  With ``skips_bad``, samples that
        cannot be used are left out; only an unreadable file, or a dataset without any good sample, is an error.
        Samples in which no turn fits ``--seq-length`` are always left out, and counted.
        """
        self._config, self._measure, self._store = config, measure, Store.of(config)
        self.files, self.skipped = open_files(config, self._store, skips_bad, measure, split)
        """Samples that were left out because they cannot be used; empty in data workers."""
        self._columns = Columns(tuple(file.index.rows for file in self.files), self._chosen(seed, split))
        if not len(self):
            raise UserError(f"val_rate = {config.val_rate} leaves no samples of {self.files[0].source.path} for "
                            f"{split}; change it, or repair samples.")

    def _chosen(self, seed: int, split: Split) -> Rows:
        """The selected records; with ``val_rate``, of this split."""
        config = self._config
        val_rate = 0.0 if config.val_dataset else config.val_rate or 0.0

        def choose() -> np.ndarray:
            found, first = list[np.ndarray](), 0
            for file in self.files:
                good, source = file.usable().astype(NUMBER), file.source
                if not source.is_whole:
                    good = good[chosen(len(good), source.rate_percent, source.num_samples, seed, file.content)]
                found.append(good[: file.num_samples] + NUMBER.type(first))
                first += len(file.index.rows)
            taken = np.concatenate(found)
            if not val_rate:
                return taken
            training, validation = split_off(taken, val_rate, seed)
            return training if split == "training" else validation[: config.val_max_samples]

        if not all(file.index.identity for file in self.files):
            return Rows(choose())
        facts = [[file.index.identity, file.num_samples, file.source.rate_percent, file.source.num_samples]
                 for file in self.files]
        return self._store.numbers([facts, seed, val_rate, split, config.val_max_samples], choose)

    @cached_property
    def notes(self) -> list[str]:
        """Damaged files of the index; oddities of good samples; what long samples lost."""
        limit = self._measure and self._measure.encoder.chat.seq_length
        found = list(dict.fromkeys(self._store.notes))
        found += [note for file in self.files for note in file.notes(limit)]
        if limit is not None:
            dropped = self.column("num_dropped_tokens")
            if len(numbers := np.flatnonzero(dropped)):
                longest = (dropped[numbers] + self.column("num_tokens")[numbers]).max()
                first = numbers[:NUM_NAMED].tolist()
                found.append(
                    f"{len(numbers)} of {len(self)} samples are longer than --seq-length {limit} and lose "
                    f"{dropped.sum(dtype=np.int64)} tokens in total; the longest has {longest}: raise --seq-length to "
                    f"keep more.  {first_of(file.named(number) for file, number in map(self._place, first))}")
        return found

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def num_records(self) -> int:
        """Records in all files, used or not."""
        return sum(len(file.index.rows) for file in self.files)

    @property
    def num_bad(self) -> int:
        """Records in all files that cannot be used."""
        return sum(int(np.count_nonzero(file.index.rows.array["num_tokens"] == BAD)) for file in self.files)

    @property
    def num_too_long(self) -> int:
        """Samples left out because no turn fits."""
        return sum(len(file.too_long()) for file in self.files)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``.  Raises UserError when its file has changed since the check."""
        file, number = self._place(index)
        return file.sample(number)

    def refuse_changed(self, index: int, encoded: Microbatch) -> None:
        """Raises UserError if sample ``index``, now ``encoded``, has other lengths than the check has measured."""
        file, number = self._place(index)
        row = file.index.rows.array[number]
        if self._measure is not None and (row["num_tokens"], row["num_patches"]) != (
                encoded.num_tokens, encoded.num_patches):
            raise UserError(f"{file.where(number)}: an image or video of it has changed since it was measured; run "
                            f"'mm-data check --again', and start again.")

    def bad_sample(self, index: int, error: UserError) -> BadSample:
        """The entry of sample ``index`` in the list of bad samples.  Raises UserError when its file has changed."""
        file, number = self._place(index)
        return file.bad_sample(number, error.problems[0])

    def _place(self, index: int) -> tuple[IndexedFile, int]:
        """The file of sample ``index``, and its number in that file.  Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        file, number = (int(one[0]) for one in self._columns.places(np.array([index])))
        return self.files[file], number

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("lengths", "notes")} | {
            "skipped": ()}

    @property
    def columns(self) -> Columns:
        """The measurements of all samples; they must have been measured."""
        assert self._measure is not None, "nothing was measured"
        return self._columns

    @cached_property
    def lengths(self) -> Lengths:
        """The lengths of all samples, in memory; a run uses ``columns`` instead."""
        return self.columns.of(np.arange(len(self)))

    def column(self, name: str) -> np.ndarray:
        """The column ``name`` of ``mm.data.index.index.ROW`` for all samples, in memory; they must be measured."""
        return self.columns.values(name, np.arange(len(self)))

    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """Which samples of which files are used.  Raises UserError when a file can no longer be read."""
        counts, hashes = [0] * len(self.files), [hashlib.sha256() for _ in self.files]
        for first in range(0, len(self), _BATCH):
            places, records = self._columns.places(np.arange(first, min(first + _BATCH, len(self))))
            for file in np.unique(places).tolist():
                numbers = records[places == file]
                counts[file] += len(numbers)
                hashes[file].update(numbers.astype("<i8").tobytes())
        return tuple(Fingerprint(file.source.entry, file.content, count, found.hexdigest())
                     for file, count, found in zip(self.files, counts, hashes, strict=True))


def datasets(
    config: DataConfig, problems: list[str], skips_bad: bool = False, measure: Measure | None = None, seed: int = 0,
    with_validation: bool = True,
) -> Mapping[Split, Dataset]:
    """The training samples, and with ``with_validation`` the validation samples if there are any.

    A split that cannot be opened is left out, and its errors are added to ``problems``.
    """
    found: dict[Split, Dataset] = {}
    with collected(problems):
        found["training"] = Dataset(config, skips_bad, measure, seed)
    if not with_validation or not config.has_validation:
        return found
    # With val_rate both splits are in the same files, whose index has just been created.
    again = config.overwrite_cache and config.val_dataset is not None
    wrong: list[str] = []
    with collected(wrong):
        found["validation"] = Dataset(replace(config, overwrite_cache=again), skips_bad, measure, seed, "validation")
    problems += [one for one in wrong if one not in problems]
    return found


def notes_of(splits: Mapping[Split, Dataset]) -> list[str]:
    """The notes of all splits without duplicates, each with the name of its split unless that is the first."""
    found = dict.fromkeys(note for dataset in [*splits.values()][:1] for note in dataset.notes)
    for name, dataset in [*splits.items()][1:]:
        found |= dict.fromkeys(f"{name}: {note}" for note in dataset.notes if note not in found)
    return list(found)
