"""The index of one file, from checking and measuring every record once: its position and lengths, or why it is bad.

The check reads a file block by block in several processes.  ``mm.data.index.store`` keeps the result.
"""

import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mm.batch import Grid
from mm.config.data import Attributes
from mm.data.encode.chat import TooLongError
from mm.data.index.measure import BAD, ROW, TOO_LONG, Gauge, has_boxes_outside, is_usable, sample_lengths
from mm.data.index.store import RecordIndex, Rows
from mm.data.media.video_patches import VideoConstantsError
from mm.data.records.formats import read_sample, unread_keys
from mm.data.records.record_name import BadSample, name_of, record_place
from mm.data.records.records import Raw, RecordBlock, RecordFile, Span
from mm.data.records.roots import MediaRoots
from mm.data.sample import Media, Sample
from mm.data.workers import in_processes
from mm.errors import MAX_PROBLEMS, UserError, printable
from mm.families.known import TITLES, names_of
from mm.progress import Progress

_MAX_KNOWN = 100_000
"""Number of media whose grids are cached while a file is checked."""
_BOXES = f"coordinates outside the images as the model sees them; {TITLES} uses pixels of the resized image"
_CONTROL_WORDS = (f"words that look like control tokens ({', '.join(names_of(lambda one: [one.tokens.turn_start]))}) "
                  f"or media placeholders, which are read as text")
_MANY_KEYS = "more keys that nothing reads"


@dataclass(frozen=True)
class Reader:
    """How the records of one file become samples; a ``gauge`` measures them."""

    file: RecordFile
    attr: Attributes
    roots: MediaRoots
    gauge: Gauge | None = None

    def sample(self, record: Any, number: int) -> Sample:
        """Record ``number`` as a sample.  Raises UserError for an invalid record."""
        return read_sample(record, self.attr, self.roots, record_place(self.file.path, number))

    def bad_sample(self, number: int, row: np.void, reason: str, record: Any, sample: Sample | None) -> BadSample:
        """The entry of a record in the list of bad samples; ``sample``: if it could be read."""
        paths = [printable(str(one)) for item in (sample.media if sample else ()) for one in item.contents]
        cause = min((one for one in paths if one in reason), key=reason.find, default=None)
        return BadSample(self.file.path, int(row["line"]) or None, number, name_of(record), cause, reason)


def span_of(row: np.void) -> Span:
    """Where the record of a row of the index is."""
    return int(row["start"]), int(row["end"]), int(row["line"])


@dataclass
class _CheckedBlock:
    """The result for one block: its rows and bad records, or why it could not be read."""

    rows: np.ndarray
    bad: list[BadSample] = field(default_factory=list[BadSample])
    noted: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    error: UserError | None = None

    def note(self, what: str, count: int, first: int) -> None:
        """Add an oddity of ``count`` good records.  Of many unread keys, only the first are named."""
        what = what if what in self.noted or len(self.noted) < MAX_PROBLEMS else _MANY_KEYS
        before, earliest = self.noted.get(what, (0, first))
        self.noted[what] = before + count, min(earliest, first)

    def add(self, other: "_CheckedBlock") -> None:
        """Add the findings of another block, without its rows."""
        self.bad += other.bad
        for what, (count, first) in other.noted.items():
            self.note(what, count, first)


@dataclass
class Checker:
    """Checks blocks of one file; nothing is measured if its reader has no ``gauge``.  Pickles into workers."""

    reader: Reader
    _grids: dict[Media, Grid] = field(default_factory=dict, init=False)

    def __call__(self, block: RecordBlock) -> _CheckedBlock:
        found = _CheckedBlock(np.zeros(len(block.spans), ROW))
        try:
            for row, raw in zip(found.rows, self.reader.file.read_block(block), strict=True):
                row["start"], row["end"], row["line"] = raw.span
                self._check(raw, row, found)
        except UserError as error:  # about the whole file; returned, because raising would bury it in a traceback
            found.error = error
        return found

    def _check(self, raw: Raw, row: np.void, found: _CheckedBlock) -> None:
        """Fill in the row of one record, and add what is wrong or odd about it."""
        sample = None
        try:
            if raw.problem is not None:
                raise UserError(raw.problem)
            sample = self.reader.sample(raw.value, raw.index)
            self._measure(sample, raw.index, row, found)
        except TooLongError as error:
            row["num_tokens"], row["num_dropped_tokens"] = TOO_LONG, error.num_tokens
        except VideoConstantsError:  # a fault of the checkpoint, which affects all videos
            raise
        except UserError as error:
            row["num_tokens"] = BAD
            found.bad.append(self.reader.bad_sample(raw.index, row, error.problems[0], raw.value, sample))
            return
        for key in unread_keys(raw.value, self.reader.attr):
            found.note(f"nothing reads {key}; docs/data.md lists the keys that are read", 1, raw.index)

    def _measure(self, sample: Sample, index: int, row: np.void, found: _CheckedBlock) -> None:
        gauge = self.reader.gauge
        if gauge is None:
            return
        if len(self._grids) > _MAX_KNOWN:
            self._grids.clear()
        lengths, num_control_words, grids = sample_lengths(gauge, sample, self._grids)
        for name, value in lengths.items():
            row[name] = value
        if has_boxes_outside(sample, grids, gauge.encoder.images.patch_size):
            found.note(_BOXES, 1, index)
        if num_control_words:
            found.note(_CONTROL_WORDS, 1, index)


def make_index(
    checker: Checker, num_processes: int, num_good: int | None = None, most_bad: int | None = None
) -> RecordIndex:
    """Check a file in ``num_processes`` processes, up to ``num_good`` good or ``most_bad`` bad records (None: all).

    Its rows are written to an unnamed file, so they take no memory in this process.  Raises UserError when the file
    changes during the check.
    """
    file, problems = checker.reader.file, list[str]()
    found, num_rows, num_usable = _CheckedBlock(np.empty(0, ROW)), 0, 0
    total = None if file.kind == "Parquet" else file.version[0]
    with (tempfile.TemporaryFile() as stream,
          closing(in_processes(checker, file.blocks(problems), num_processes)) as checked,
          Progress(f"checking {file.path}", total, "records" if total is None else "B") as progress):
        for block in checked:
            if block.error is not None:
                raise block.error
            stream.write(block.rows.tobytes())
            found.add(block)
            num_rows += len(block.rows)
            num_usable += int(is_usable(block.rows["num_tokens"]).sum())
            progress.update(len(block.rows) if total is None else int(block.rows["end"][-1]) - progress.done)
            if (num_good is not None and num_usable >= num_good) or (most_bad and len(found.bad) >= most_bad):
                break
        stream.flush()
        rows = np.memmap(stream, ROW, "r") if num_rows else found.rows  # an empty file cannot be mapped
    if num_good is not None and num_usable > num_good:
        rows = rows[: int(np.flatnonzero(is_usable(rows["num_tokens"]))[num_good - 1]) + 1]
    noted = {what: place for what, place in found.noted.items() if place[1] < len(rows)}
    bad = tuple(one for one in found.bad if one.index < len(rows))
    return RecordIndex(Rows(rows), bad, noted, tuple(problems))


def still_bad(index: RecordIndex, checker: Checker) -> bool:
    """Whether the bad records of an index that was kept are still bad: missing images may exist by now."""
    blocks = (RecordBlock(one.index, [span_of(index.rows.array[one.index])]) for one in index.bad)
    return all(block.bad for block in map(checker, blocks))
