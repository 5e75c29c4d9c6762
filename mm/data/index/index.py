"""The index of one file, from checking and measuring every record once: its position and lengths, or why it is bad.

The check reads a file block by block in several processes.  ``mm.data.index.store`` caches the result.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mm.batch import Grid
from mm.config.data import Attributes
from mm.data.encode.chat import TooLongError
from mm.data.index.gauge import (
    BAD,
    ROW,
    TOO_LONG,
    Gauge,
    has_boxes_outside,
    is_usable,
    media_stamps,
    sample_lengths,
)
from mm.data.index.rows import MappedRows
from mm.data.media.video import VideoConstantsError
from mm.data.read.formats import read_sample, unread_keys
from mm.data.read.records import Raw, RecordBlock, RecordFile
from mm.data.read.roots import KnownMedia, MediaRoots
from mm.data.record_name import name_of, record_place, record_problem
from mm.data.sample import Media, Sample
from mm.data.workers import in_processes
from mm.errors import MAX_PROBLEMS, UserError, naming
from mm.progress import Progress

_MAX_KNOWN = 100_000
"""Number of media whose grids are cached while a file is checked."""


Unread = dict[str, tuple[int, int]]
"""Keys that nothing reads: how many records have each, and the first of them.  "": all others, if there are many."""


@dataclass(frozen=True)
class Bad:
    """A record that cannot be used."""

    index: int
    """In the file, counted from 0."""
    line: int
    """0 for Parquet."""
    place: str
    """``Raw.place``."""
    has_media: bool
    """Whether media files were looked up; these can change without the record."""
    reason: str
    name: str | int | None = None
    """The record's ``id``."""

    def message(self, path: str) -> str:
        """``path`` is the current path of the file, which may have been moved since the check."""
        return f"{path}{self.place}: {record_problem(self.index, self.name, self.reason)}"


@dataclass(frozen=True)
class RecordIndex:
    """The records of one file, in file order."""

    rows: MappedRows
    """The columns of ``ROW``."""
    bad: tuple[Bad, ...]
    problems: tuple[str, ...] = ()
    """Why the file could not be read to the end."""
    boxes_outside: tuple[int, ...] = ()
    """Records whose answers contain coordinates outside their images."""
    unread: Unread = field(default_factory=dict)
    """Keys that nothing reads, in the good records."""

    def first_usable(self, num_good: int | None) -> "RecordIndex":
        """The first records, up to ``num_good`` usable ones; None: all."""
        if num_good is None or self.num_usable <= num_good:
            return self
        end, left = 0, num_good
        for usable in self.usable():
            if left <= len(usable):
                end = int(usable[left - 1]) + 1 if left else end
                break
            left -= len(usable)
        return RecordIndex(self.rows.first(end), tuple(one for one in self.bad if one.index < end), (),
                     tuple(one for one in self.boxes_outside if one < end),
                     {key: place for key, place in self.unread.items() if place[1] < end})

    def usable(self) -> Iterator[np.ndarray]:
        """The numbers of the records that can be trained on, in batches."""
        for first, rows in self.rows.batches():
            yield first + np.flatnonzero(is_usable(rows["num_tokens"]))

    @cached_property
    def num_usable(self) -> int:
        """Number of records that can be trained on."""
        return sum(int(np.count_nonzero(is_usable(rows["num_tokens"]))) for _, rows in self.rows.batches())

    @cached_property
    def num_bad(self) -> int:
        """Number of records that cannot be used."""
        return self._count(BAD)

    @cached_property
    def num_too_long(self) -> int:
        """Number of records in which no turn fits."""
        return self._count(TOO_LONG)

    def _count(self, num_tokens: int) -> int:
        return sum(int(np.count_nonzero(rows["num_tokens"] == num_tokens)) for _, rows in self.rows.batches())


def _add_unread(found: Unread, key: str, count: int, first: int) -> None:
    key = key if key in found or len(found) < MAX_PROBLEMS else ""
    before, earliest = found.get(key, (0, first))
    found[key] = before + count, min(earliest, first)


@dataclass(frozen=True)
class _CheckedBlock:
    """The result for one block: its rows and bad records, or why it could not be read."""

    rows: np.ndarray
    bad: list[Bad]
    boxes_outside: list[int]
    unread: Unread
    error: UserError | None = None


class Reader:
    """Turns the records of one file into samples.  With a ``gauge`` it detects changes since they were measured."""

    def __init__(self, file: RecordFile, attr: Attributes, roots: MediaRoots, gauge: Gauge | None = None) -> None:
        self.file, self.attr, self.roots, self.gauge = file, attr, roots, gauge

    def where(self, number: int) -> str:
        """How messages name record ``number``."""
        return record_place(self.file.path, number)

    def read(self, number: int, row: Mapping[str, int]) -> Sample:
        """Record ``number``, which was found good.  Raises UserError when its file or media have changed."""
        where = self.where(number)
        record = self.file.read((row["start"], row["end"]))
        with naming(where):
            sample = read_sample(record, self.attr, self.roots, where)
            if self.gauge is not None and row["num_tokens"] > 0 and _has_changed(self.gauge, sample, row):
                paths = ", ".join(str(item.path) for item in sample.media)
                raise UserError(f"an image or video of it has changed since it was measured ({paths}); run "
                                f"'mm-data index --again', and start again.")
        return sample


