"""The samples of a data JSON, selected from files that were checked before training, and read one at a time.

Every record is checked, and with a ``Gauge`` measured, once per content of its file; ``mm.data.index.store`` caches the
result.  So a bad sample stops the run before it starts instead of at step 5000, and the next start takes seconds.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from mm.config.data import DataConfig
from mm.config.dataset_files import DatasetFile
from mm.data.index.columns import Columns
from mm.data.index.contents import Contents
from mm.data.index.gauge import Gauge
from mm.data.index.indexed_file import IndexedFile, store_of
from mm.data.index.remarks import length_remarks
from mm.data.index.rows import MappedRows
from mm.data.index.sample_files import SampleFiles, Split, is_whole
from mm.data.lengths import Lengths
from mm.data.order.selection import chosen, split_off
from mm.data.record_name import BadSample
from mm.data.sample import Sample
from mm.errors import UserError, collected, counted, printable

_NUMBER = np.uint32
"""Numbers a record over all files: up to 4,294,967,295, more than any realistic index."""


class Dataset:
    """The samples of ``config.dataset`` in file order, or those set aside for validation.

    The positions and lengths of samples are not in memory but mapped from the index (``mm.data.index.rows``).  If not
    all samples are used, the selection is mapped from a second file.  So all processes of a node share them.  Pickles
    small into data workers.  ``config.max_samples`` limits the dataset to its first samples, over all files.
    """

    def __init__(
        self, config: DataConfig, skips_bad: bool = False, gauge: Gauge | None = None, seed: int = 0,
        split: Split = "training", files: SampleFiles | None = None,
    ) -> None:
        """Check every sample, unless the index has the result for the same content; of media only headers are read.

        Without ``gauge`` nothing is measured, no index is kept, and media are only checked for existence.  ``seed``
        determines the samples drawn by a rate and those for validation.  ``files`` are those of this split if they were
        opened before with the same settings; otherwise they are opened here.

        Raises UserError with up to 20 problems, each naming file, line and sample.  With ``skips_bad``, samples that
        cannot be used are left out; only an unreadable file, or a dataset without any good sample, is an error.
        Samples in which no turn fits ``--seq-length`` are always left out, and counted.
        """
        self._config = config
        self.files = files = files or SampleFiles.open(config, skips_bad, gauge, split)
        """The files that contain the samples."""
        self._store_notes: list[str] = []
        rate = 0.0 if config.val_dataset else config.val_rate or 0.0
        takes_all = all(is_whole(dataset_file) and records.num_samples == len(records.index.rows)
                        for records, dataset_file in zip(files.files, files.dataset_files, strict=False))
        taken = None if takes_all and not rate else self._chosen(files.dataset_files, rate, seed, split)
        self._columns = Columns(tuple(records.index.rows for records in self._files), taken)
        if not len(self):
            num_usable = sum(records.num_samples for records in files.files)
            raise UserError(f"val_rate = {config.val_rate} leaves no samples of {files.dataset_files[0].path} for "
                            f"{split}, of {counted(num_usable, 'usable sample')}; change it, or repair samples.")

    def _chosen(self, dataset_files: Sequence[DatasetFile], val_rate: float, seed: int, split: Split) -> MappedRows:
        """The selected records; with ``val_rate``, of this split."""
        config, most = self._config, self._config.val_max_samples

        def choose() -> np.ndarray:
            taken, first = np.empty(sum(records.num_samples for records in self._files), _NUMBER), 0
            done = 0
            for records, file in zip(self._files, dataset_files, strict=False):
                good = np.concatenate([np.empty(0, _NUMBER), *(one.astype(_NUMBER) for one in records.index.usable())])
                if not is_whole(file):
                    good = good[chosen(len(good), file.rate_percent, file.num_samples, seed, records.content)]
                taken[done : done + records.num_samples] = good[: records.num_samples]
                taken[done : done + records.num_samples] += first
                done += records.num_samples
                first += len(records.index.rows)
            if not val_rate:
                return taken
            training, validation = split_off(taken, val_rate, seed)
            return training if split == "training" else validation[:most]

        facts = [[records.identity, len(records.index.rows), records.num_samples, file.rate_percent, file.num_samples]
                 for records, file in zip(self._files, dataset_files, strict=False)]
        if any(records.identity is None for records in self._files):
            return MappedRows(choose())
        store = store_of(config, self._store_notes)
        return store.numbers([facts, seed, *([val_rate, split, most] if val_rate else [])], choose)

    @property
    def _files(self) -> tuple[IndexedFile, ...]:
        return self.files.files

    @property
    def skipped(self) -> tuple[BadSample, ...]:
        """Samples that were left out because they cannot be used; empty in data workers."""
        return self.files.skipped

    @cached_property
    def notes(self) -> list[str]:
        """Where the index is kept, if not in its usual place; oddities of good samples; what long samples lost."""
        return [*self.files.notes, *self._store_notes, *self.files.too_long(), *self._length_remarks()]

    @property
    def num_too_long(self) -> int:
        """Number of samples left out because no turn fits."""
        return sum(records.index.num_too_long for records in self._files)

    def _length_remarks(self) -> Iterator[str]:
        def named(index: int) -> str:
            records, number = self._place(index)
            return records.named(number)

        limit = self.files.limit
        return iter(()) if limit is None else length_remarks(self.columns, *limit, named)

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def num_records(self) -> int:
        """Records in all files, used or not."""
        return sum(len(records.index.rows) for records in self._files)

    @property
    def num_bad(self) -> int:
        """Records in all files that cannot be used."""
        return sum(records.index.num_bad for records in self._files)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``.  Raises UserError when its file has changed since the check."""
        records, number = self._place(index)
        return records.reader.read(number, records.index.rows.row(number))

    def name(self, index: int) -> str | int | None:
        """The ``id`` of a sample's record, or None."""
        records, number = self._place(index)
        return records.name(number)

    def bad_sample(self, index: int, error: UserError) -> BadSample:
        """The entry for sample ``index``, which cannot be used because of ``error``, in the list of bad samples."""
        records, number = self._place(index)
        where = printable(f"{records.reader.where(number)}: ")
        return records.bad_sample(number, error.problems[0].removeprefix(where))

    def _place(self, index: int) -> tuple[IndexedFile, int]:
        """The file of sample ``index``, and its number in that file."""
        file, number = self._columns.place(index)
        return self._files[file], number

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("lengths", "notes")}
        return state | {"files": self.files.without_problems()}

    @property
    def columns(self) -> Columns:
        """The measurements of all samples; they must have been measured."""
        assert self.files.limit is not None, "nothing was measured"
        return self._columns

    @cached_property
    def lengths(self) -> Lengths:
        """The lengths of all samples, in memory; a run uses ``columns`` instead."""
        return self.columns.of(np.arange(len(self)))

    def column(self, name: str) -> np.ndarray:
        """The column ``name`` of ``mm.data.index.gauge.ROW`` for all samples, in memory; they must be measured."""
        return self.columns.values(name, np.arange(len(self)))

    def contents(self) -> tuple[Contents, ...]:
        """Which samples of which files are used.  Raises UserError when a file can no longer be read."""
        counts, hashes = [0] * len(self._files), [hashlib.sha256() for _ in self._files]
        for file, numbers in self._columns.by_file():
            counts[file] += len(numbers)
            hashes[file].update(numbers.astype("<i8").tobytes())
        return tuple(
            Contents(records.entry, records.content, count, of.hexdigest())
            for records, count, of in zip(self._files, counts, hashes, strict=True))


