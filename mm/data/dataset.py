"""All samples of a data JSON, checked before training begins and read one at a time.

Every record is checked, and with a ``Gauge`` measured, once per content of its file: ``mm.data.store`` keeps the result
between runs.  So a bad sample stops the run before it starts and not at step 5000, and the next start takes seconds.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from mm.config.data import DataConfig
from mm.config.sources import Source, training_sources, validation_sources
from mm.data.contents import Contents
from mm.data.gauge import BAD, TOO_LONG, Gauge, is_usable
from mm.data.index import Checker, Index, Reader, make_index, still_bad
from mm.data.lengths import Lengths
from mm.data.media import MediaRoots
from mm.data.quarantine import BadSample, name_of, record_place
from mm.data.records import RecordFile
from mm.data.remarks import length_remarks, too_long_remark
from mm.data.sample import Sample
from mm.data.selection import chosen, split
from mm.data.store import Store, key_of, mapped
from mm.errors import MAX_PROBLEMS, UserError, collected

CACHE_DIR = ".mm-index"
"""Below ``dataset_dir``, where the data JSON names no ``cache_dir``."""
_MOST_CHARACTERS = 2000
_NUMBER = np.uint32
"""Of a record in all files: 4,294,967,295 are more than any index would be made of."""
_SKIP_HINT = " (--bad-sample skip leaves such samples out, and lists them in a file.)"

Part = Literal["training", "validation"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass
class _Records:
    """One file, where its records lie, and how they are read.  Pickles without the rows where a file has them."""

    reader: Reader
    index: Index
    rows_path: str | None = None
    file_sha256: str | None = None
    """Where it is known."""
    entry: str = ""
    """The dataset, as the data JSON names it."""

    def __getstate__(self) -> dict[str, Any]:
        rows = None if self.rows_path else self.index.rows
        return self.__dict__ | {"index": replace(self.index, rows=rows, bad=(), boxes_outside=())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if self.rows_path is not None:
            rows = mapped(self.rows_path)
            if rows is None:
                raise UserError(f"{self.rows_path}: the index of the samples is gone or damaged; start again.")
            self.index = replace(self.index, rows=rows)

    def bad_sample(self, number: int, reason: str, line: int | None = None) -> BadSample:
        """What is told of record ``number``, which cannot be used; without its ``line`` the file is looked through.

        Raises UserError when the file itself is no longer the one that was checked.
        """
        file, row = self.reader.file, self.index.rows[number]
        media = ()
        # What is told of a record that cannot be read is without these; it may also be nested too deeply.
        with suppress(UserError, ValueError, RecursionError):
            media = self.reader.read(number, row).media
        return BadSample(
            file.path, (file.line((int(row["start"]), int(row["end"]))) if line is None else line) or None, number,
            self.name(number),
            min((path for item in media for path in map(str, item.contents) if path in reason), key=reason.find,
                default=None),
            _cut(reason))

    def name(self, number: int) -> str | int | None:
        """What record ``number`` calls itself."""
        row, record = self.index.rows[number], None
        with suppress(UserError, ValueError, RecursionError):  # one that cannot be read has no name
            record = self.reader.file.read((int(row["start"]), int(row["end"])))
        name = name_of(record)
        return _cut(name) if isinstance(name, str) else name

    def named(self, number: int) -> str:
        """Record ``number`` in a sentence."""
        return record_place(self.reader.file.path, number, self.name(number))


class Dataset:
    """The samples of ``config.dataset``, in file order, or those kept for validation.

    In memory are 4 bytes a sample, for which ones are taken; where each lies and what it holds is mapped from the
    index (``mm.data.gauge.ROW``).  Pickles small into data workers.  ``config.max_samples`` keeps that many of the
    first samples of all files together.
    """

    def __init__(
        self, config: DataConfig, skips_bad: bool = False, gauge: Gauge | None = None, seed: int = 0,
        part: Part = "training",
    ) -> None:
        """Check every sample, unless an index of the same content says what was found; of media, read headers.

        Without ``gauge`` nothing is measured and no index is kept, and of media only that they are there is checked.
        ``seed`` decides which samples a rate takes and which are for validation.

        Raises UserError with up to 20 problems, each naming file, line and sample.  With ``skips_bad`` samples that
        cannot be used are left out, and only a file that cannot be read, or no good sample at all, is an error.
        Samples of which no turn fits ``--seq-length`` are left out in any case, and counted.
        """
        self._config, self._gauge_key = config, gauge and gauge.fingerprint()
        self.skipped: list[BadSample] = []
        """What was left out."""
        self.num_too_long = 0
        """Samples that are left out because no turn of them fits."""
        self.notes: list[str] = []
        """Where the index is kept, if not where it should be, what is strange in good samples, what long ones lost."""
        self._files: list[_Records] = []
        has_files = part == "validation" and config.val_dataset  # else it is a share of those for training
        sources = validation_sources(config) if has_files else training_sources(config)
        limit = config.val_max_samples if has_files else config.max_samples
        problems: list[str] = []
        too_long: list[str] = []
        taken: list[np.ndarray] = []
        for source in sources:
            left = None if limit is None else limit - sum(map(len, taken))
            if left == 0 or len(problems) >= MAX_PROBLEMS:
                break
            is_whole = source.rate_percent == 100 and source.num_samples is None
            with collected(problems):
                records = self._open(source, gauge, left if is_whole else None, skips_bad, problems)
                good = np.flatnonzero(is_usable(records.index.rows))
                good += sum(len(one.index.rows) for one in self._files)
                if not is_whole:
                    good = good[chosen(len(good), source.rate_percent, source.num_samples, seed, source.entry)]
                taken.append(good[:left].astype(_NUMBER))
                self._files.append(records)
                too_long += [] if gauge is None else self._too_long(records, gauge.encoder.chat.seq_length)
        if not problems and not sum(map(len, taken)):
            problems = [*(one.told() for one in self.skipped), *too_long] or [
                f"{', '.join(config.dataset)}: no sample is taken; raise the rates (%)."]
        if problems:
            more = ["More problems may follow; mend these first."] if len(problems) >= MAX_PROBLEMS else []
            raise UserError(problems[:MAX_PROBLEMS] + more)
        samples = np.concatenate(taken)
        if config.val_rate and not config.val_dataset:
            training, validation = split(samples, config.val_rate, seed)
            samples = training if part == "training" else validation[: config.val_max_samples]
            if not len(samples):
                raise UserError(f"val_rate = {config.val_rate} leaves no sample for {part}; change it.")
        self._samples = samples
        if gauge is not None:
            self.notes += [*too_long, *self._length_remarks(gauge)]

    def _open(
        self, source: Source, gauge: Gauge | None, limit: int | None, skips_bad: bool, problems: list[str]
    ) -> _Records:
        """Check one file, or find what was found before.  ``limit``: the first good samples are enough."""
        config, file = self._config, RecordFile.open(source.path)
        roots = MediaRoots(source.media_root, (config.dataset_dir, *(config.media_roots or ())))
        checker = Checker(Reader(file, source.attr, roots, gauge))
        records = _indexed(checker, config, self._gauge_key, limit, None if skips_bad else MAX_PROBLEMS, self.notes)
        index, records.entry = records.index, source.entry
        if not len(index.rows) and not index.problems:
            problems.append(f"{source.path}: holds no sample; expected a JSON list of objects, or one JSON object a "
                            f"line.")
        found = [one.told(source.path) for one in index.bad]
        if skips_bad:
            self.skipped += [records.bad_sample(one.index, one.reason, one.line) for one in index.bad]
        elif found:
            if not any(_SKIP_HINT in problem for problem in problems):
                found[0] += _SKIP_HINT
            problems += found
        problems += index.problems
        if index.boxes_outside:
            self.notes.append(
                f"{len(index.boxes_outside)} samples, the first is {records.named(index.boxes_outside[0])}, name "
                f"places beyond their pictures as the model sees them; Qwen2.5-VL counts pixels of the resized picture")
        return records

    def _too_long(self, records: _Records, seq_length: int) -> Iterator[str]:
        """Counts the records of which no turn fits, and says which these are."""
        numbers = np.flatnonzero(records.index.rows["num_tokens"] == TOO_LONG)
        self.num_too_long += len(numbers)
        if len(numbers):
            yield too_long_remark(records.index.rows["num_dropped_tokens"][numbers], seq_length,
                                  lambda place: records.named(int(numbers[place])))

    def _length_remarks(self, gauge: Gauge) -> Iterator[str]:
        def named(index: int) -> str:
            records, number = self._place(index)
            return records.named(number)

        chat = gauge.encoder.chat
        return length_remarks(self.column, chat.seq_length, chat.drops_turns, named)

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def num_records(self) -> int:
        """In the files, whether or not a sample is made of each."""
        return sum(len(records.index.rows) for records in self._files)

    @property
    def num_bad(self) -> int:
        """Records that cannot be used, in the files."""
        return sum(int((records.index.rows["num_tokens"] == BAD).sum()) for records in self._files)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``.  Raises UserError when its file was changed after the check."""
        records, number = self._place(index)
        return records.reader.read(number, records.index.rows[number])

    def name(self, index: int) -> str | int | None:
        """What the record of a sample calls itself."""
        records, number = self._place(index)
        return records.name(number)

    def bad_sample(self, index: int, error: UserError) -> BadSample:
        """What is told of sample ``index``, which cannot be used because of ``error``."""
        records, number = self._place(index)
        return records.bad_sample(number, error.problems[0].removeprefix(f"{records.reader.source(number)}: "))

    def _place(self, index: int) -> tuple[_Records, int]:
        """The file of sample ``index``, and its number in it."""
        number = int(self._samples[index])
        for records in self._files:
            if number < len(records.index.rows):
                return records, number
            number -= len(records.index.rows)
        raise IndexError(index)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "lengths"}
        return state | {"skipped": [], "notes": []}

    @cached_property
    def lengths(self) -> Lengths:
        """What each sample holds, in the order of the dataset; it must have been measured."""
        assert self._gauge_key is not None, "nothing was measured"
        return Lengths(**{one.name: self.column(one.name) for one in fields(Lengths)})

    def column(self, name: str) -> np.ndarray:
        """What ``mm.data.gauge.ROW`` says of each sample under ``name``; it must have been measured."""
        columns = [records.index.rows[name] for records in self._files]
        whole = columns[0] if len(columns) == 1 else np.concatenate(columns)
        taken = self._samples
        is_all = len(taken) == len(whole) and bool((taken[1:] > taken[:-1]).all())
        return whole if is_all else whole[taken]

    def contents(self) -> tuple[Contents, ...]:
        """Which samples of which files these are.  Raises UserError when a file can no longer be read."""
        found, first = [], 0
        for records in self._files:
            last = first + len(records.index.rows)
            own = self._samples[(self._samples >= first) & (self._samples < last)] - first
            found.append(Contents(
                records.entry, records.file_sha256 or records.reader.file.content_hash(), len(own),
                hashlib.sha256(own.astype("<i8").tobytes()).hexdigest()))
            first = last
        return tuple(found)


