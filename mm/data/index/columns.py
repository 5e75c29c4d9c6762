"""The measurements of all samples of a dataset, column by column, from the indexes of its files.

Only requested data are loaded into memory, and it pickles as file paths.  So the planning process can take it without
the dataset's readers and encoders.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from mm.data.index.gauge import ROW
from mm.data.index.rows import BATCH_ROWS, MappedRows
from mm.data.lengths import Lengths


@dataclass(frozen=True)
class Columns:
    """The measurements of the samples of some files."""

    files: tuple[MappedRows, ...]
    """For each file, the columns of ``mm.data.index.gauge.ROW`` of all its records."""
    taken: MappedRows | None
    """The record of each sample, counted over all files.  None: each record once, in order."""

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.taken is None else len(self.taken)

    def of(self, numbers: np.ndarray) -> Lengths:
        """The lengths of these samples, in the given order, loaded into memory."""
        return Lengths(**{one.name: self.values(one.name, numbers) for one in fields(Lengths)})

    def values(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """One column for these samples, in the given order, loaded into memory."""
        records = self.records(numbers)
        if len(self.files) == 1:
            return self.files[0].array[name][records]
        files, found = self._files_of(records), np.empty(len(records), ROW[name])
        for file in np.unique(files).tolist():
            is_here = files == file
            found[is_here] = self.files[file].array[name][records[is_here] - self._first(file)]
        return found

    def nonzero(self, name: str) -> np.ndarray:
        """The numbers of the samples with a nonzero value in a column."""
        found = [np.empty(0, dtype=np.int64)]
        for numbers in self.batches():
            found.append(numbers[self.values(name, numbers) != 0])
        return np.concatenate(found)

    def batches(self) -> Iterator[np.ndarray]:
        """The numbers of all samples, in batches."""
        for first in range(0, len(self), BATCH_ROWS):
            yield np.arange(first, min(first + BATCH_ROWS, len(self)))

    def records(self, numbers: np.ndarray) -> np.ndarray:
        """int64: the records of these samples, counted over all files."""
        return numbers if self.taken is None else self.taken.array[numbers].astype(np.int64)

    def place(self, number: int) -> tuple[int, int]:
        """The file of a sample, and its record in that file.  Raises IndexError."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        record = number if self.taken is None else int(self.taken.array[number])
        file = int(self._files_of(np.array([record]))[0])
        return file, record - self._first(file)

    def by_file(self) -> Iterator[tuple[int, np.ndarray]]:
        """The records of all samples in order, in batches: a file, and record numbers in it."""
        for numbers in self.batches():
            records = self.records(numbers)
            files = self._files_of(records)
            for file in np.unique(files).tolist():
                yield file, records[files == file] - self._first(file)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(rows) for rows in self.files])

    def _first(self, file: int) -> int:
        return int(self._ends[file]) - len(self.files[file])

    def _files_of(self, records: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._ends, records, side="right")