def validation_dataset(
    config: DataConfig, skips_bad: bool = False, gauge: Gauge | None = None, seed: int = 0,
    training: Dataset | None = None,
) -> Dataset | None:
    """The samples of ``val_dataset``, or those set aside by ``val_rate``; None without either.

    ``training``: the training samples with the same settings.  With ``val_rate`` both splits are in the same files,
    which are not opened again.  Raises UserError as ``Dataset`` does.
    """
    if not config.has_validation:
        return None
    files = None if training is None or config.val_dataset else training.files
    return Dataset(config, skips_bad, gauge, seed, "validation", files)


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
    if not with_validation:
        return found
    # With val_rate both splits are in the same files, whose index has just been created.
    again = config.overwrite_cache and config.val_dataset is not None
    wrong: list[str] = []
    with collected(wrong):
        validation = validation_dataset(replace(config, overwrite_cache=again), skips_bad, gauge, seed,
                                        found.get("training"))
        if validation is not None:
            found["validation"] = validation
    problems += [one for one in wrong if one not in problems]
    return found


def notes_of(splits: Mapping[Split, Dataset]) -> list[str]:
    """The notes of all splits without duplicates; those of the validation samples alone are marked."""
    found = dict.fromkeys(note for dataset in [*splits.values()][:1] for note in dataset.notes)
    for name, dataset in [*splits.items()][1:]:
        found |= dict.fromkeys(f"{name}: {note}" for note in dataset.notes if note not in found)
    return list(found)
