"""One file of a dataset with its index, which one process creates once and which is then cached."""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from mm.config.data import DataConfig
from mm.data.index.index import Checker, Reader, RecordIndex, make_index, still_bad
from mm.data.index.store import Store, key_of
from mm.data.record_name import BadSample, name_of, record_place
from mm.errors import UserError, printable

CACHE_DIR = ".mm-index"
"""Folder in ``dataset_dir``, used if the data JSON does not set ``cache_dir``."""
_MOST_CHARACTERS = 2000


@dataclass
class IndexedFile:
    """One file with its index and its reader.  Pickles without the rows if they are in a file."""

    reader: Reader
    index: RecordIndex
    identity: str | None = None
    """Identifies the index, if it is cached."""
    file_sha256: str | None = None
    """If known."""
    entry: str = ""
    """The name of the dataset in the data JSON."""
    num_samples: int = 0
    """Number of samples in use, including those set aside for validation."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"index": replace(self.index, bad=(), boxes_outside=(), unread={})}

    @property
    def content(self) -> str:
        """SHA-256 of the file, which does not depend on where it is.  Raises UserError when it can no longer be read.
        """
        return self.file_sha256 or self.reader.file.content_hash()

    def bad_sample(self, number: int, reason: str, line: int | None = None) -> BadSample:
        """The entry of record ``number`` in the list of bad samples; without ``line``, the file is scanned for it.

        Raises UserError when the file has changed since the check.
        """
        file, row = self.reader.file, self.index.rows.row(number)
        paths = []
        # A record that cannot be read, or is nested too deeply, has no known paths.
        with suppress(UserError, ValueError, RecursionError):
            paths = [path for item in self.reader.read(number, row).media for path in item.contents]
        return BadSample(
            file.path, (file.line((row["start"], row["end"])) if line is None else line) or None, number,
            self.name(number),
            min((path for path in map(printable, map(str, paths)) if path in reason), key=reason.find, default=None),
            _shortened(reason))

    def name(self, number: int) -> str | int | None:
        """The ``id`` of record ``number``, or None."""
        row, record = self.index.rows.row(number), None
        with suppress(UserError, ValueError, RecursionError):  # a record that cannot be read has no id
            record = self.reader.file.read((row["start"], row["end"]))
        name = name_of(record)
        return _shortened(name) if isinstance(name, str) else name

    def named(self, number: int) -> str:
        """Record ``number`` as messages name it."""
        return record_place(self.reader.file.path, number, self.name(number))


def _shortened(text: str) -> str:
    """Shorten a text for messages: a record may contain a whole book."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def open_indexed(
    checker: Checker, config: DataConfig, gauge_key: str | None, limit: int | None, most_bad: int | None,
    notes: list[str],
) -> IndexedFile:
    """One file with its index, from the store if it has one, otherwise checked now."""
    reader = checker.reader
    num_processes = config.preprocessing_num_workers or len(os.sched_getaffinity(0))
    if gauge_key is None:
        return IndexedFile(reader, make_index(checker, 1, limit, most_bad))
    store = store_of(config, notes)
    facts = [asdict(reader.attr), [os.path.realpath(root) for root in reader.roots.all], gauge_key]
    content, is_older = store.content_hash(reader.file)
    keys = [key_of(content, *facts, one) for one in dict.fromkeys((None, limit))]

    def loaded() -> IndexedFile | None:
        for key in () if config.overwrite_cache else keys:
            kept = store.load(key)
            if kept is not None and still_bad(kept.index, checker):
                return IndexedFile(reader, kept.index.first_usable(limit), kept.identity, content)
        return None

    if (records := loaded()) is not None:
        return records
    with store.making(keys[-1], f"the index of {reader.file.path}"):
        if (records := loaded()) is not None:
            return records
        if is_older:
            notes.append(f"{reader.file.path}: its index is from an older version and is created again")
        index = make_index(checker, num_processes, limit, most_bad, store.folder)
        if index.problems or not len(index.rows) or (most_bad is not None and len(index.bad) >= most_bad):
            return IndexedFile(reader, index)  # an error: the caller reports it
        note = store.save(keys[-1], index)
    if note is not None and note not in notes:
        notes.append(note)
    kept = store.load(keys[-1])
    if kept is None:  # no folder can be written
        return IndexedFile(reader, index, None, content)
    return IndexedFile(reader, kept.index, kept.identity, content)


def store_of(config: DataConfig, notes: list[str]) -> Store:
    """``notes`` receives one for each damaged file."""
    return Store.of(config.cache_dir or os.path.join(config.dataset_dir, CACHE_DIR), notes)