def _cut(text: str) -> str:
    """For a message: what stands in a record may be a whole book."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def validation_dataset(
    config: DataConfig, skips_bad: bool = False, gauge: Gauge | None = None, seed: int = 0
) -> Dataset | None:
    """The samples of ``val_dataset``, or those that ``val_rate`` keeps back; None without either.

    Raises UserError as ``Dataset`` does.
    """
    if not config.has_validation:
        return None
    return Dataset(config, skips_bad, gauge, seed, "validation")


def datasets(
    config: DataConfig, problems: list[str], skips_bad: bool = False, gauge: Gauge | None = None, seed: int = 0
) -> Mapping[Part, Dataset]:
    """The samples for training, and those for validation where there are any.  What cannot be opened is left out, and
    adds to ``problems``: a fault of one part does not hide those of the other.
    """
    found: dict[Part, Dataset] = {}
    with collected(problems):
        found["training"] = Dataset(config, skips_bad, gauge, seed)
    # With val_rate both parts are in the same files, whose index has just been made.
    again = config.overwrite_cache and config.val_dataset is not None
    wrong: list[str] = []
    with collected(wrong):
        validation = validation_dataset(replace(config, overwrite_cache=again), skips_bad, gauge, seed)
        if validation is not None:
            found["validation"] = validation
    problems += [one for one in wrong if one not in problems]
    return found


def notes_of(parts: Mapping[Part, Dataset]) -> list[str]:
    """The notes of all parts, each once; those of the validation samples alone say so."""
    found = dict.fromkeys(note for dataset in [*parts.values()][:1] for note in dataset.notes)
    for name, dataset in [*parts.items()][1:]:
        found |= dict.fromkeys(f"{name}: {note}" for note in dataset.notes if note not in found)
    return list(found)


def _indexed(
    checker: Checker, config: DataConfig, gauge_key: str | None, limit: int | None, most_bad: int | None,
    notes: list[str],
) -> _Records:
    """The records of one file, from the store where it has them."""
    reader = checker.reader
    num_processes = config.preprocessing_num_workers or len(os.sched_getaffinity(0))
    if gauge_key is None:
        return _Records(reader, make_index(checker, 1, limit, most_bad))
    store = Store.of(config.cache_dir or os.path.join(config.dataset_dir, CACHE_DIR))
    facts = [asdict(reader.attr), [os.path.realpath(root) for root in reader.roots.all], gauge_key]
    content, is_older = store.content_hash(reader.file)
    keys = [key_of(content, *facts, one) for one in dict.fromkeys((None, limit))]
    for key in () if config.overwrite_cache else keys:
        found = store.load(key)
        if found is not None and still_bad(found[0], checker):
            return _Records(reader, found[0].cut(limit), found[1] if limit is None else None, content)
    if is_older:
        notes.append(f"{reader.file.path}: an older version made its index, which is now made again")
    index = make_index(checker, num_processes, limit, most_bad)
    if index.problems or not len(index.rows) or (most_bad is not None and len(index.bad) >= most_bad):
        return _Records(reader, index)  # not to be used: the caller says why
    path, note = store.save(keys[-1], index)
    if note is not None and note not in notes:
        notes.append(note)
    kept = None if path is None else mapped(path)
    return _Records(reader, index if kept is None else replace(index, rows=kept), path if kept is not None else None,
                    content)
