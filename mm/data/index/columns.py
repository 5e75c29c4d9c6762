"""The measurements of all samples of a dataset, column by column, from the indexes of its files.

Only requested data are loaded into memory, and it pickles as file paths.  So the planning process can take it without
the dataset's readers and encoders.
"""

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from mm.data.index.gauge import ROW
from mm.data.index.store import Rows
from mm.data.lengths import Lengths


@dataclass(frozen=True)
class Columns:
    """The measurements of the samples of some files."""

    files: tuple[Rows, ...]
    """For each file, the columns of ``mm.data.index.gauge.ROW`` of all its records."""
    taken: Rows
    """uint32: the record of each sample, counted over all files."""

    def __len__(self) -> int:
        return len(self.taken)

    def of(self, numbers: np.ndarray) -> Lengths:
        """The lengths of these samples, in the given order, loaded into memory."""
        return Lengths(**{one.name: self.values(one.name, numbers) for one in fields(Lengths)})

    def values(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """One column for these samples, in the given order, loaded into memory."""
        files, records = self.places(numbers)
        found = np.empty(len(records), ROW[name])
        for file in np.unique(files).tolist():
            is_here = files == file
            found[is_here] = self.files[file].array[name][records[is_here]]
        return found

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The file of each of these samples, and its record in that file; int64."""
        records = self.taken.array[numbers].astype(np.int64)
        files = np.searchsorted(self._ends, records, side="right")
        return files, records - np.concatenate([[0], self._ends])[files]

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(rows) for rows in self.files])
