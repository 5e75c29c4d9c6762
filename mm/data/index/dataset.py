"""The samples of a data JSON, selected from files that were checked before training, and read one at a time.

Every record is checked, and with a ``Gauge`` measured, once per content of its file; ``mm.data.index.store`` keeps the
result.  So a bad sample stops the run before it starts instead of at step 5000, and the next start takes seconds.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from mm.batch import Microbatch
from mm.config.data import DataConfig
from mm.data.index.fingerprint import Contents
from mm.data.index.measure import BAD, Gauge
from mm.data.index.sample_files import NUM_NAMED, IndexedFile, Split, first_of, open_files
from mm.data.index.store import NUMBER, Columns, Rows, Store
from mm.data.lengths import Lengths
from mm.data.records.record_name import BadSample
from mm.data.sample import Sample
from mm.data.sampler.selection import chosen, split_off
from mm.errors import UserError, collected

_BATCH = 1 << 20
"""Samples whose places are in memory at a time."""


class Dataset:
    """The samples of ``config.dataset`` in file order, or those set aside for validation.

    The positions and lengths of samples are not in memory but mapped from the index, so all processes of a node share
    them.  Pickles small into data workers.  ``config.max_samples`` limits the dataset to its first samples, over all
    files.
    """

    def __init__(
        self, config: DataConfig, skips_bad: bool = False, gauge: Gauge | None = None, seed: int = 0,
        split: Split = "training",
    ) -> None:
        """Check every sample, unless the index has the result for the same content; of media only headers are read.

        Without ``gauge`` nothing is measured, no index is kept, and media are only checked for existence.  ``seed``
        determines the samples drawn by a rate and those for validation.

        Raises UserError with up to 20 problems, each naming file, line and sample.  With ``skips_bad``, samples that
        cannot be used are left out; only an unreadable file, or a dataset without any good sample, is an error.
        Samples in which no turn fits ``--seq-length`` are always left out, and counted.
        """
        self._config, self._gauge, self._store = config, gauge, Store.of(config)
        self.files, self.skipped = open_files(config, self._store, skips_bad, gauge, split)
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
        limit = self._gauge and self._gauge.encoder.chat.seq_length
        found = list(dict.fromkeys(self._store.notes))
        found += [note for file in self.files for note in file.notes(limit)]
        if limit is not None:
            dropped = self.column("num_dropped_tokens")
            if len(numbers := np.flatnonzero(dropped)):
                longest = (dropped[numbers] + self.column("num_tokens")[numbers]).max()
                found.append(
                    f"{len(numbers)} of {len(self)} samples are longer than --seq-length {limit} and lose "
                    f"{dropped.sum(dtype=np.int64)} tokens in total; the longest has {longest}: raise --seq-length to "
                    f"keep more.  {first_of(map(self._named, numbers[:NUM_NAMED].tolist()))}")
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
        """Number of samples left out because no turn fits."""
        return sum(len(file.too_long()) for file in self.files)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``.  Raises UserError when its file has changed since the check."""
        file, number = self._place(index)
        return file.sample(number)

    def _named(self, index: int) -> str:
        file, number = self._place(index)
        return file.named(number)

    def refuse_changed(self, index: int, encoded: Microbatch) -> None:
        """Raises UserError if sample ``index``, now ``encoded``, has other lengths than the check has measured."""
        file, number = self._place(index)
        row = file.index.rows.array[number]
        if self._gauge is not None and (row["num_tokens"], row["num_patches"]) != (
                encoded.num_tokens, encoded.num_patches):
            raise UserError(f"{file.where(number)}: an image or video of it has changed since it was measured; run "
                            f"'mm-data check --again', and start again.")

    def bad_sample(self, index: int, error: UserError) -> BadSample:
        """The entry for sample ``index``, which cannot be used because of ``error``, in the list of bad samples.

        Raises UserError when its file has changed since the check.
        """
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
        assert self._gauge is not None, "nothing was measured"
        return self._columns

    @cached_property
    def lengths(self) -> Lengths:
        """The lengths of all samples, in memory; a run uses ``columns`` instead."""
        return self.columns.of(np.arange(len(self)))

    def column(self, name: str) -> np.ndarray:
        """The column ``name`` of ``mm.data.index.measure.ROW`` for all samples, in memory; they must be measured."""
        return self.columns.values(name, np.arange(len(self)))

    def contents(self) -> tuple[Contents, ...]:
        """Which samples of which files are used.  Raises UserError when a file can no longer be read."""
        counts, hashes = [0] * len(self.files), [hashlib.sha256() for _ in self.files]
        for first in range(0, len(self), _BATCH):
            places, records = self._columns.places(np.arange(first, min(first + _BATCH, len(self))))
            for file in np.unique(places).tolist():
                numbers = records[places == file]
                counts[file] += len(numbers)
                hashes[file].update(numbers.astype("<i8").tobytes())
        return tuple(Contents(file.source.entry, file.content, count, found.hexdigest())
                     for file, count, found in zip(self.files, counts, hashes, strict=True))


def datasets(
    config: DataConfig, problems: list[str], skips_bad: bool = False, gauge: Gauge | None = None, seed: int = 0,
    with_validation: bool = True,
) -> Mapping[Split, Dataset]:
    """The training samples, and with ``with_validation`` the validation samples if there are any.

    A split that cannot be opened is left out, and its errors are added to ``problems``, so that the errors of all
    splits are reported together.
    """
    found: dict[Split, Dataset] = {}
    with collected(problems):
        found["training"] = Dataset(config, skips_bad, gauge, seed)
    if not with_validation or not config.has_validation:
        return found
    # With val_rate both splits are in the same files, whose index has just been created.
    again = config.overwrite_cache and config.val_dataset is not None
    wrong: list[str] = []
    with collected(wrong):
        found["validation"] = Dataset(replace(config, overwrite_cache=again), skips_bad, gauge, seed, "validation")
    problems += [one for one in wrong if one not in problems]
    return found


def notes_of(splits: Mapping[Split, Dataset]) -> list[str]:
    """The notes of all splits without duplicates; those of the validation samples alone are marked."""
    found = dict.fromkeys(note for dataset in [*splits.values()][:1] for note in dataset.notes)
    for name, dataset in [*splits.items()][1:]:
        found |= dict.fromkeys(f"{name}: {note}" for note in dataset.notes if note not in found)
    return list(found)
