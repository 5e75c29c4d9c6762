"""The files that contain the samples of a data JSON, opened and checked.

Training samples and those set aside by ``val_rate`` are in the same files, so opening files is separate from selecting
samples (``mm.data.index.dataset``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from mm.config.data import DataConfig
from mm.config.dataset_files import DatasetFile, training_files, validation_files
from mm.data.index.gauge import TOO_LONG, Gauge
from mm.data.index.index import Checker, Reader
from mm.data.index.indexed_file import IndexedFile, open_indexed
from mm.data.index.remarks import too_long_remark, unread_remark
from mm.data.order.selection import num_chosen
from mm.data.read.open_records import open_records
from mm.data.read.roots import MediaRoots
from mm.data.record_name import BadSample
from mm.errors import MAX_PROBLEMS, UserError, collected, counted
from mm.families.known import TITLES

Split = Literal["training", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)
_SKIP_HINT = " (--bad-sample skip leaves such samples out and lists them in a file.)"


@dataclass(frozen=True)
class SampleFiles:
    """Files with at least one good sample.  Pickles small into data workers, as ``IndexedFile`` does."""

    dataset_files: tuple[DatasetFile, ...]
    """The entry of each file in the data JSON; with a limit on samples there may be more entries than ``files``."""
    files: tuple[IndexedFile, ...]
    skipped: tuple[BadSample, ...]
    """Samples that were left out because they cannot be used."""
    notes: tuple[str, ...]
    """Where the index is kept, if not in its usual place, and oddities of good samples."""
    limit: tuple[int, bool] | None
    """``seq_length``, and whether whole turns are dropped from longer samples; None if nothing was measured."""

    @classmethod
    def open(cls, config: DataConfig, skips_bad: bool, gauge: Gauge | None, split: Split) -> "SampleFiles":
        """Check every record, unless the index has the result for the same content.  Arguments and UserErrors are
        those of ``Dataset``."""
        has_files = split == "validation" and config.val_dataset  # otherwise it is a share of the training files
        dataset_files = validation_files(config) if has_files else training_files(config)
        most = config.val_max_samples if has_files else config.max_samples
        opening, files = _Opening(config, skips_bad, gauge), []
        problems = opening.problems
        for dataset_file in dataset_files:
            left = None if most is None else most - sum(records.num_samples for records in files)
            if left == 0 or len(problems) >= MAX_PROBLEMS:
                break
            with collected(problems):
                records = opening.open(dataset_file, left if is_whole(dataset_file) else None)
                num_usable = records.index.num_usable
                count = num_usable if is_whole(dataset_file) else num_chosen(
                    num_usable, dataset_file.rate_percent, dataset_file.num_samples)
                records.num_samples = count if left is None else min(count, left)
                files.append(records)
        limit = gauge and (gauge.encoder.chat.seq_length, gauge.encoder.chat.drops_turns)
        found = cls(tuple(dataset_files), tuple(files), tuple(opening.skipped), tuple(opening.notes), limit)
        if not problems and not sum(records.num_samples for records in files):
            problems = [*(one.message() for one in found.skipped), *found.too_long()] or [
                f"{', '.join(one.entry for one in dataset_files)}: no samples are used; raise the rates (%)."]
        if problems:
            more = ["There may be more problems: 'mm-data check' counts all, and its --html PAGE lists them."]
            more *= len(problems) >= MAX_PROBLEMS
            raise UserError(problems[:MAX_PROBLEMS] + more)
        return found

    def too_long(self) -> Iterator[str]:
        """Notes about the records in which no turn fits."""
        for records in self.files:
            if self.limit is not None and records.index.num_too_long:
                rows = records.index.rows
                numbers = np.concatenate([first + np.flatnonzero(some["num_tokens"] == TOO_LONG)
                                          for first, some in rows.batches()])
                yield too_long_remark(numbers, rows.array["num_dropped_tokens"][numbers], self.limit[0], records.named)

    def without_problems(self) -> "SampleFiles":
        """The same for data workers, which need neither ``skipped`` nor ``notes``."""
        return replace(self, skipped=(), notes=())


class _Opening:
    """Opens the files of one split in order, and collects their problems and oddities."""

    def __init__(self, config: DataConfig, skips_bad: bool, gauge: Gauge | None) -> None:
        self._config, self._skips_bad, self._gauge = config, skips_bad, gauge
        self._gauge_key = gauge and gauge.fingerprint()
        self.problems: list[str] = []
        self.skipped: list[BadSample] = []
        self.notes: list[str] = []

    def open(self, dataset_file: DatasetFile, limit: int | None) -> IndexedFile:
        """Check one file, or load its index.  ``limit``: stop after this many good samples."""
        config, file = self._config, open_records(dataset_file.path)
        roots = MediaRoots(dataset_file.media_root, (config.dataset_dir, *(config.media_roots or ())))
        checker = Checker(Reader(file, dataset_file.attr, roots, self._gauge))
        most_bad = None if self._skips_bad else MAX_PROBLEMS
        records = open_indexed(checker, config, self._gauge_key, limit, most_bad, self.notes)
        index, records.entry = records.index, dataset_file.entry
        self.notes += file.remarks()
        if not len(index.rows) and not index.problems:
            self.problems.append(f"{dataset_file.path}: has no samples; expected a JSON list of objects, or one JSON "
                                 f"object per line.")
        found = [one.message(dataset_file.path) for one in index.bad]
        if self._skips_bad:
            self.skipped += [records.bad_sample(one.index, one.reason, one.line) for one in index.bad]
        elif found:
            if not any(_SKIP_HINT in problem for problem in self.problems):
                found[0] += _SKIP_HINT
            self.problems += found
        self.problems += index.problems
        if index.boxes_outside:
            self.notes.append(
                f"box or point coordinates outside the images as the model sees them in "
                f"{counted(len(index.boxes_outside), 'sample')}, the first is {records.named(index.boxes_outside[0])}; "
                f"{TITLES} uses pixels of the resized image")
        self.notes += (unread_remark(key, count, records.named(first))
                       for key, (count, first) in index.unread.items())
        return records


def is_whole(dataset_file: DatasetFile) -> bool:
    """Whether every sample of a file is used once."""
    return dataset_file.rate_percent == 100 and dataset_file.num_samples is None
