"""Checks and measures every record of a file, and keeps the results: positions and lengths, or why a record is bad.

Samples are measured by the encoder itself on the headers of their media.  A file is checked block by block in several
processes.  The names in the folder of indexes are hashes of all that an index depends on: ``KEY.rows`` has a row of
``ROW`` for each record, ``KEY.json`` the rest, written last, and ``KEY.numbers`` the records that a dataset uses.
``files/`` has the checksum of each file of records, named by its size and times, so that an unchanged file is not read
at every start.  Each file ends with the crc32 of the rest; one that does not match it is created again, with a note.
"""

import hashlib
import json
import math
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from mm.batch import IGNORE_INDEX, Grid, image_pairs, window_pairs
from mm.config.data import Attributes, DataConfig
from mm.config.model import ModelConfig
from mm.console import Progress, ongoing
from mm.data.encode import SampleEncoder, TooLongError
from mm.data.media.video_patches import VideoConstantsError
from mm.data.records.formats import read_sample, unread_keys
from mm.data.records.records import Raw, RecordBlock, RecordFile, Span
from mm.data.records.roots import MediaRoots
from mm.data.sample import BadSample, Lengths, Media, Sample, name_of, record_place
from mm.data.workers import in_processes
from mm.errors import MAX_PROBLEMS, UserError, printable, writing
from mm.families import FAMILIES, TITLES, names_of
from mm.families.family import Family
from mm.files import json_object, replace_file
from mm.model.arithmetic import Arithmetic
from mm.process import is_first_rank

ROW = np.dtype([
    ("start", "<i8"), ("end", "<i8"), ("num_image_pairs", "<i8"), ("num_window_pairs", "<i8"), ("line", "<i4"),
    ("num_tokens", "<i4"), ("num_target_tokens", "<i4"), ("num_media", "<i4"), ("num_patches", "<i4"),
    ("num_dropped_tokens", "<i4"),
])  # fmt: skip
"""The columns that the index has for each record: its ``mm.data.records.records.Span``, its ``Lengths``, and the tokens
that truncation dropped.  ``num_tokens`` is 0 if nothing was measured, ``BAD`` if the record cannot be used, and
``TOO_LONG`` if nothing of it would remain; then the dropped tokens are ``TooLongError.num_tokens``."""
BAD, TOO_LONG = -1, -2
_BOX = re.compile("|".join((
    *(rf"{re.escape(family.tokens.box_start)}([^<]*){re.escape(family.tokens.box_end)}" for family in FAMILIES),
    r"\"(?:bbox_2d|point_2d)\"\s*:\s*\[([^\]]*)\]")))
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def is_usable(num_tokens: np.ndarray) -> np.ndarray:
    """bool: which records can be trained on, given ``ROW``'s ``num_tokens``."""
    return num_tokens >= 0