def _has_changed(gauge: Gauge, sample: Sample, row: Mapping[str, int]) -> bool:
    """Whether the media differ from those that were measured.

    A changed file size is a change.  A changed modification time alone is not: copying a dataset changes it.  In that
    case the sample is measured again from the headers of its media, and only different results count as a change.
    """
    stamps = media_stamps(sample)
    if stamps["media_sizes_crc32"] != row["media_sizes_crc32"]:
        return True
    if stamps["media_times_crc32"] == row["media_times_crc32"]:
        return False
    columns, _ = sample_lengths(gauge, sample, {})
    return any(row[name] != value for name, value in columns.items())


@dataclass
class Checker:
    """Checks blocks of one file; nothing is measured if its reader has no ``gauge``.  Pickles into workers."""

    reader: Reader
    _media: KnownMedia = field(init=False)
    _grids: dict[Media, Grid] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._media = KnownMedia(self.reader.roots)

    def __call__(self, block: RecordBlock) -> _CheckedBlock:
        rows, bad, boxes = np.zeros(len(block.spans), ROW), [], []
        unread: Unread = {}
        try:
            for row, raw in zip(rows, self.reader.file.read_block(block), strict=True):
                row["start"], row["end"] = raw.span
                lookups_before = self._media.num_lookups
                try:
                    if self._measure(raw, row, unread):
                        boxes.append(raw.index)
                except TooLongError as error:
                    row["num_tokens"], row["num_dropped_tokens"] = TOO_LONG, error.num_tokens
                except VideoConstantsError:  # a fault of the checkpoint, which affects all videos
                    raise
                except UserError as error:
                    row["num_tokens"] = BAD
                    has_media = self._media.num_lookups > lookups_before
                    bad += [Bad(raw.index, raw.line, raw.place, has_media, problem, name_of(raw.value))
                            for problem in error.problems]
        except UserError as error:  # about the whole file; returned, because raising would bury it in a traceback
            return _CheckedBlock(rows, bad, boxes, unread, error)
        return _CheckedBlock(rows, bad, boxes, unread)

    def _measure(self, raw: Raw, row: np.void, unread: Unread) -> bool:
        """Fill in the row of one record, and add its keys that nothing reads to ``unread``.

        Returns whether its answers contain coordinates outside its images.
        """
        if raw.problem is not None:
            raise UserError(raw.problem)
        reader, gauge = self.reader, self.reader.gauge
        sample = read_sample(raw.value, reader.attr, self._media, reader.where(raw.index))
        for key in unread_keys(raw.value, reader.attr):
            _add_unread(unread, key, 1, raw.index)
        if gauge is None:
            return False
        if len(self._grids) > _MAX_KNOWN:
            self._grids.clear()
        columns, grids = sample_lengths(gauge, sample, self._grids)
        columns |= media_stamps(sample)
        for name, value in columns.items():
            row[name] = value
        return has_boxes_outside(sample, grids, gauge.encoder.images.patch_size)


def make_index(
    checker: Checker, num_processes: int, num_good: int | None = None, most_bad: int | None = None,
    folder: str | None = None,
) -> RecordIndex:
    """Check a file in ``num_processes`` processes, up to ``num_good`` good or ``most_bad`` bad records (None: all).

    Its rows are written to an unnamed file in ``folder`` (None: the system's folder for temporary files), so they take
    no memory in this process.  Raises UserError when the file changes during the check.
    """
    file = checker.reader.file
    problems: list[str] = []
    bad, boxes = [], []
    unread: Unread = {}
    total = file.version[0] if file.spans_are_bytes else None
    num_rows = found = 0
    unit = "records" if total is None else "B"
    with (tempfile.TemporaryFile(dir=folder) as rows,
          closing(in_processes(checker, file.blocks(problems), num_processes)) as checked,
          Progress(f"checking {file.path}", total, unit) as progress):
        for block in checked:
            if block.error is not None:
                raise block.error
            rows.write(block.rows.tobytes())
            num_rows += len(block.rows)
            bad += block.bad
            boxes += block.boxes_outside
            for key, (count, first) in block.unread.items():
                _add_unread(unread, key, count, first)
            found += int(is_usable(block.rows["num_tokens"]).sum())
            progress.update(len(block.rows) if total is None else int(block.rows["end"][-1]) - progress.done)
            if (num_good is not None and found >= num_good) or (most_bad is not None and len(bad) >= most_bad):
                break
        rows.flush()
        whole = np.memmap(rows, ROW, "r") if num_rows else np.empty(0, ROW)  # an empty file cannot be mapped
    return RecordIndex(MappedRows(whole), tuple(bad), tuple(problems), tuple(boxes), unread).first_usable(num_good)


def still_bad(index: RecordIndex, checker: Checker) -> bool:
    """Whether the bad records of a cached index are still bad: missing images may exist by now.

    Records that are bad regardless of media need no check: the file and the settings match the index.
    """
    return all(block.bad for block in map(checker, _bad_blocks(index)))


def _bad_blocks(index: RecordIndex) -> Iterator[RecordBlock]:
    for one in {bad.index: bad for bad in index.bad if bad.has_media}.values():
        row = index.rows.row(one.index)
        yield RecordBlock(one.index, one.line, 1, np.array([[row["start"], row["end"]]], dtype=np.int64))