@dataclass(frozen=True)
class Measure:
    """Measures samples as ``encoder`` would encode them."""

    encoder: SampleEncoder
    window: int
    """Patches along each side of an attention window of the ViT."""

    @classmethod
    def from_config(cls, data: DataConfig, model: ModelConfig, seq_length: int) -> "Measure":
        """Raises UserError as ``SampleEncoder.from_config`` does."""
        with ongoing("reading tokenizer and processor", is_first_rank()):
            encoder = SampleEncoder.from_config(data, model, seq_length)
        return cls(encoder, model.vision.window_attn_size // model.vision.patch_size)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that its results depend on besides the samples."""
        return hashlib.sha256(json.dumps(_facts(self)).encode()).hexdigest()


def _facts(value: Any) -> Any:
    """The facts about a part of the encoder that matter, as JSON values."""
    if isinstance(value, PreTrainedTokenizerBase):
        backend: Any = value.backend_tokenizer  # ``load_tokenizer`` requires a fast tokenizer
        code = hashlib.sha256(backend.to_str().encode()).hexdigest()
        return [code, value.chat_template, transformers.__version__, tokenizers.__version__]
    if isinstance(value, DataConfig):  # only the settings that plan videos; other parts cover the rest
        names = ("image_resize", *(field.name for field in fields(value) if field.name.startswith("video_")))
        return {name: getattr(value, name) for name in names if name not in ("video_backend", "video_timeout")}
    if is_dataclass(value):
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        # What a family fixes follows from the tokenizer, and its positions change no length.
        return {name: _facts(item) for name, item in values.items() if not isinstance(item, Family | Arithmetic)}
    return value


def sample_lengths(
    measure: Measure, sample: Sample, known: dict[Media, Grid]
) -> tuple[dict[str, int], int, tuple[Grid, ...]]:
    """The columns of ``ROW`` that depend on the encoder, the number of words like control tokens, and all grids.

    ``known`` caches grids across samples.  Raises UserError for media that cannot be read and samples without any
    target left, and TooLongError where whole turns are dropped and none would remain.
    """
    encoder = measure.encoder
    for item in sample.media:
        if item.files == item.contents and item not in known:  # embedded images would fill the memory
            known[item] = encoder.planned(item).grid
    grids = tuple(known[item] if item in known else encoder.planned(item).grid for item in sample.media)
    text = encoder.chat.encode(sample.turns, grids)
    num_targets = int((text.labels != IGNORE_INDEX).sum())
    kept = [grids[number] for number in text.media]
    _check(measure, grids, num_targets)
    return {
        "num_tokens": len(text.token_ids),
        "num_target_tokens": num_targets,
        "num_media": len(kept),
        "num_patches": sum(map(math.prod, kept)),
        "num_image_pairs": sum(map(image_pairs, kept)),
        "num_window_pairs": sum(window_pairs(grid, measure.window) for grid in kept),
        "num_dropped_tokens": text.num_dropped_tokens,
    }, text.num_control_words, grids


def _check(measure: Measure, grids: tuple[Grid, ...], num_targets: int) -> None:
    """Refuse a sample whose media alone are too long, or that has no target tokens left."""
    chat = measure.encoder.chat
    limit, num_visual = chat.seq_length, sum(math.prod(grid) // chat.spatial_merge_size**2 for grid in grids)
    if num_visual > limit and not chat.drops_turns:
        raise UserError(
            f"its images and videos ({len(grids)}) alone take {num_visual} tokens, which exceeds --seq-length {limit}, "
            f"and images are never cut; use fewer or smaller ones (image_max_pixels, video_max_pixels), or raise "
            f"--seq-length above {num_visual}.")
    if num_targets == 0:
        raise UserError(
            f"none of its answer tokens remain after truncation to --seq-length {limit}; shorten the sample, or raise "
            f"--seq-length.")


def has_boxes_outside(sample: Sample, grids: tuple[Grid, ...], patch_size: int) -> bool:
    """Whether an answer contains coordinates outside all images as the model sees them: a sign that they refer to the
    original files, although the model uses pixels of the resized image."""
    largest = max((max(grid[1:]) * patch_size for grid in grids), default=0)
    if not largest:
        return False
    answers = (turn.text for turn in sample.turns if turn.role == "assistant")
    places = (box[box.lastindex or 0] for answer in answers for box in _BOX.finditer(answer))
    return any(float(number) > largest for place in places for number in _NUMBER.findall(place))


CACHE_DIR = ".mm-index"
"""Folder in ``dataset_dir``, used if the data JSON does not set ``cache_dir``."""
_FORM = 8
"""Increment when the same data would be read or measured differently."""
NUMBER = np.dtype(np.uint32)
"""Numbers a record over all files: up to 4,294,967,295, more than any realistic index."""
_SETTLED_SECONDS = 2.0
"""A file modified less than this before it was read may change again without a new modification time."""
_CRC32_BYTES = 4
_BYTE = np.dtype(np.uint8)


class Rows:
    """A table that the processes of a node map into memory and share; if it has a file, it pickles as its path."""

    def __init__(self, array: np.ndarray, path: str | None = None) -> None:
        self.array, self.path = array, path

    @classmethod
    def open(cls, path: str, dtype: np.dtype, checks: bool = True) -> "Rows":
        """Map a file of a ``Store``.  Raises OSError, and with ``checks`` ValueError if the file is damaged."""
        raw = np.memmap(path, _BYTE, "r") if os.path.getsize(path) else np.empty(0, _BYTE)
        if checks and raw[-_CRC32_BYTES:].tobytes() != _crc32(raw[:-_CRC32_BYTES]):
            raise ValueError(f"{path} does not match its checksum")
        return cls(raw[:-_CRC32_BYTES].view(dtype), path)

    def __len__(self) -> int:
        return len(self.array)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            return Rows, (np.array(self.array),)
        return Rows.open, (self.path, self.array.dtype, False)


@dataclass(frozen=True)
class Columns:
    """The measurements of all samples of a dataset, loaded on request from the indexes of its files."""

    files: tuple[Rows, ...]
    """For each file, the columns of ``ROW`` of all its records."""
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


@dataclass(frozen=True)
class RecordIndex:
    """The records of one file, in file order."""

    rows: Rows
    """The columns of ``ROW``."""
    bad: tuple[BadSample, ...] = ()
    noted: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Oddities of good records: how many records have each, and the first of them."""
    problems: tuple[str, ...] = ()
    """Why the file could not be read to the end."""
    identity: str = ""
    """Differs from that of any other index that is kept."""


@dataclass(frozen=True)
class Store:
    """Folders of indexes.  The first writable one is written, all are read."""

    folders: tuple[Path, ...]
    notes: list[str] = field(default_factory=list[str])
    """Receives the damaged files."""

    @classmethod
    def of(cls, config: DataConfig) -> "Store":
        """``cache_dir`` of the data JSON, and the user's cache folder in case it cannot be written."""
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return cls((Path(config.cache_dir or os.path.join(config.dataset_dir, CACHE_DIR)), Path(home) / "mm-data"))

    @property
    def folder(self) -> Path:
        """The first writable folder.  Raises UserError if there is none."""
        for folder in self.folders:
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                if os.access(folder, os.W_OK | os.X_OK):
                    return folder
        raise UserError(f"the index of the samples cannot be written to {' or '.join(map(str, self.folders))}; set "
                        f"basic_parameters.cache_dir to a writable folder")

    def content_hash(self, file: RecordFile) -> str:
        """The hash of ``file``, which is read only if its size or times are new.  Raises UserError if it cannot be."""
        status = os.stat(file.path)
        stamp = os.path.realpath(file.path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        name = f"files/{key_of(*stamp)}"
        for folder in self.folders:
            with self._noting():
                return Rows.open(str(folder / name), _BYTE).array.tobytes().decode()
        sha256 = file.content_hash()
        if time.time() - status.st_mtime > _SETTLED_SECONDS:
            self._write(name, sha256.encode())
        return sha256

    def load(self, key: str, path: str) -> RecordIndex | None:
        """An index with its rows mapped into memory, for a file that is now at ``path``; None if there is none."""
        for folder in self.folders:
            with self._noting():
                found = json_object(Rows.open(str(folder / f"{key}.json"), _BYTE).array.tobytes())
                bad = tuple(BadSample(**{**one, "dataset": path}) for one in found["bad"])
                noted = {what: (count, first) for what, (count, first) in found["noted"].items()}
                rows = Rows.open(str(folder / f"{key}.rows"), ROW)
                return RecordIndex(rows, bad, noted, (), found["identity"])
        return None

    def save(self, key: str, index: RecordIndex) -> None:
        self._write(f"{key}.rows", index.rows.array)
        facts = {"bad": [asdict(one) for one in index.bad], "noted": index.noted, "identity": os.urandom(8).hex()}
        self._write(f"{key}.json", json.dumps(facts).encode())

    def numbers(self, facts: Any, choose: Callable[[], np.ndarray]) -> Rows:
        """The result of ``choose``, kept under the ``facts`` (JSON values) that it depends on."""
        name = f"{key_of(facts)}.numbers"
        for folder in self.folders:
            with self._noting():
                return Rows.open(str(folder / name), NUMBER)
        return Rows.open(self._write(name, choose()), NUMBER)

    def _write(self, name: str, content: Any) -> str:
        path = self.folder / name
        with writing(path, "cache_dir"):
            replace_file(path, lambda stream: stream.writelines([content, _crc32(content)]))
        return str(path)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Go on after a file that does not exist, or is damaged, which is noted."""
        try:
            yield
        except OSError:
            pass
        except ValueError as error:
            self.notes.append(f"{error}, and is created again")


def key_of(*facts: Any) -> str:
    """The name of what depends on these ``facts`` (JSON values)."""
    return hashlib.sha256(json.dumps([_FORM, ROW.descr, *facts]).encode()).hexdigest()[:32]


def _crc32(content: Any) -> bytes:
    return zlib.crc32(content).to_bytes(_CRC32_BYTES, "little")


_MAX_KNOWN = 100_000
"""Number of media whose grids are cached while a file is checked."""
_BOXES = f"coordinates outside the images as the model sees them; {TITLES} uses pixels of the resized image"
_CONTROL_WORDS = (f"words that look like control tokens ({', '.join(names_of(lambda one: [one.tokens.turn_start]))}) "
                  f"or media placeholders, which are read as text")
_MANY_KEYS = "more keys that nothing reads"


@dataclass(frozen=True)
class Reader:
    """How the records of one file become samples."""

    file: RecordFile
    attr: Attributes
    roots: MediaRoots
    measure: Measure | None = None

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
        """Add all of another block but its rows."""
        self.bad += other.bad
        for what, (count, first) in other.noted.items():
            self.note(what, count, first)


@dataclass
class Checker:
    """Checks blocks of one file, and measures them if its reader has a ``measure``.  Pickles into workers."""

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
        measure = self.reader.measure
        if measure is None:
            return
        if len(self._grids) > _MAX_KNOWN:
            self._grids.clear()
        lengths, num_control_words, grids = sample_lengths(measure, sample, self._grids)
        for name, value in lengths.items():
            row[name] = value
        if has_boxes_outside(sample, grids, measure.encoder.images.patch_size):
            found.note(_BOXES, 1, index)
        if num_control_words:
            found.note(_CONTROL_WORDS, 1, index)


def make_index(
    checker: Checker, num_processes: int, num_good: int | None = None, most_bad: int | None = None
) -> RecordIndex:
    """Check a file in ``num_processes`` processes, up to ``num_good`` good or ``most_bad`` bad records (None: all).

    Rows go to an unnamed file instead of memory.  Raises UserError when the file changes during the check.
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
