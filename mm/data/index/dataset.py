"""All samples of a data JSON, checked before training begins and read one at a time.

Every record is checked, and with a ``Gauge`` measured, once per content of its file: ``mm.data.index.store`` keeps the
result between runs.  So a bad sample stops the run before it starts and not at step 5000, and the next start takes
seconds.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, get_args

import numpy as np

from mm.config.data import DataConfig
from mm.config.sources import Source, training_sources, validation_sources
from mm.data.index.columns import Columns
from mm.data.index.contents import Contents
from mm.data.index.gauge import TOO_LONG, Gauge
from mm.data.index.index import Checker, Reader
from mm.data.index.indexed_file import IndexedFile, open_indexed, store_of
from mm.data.index.remarks import length_remarks, too_long_remark
from mm.data.index.rows import Rows, packed_numbers
from mm.data.lengths import Lengths
from mm.data.order.selection import chosen, num_chosen, split
from mm.data.read.records import RecordFile
from mm.data.read.roots import MediaRoots
from mm.data.record_name import BadSample
from mm.data.sample import Sample
from mm.errors import MAX_PROBLEMS, UserError, collected, printable

_NUMBER = np.uint32
"""Of a record in all files: 4,294,967,295 are more than any index would be made of."""
_SKIP_HINT = " (--bad-sample skip leaves such samples out, and lists them in a file.)"

Part = Literal["training", "validation"]
PARTS: tuple[Part, ...] = get_args(Part)


class Dataset:
    """The samples of ``config.dataset``, in file order, or those kept for validation.

    Where each lies and what it holds is not in memory, but mapped from the index (``mm.data.index.rows``); which ones
    are taken, where it is not all of them, is mapped from a file beside.  So all processes of a node share them.
    Pickles small into data workers.  ``config.max_samples`` keeps that many of the first samples of all files together.
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
        self._notes: list[str] = []
        self._files: list[IndexedFile] = []
        self._limit = gauge and (gauge.encoder.chat.seq_length, gauge.encoder.chat.drops_turns)
        has_files = part == "validation" and config.val_dataset  # else it is a share of those for training
        sources = validation_sources(config) if has_files else training_sources(config)
        limit = config.val_max_samples if has_files else config.max_samples
        problems: list[str] = []
        for source in sources:
            left = None if limit is None else limit - sum(records.num_samples for records in self._files)
            if left == 0 or len(problems) >= MAX_PROBLEMS:
                break
            with collected(problems):
                records = self._open(source, gauge, left if is_whole(source) else None, skips_bad, problems)
                num_usable = records.index.num_usable
                count = num_usable if is_whole(source) else num_chosen(
                    num_usable, source.rate_percent, source.num_samples)
                records.num_samples = count if left is None else min(count, left)
                self._files.append(records)
        total = sum(records.num_samples for records in self._files)
        if not problems and not total:
            problems = [*(one.told() for one in self.skipped), *self._too_long()] or [
                f"{', '.join(config.dataset)}: no sample is taken; raise the rates (%)."]
        if problems:
            more = ["More problems may follow: 'mm-data check' counts all, and its --html PAGE lists them."]
            more *= len(problems) >= MAX_PROBLEMS
            raise UserError(problems[:MAX_PROBLEMS] + more)
        rate = 0.0 if config.val_dataset else config.val_rate or 0.0
        takes_all = all(is_whole(source) and records.num_samples == len(records.index.rows)
                        for records, source in zip(self._files, sources, strict=False))
        taken = None if takes_all and not rate else self._chosen(sources, rate, seed, part)
        self._columns = Columns(tuple(records.index.rows for records in self._files), taken)
        if not len(self):
            raise UserError(f"val_rate = {config.val_rate} leaves no sample for {part}; change it.")

    def _open(
        self, source: Source, gauge: Gauge | None, limit: int | None, skips_bad: bool, problems: list[str]
    ) -> IndexedFile:
        """Check one file, or find what was found before.  ``limit``: the first good samples are enough."""
        config, file = self._config, RecordFile.open(source.path)
        roots = MediaRoots(source.media_root, (config.dataset_dir, *(config.media_roots or ())))
        checker = Checker(Reader(file, source.attr, roots, gauge))
        most_bad = None if skips_bad else MAX_PROBLEMS
        records = open_indexed(checker, config, self._gauge_key, limit, most_bad, self._notes)
        index, records.entry = records.index, source.entry
        self._notes += file.remarks()
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
            self._notes.append(
                f"{len(index.boxes_outside)} samples, the first is {records.named(index.boxes_outside[0])}, name "
                f"places beyond their pictures as the model sees them; Qwen2.5-VL counts pixels of the resized picture")
        return records

    def _chosen(self, sources: Sequence[Source], val_rate: float, seed: int, part: Part) -> Rows:
        """Which records are taken, and with ``val_rate`` for this part."""
        config, most = self._config, self._config.val_max_samples

        def choose() -> np.ndarray:
            taken, first = np.empty(sum(records.num_samples for records in self._files), _NUMBER), 0
            done = 0
            for records, source in zip(self._files, sources, strict=False):
                good = np.concatenate([np.empty(0, _NUMBER), *(one.astype(_NUMBER) for one in records.index.usable())])
                if not is_whole(source):
                    good = good[chosen(len(good), source.rate_percent, source.num_samples, seed, source.entry)]
                taken[done : done + records.num_samples] = good[: records.num_samples]
                taken[done : done + records.num_samples] += first
                done += records.num_samples
                first += len(records.index.rows)
            if not val_rate:
                return taken
            training, validation = split(taken, val_rate, seed)
            return training if part == "training" else validation[:most]

        facts = [[records.identity, len(records.index.rows), records.num_samples, source.rate_percent,
                  source.num_samples, source.entry] for records, source in zip(self._files, sources, strict=False)]
        if any(records.identity is None for records in self._files):
            return packed_numbers(choose(), None)
        return store_of(config).numbers([facts, seed, *([val_rate, part, most] if val_rate else [])], choose)

    @cached_property
    def notes(self) -> list[str]:
        """Where the index is kept, if not where it should be, what is strange in good samples, what long ones lost."""
        return [*self._notes, *self._too_long(), *self._length_remarks()]

    @property
    def num_too_long(self) -> int:
        """Samples that are left out because no turn of them fits."""
        return sum(records.index.num_too_long for records in self._files)

    def _too_long(self) -> Iterator[str]:
        """Which records have no turn that fits."""
        for records in self._files:
            if self._limit is not None and records.index.num_too_long:
                rows = records.index.rows
                numbers = np.concatenate([first + np.flatnonzero(num_tokens == TOO_LONG)
                                          for first, num_tokens in rows.chunks("num_tokens")])
                yield too_long_remark(rows.of("num_dropped_tokens", numbers), self._limit[0],
                                      partial(records.named_of, numbers))

    def _length_remarks(self) -> Iterator[str]:
        def named(index: int) -> str:
            records, number = self._place(index)
            return records.named(number)

        return iter(()) if self._limit is None else length_remarks(self.columns, *self._limit, named)

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def num_records(self) -> int:
        """In the files, whether or not a sample is made of each."""
        return sum(len(records.index.rows) for records in self._files)

    @property
    def num_bad(self) -> int:
        """Records that cannot be used, in the files."""
        return sum(records.index.num_bad for records in self._files)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``.  Raises UserError when its file was changed after the check."""
        records, number = self._place(index)
        return records.reader.read(number, records.index.rows.row(number))

    def name(self, index: int) -> str | int | None:
        """What the record of a sample calls itself."""
        records, number = self._place(index)
        return records.name(number)

    def bad_sample(self, index: int, error: UserError) -> BadSample:
        """What is told of sample ``index``, which cannot be used because of ``error``."""
        records, number = self._place(index)
        source = printable(f"{records.reader.source(number)}: ")
        return records.bad_sample(number, error.problems[0].removeprefix(source))

    def _place(self, index: int) -> tuple[IndexedFile, int]:
        """The file of sample ``index``, and its number in it."""
        file, number = self._columns.place(index)
        return self._files[file], number

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "lengths"}
        return state | {"skipped": [], "notes": []}

    @property
    def columns(self) -> Columns:
        """What is known of each sample; they must have been measured."""
        assert self._gauge_key is not None, "nothing was measured"
        return self._columns

    @cached_property
    def lengths(self) -> Lengths:
        """What each sample holds, in the order of the dataset, in memory; a training asks ``columns`` for some."""
        return self.columns.of(np.arange(len(self)))

    def column(self, name: str) -> np.ndarray:
        """The column ``name`` of ``mm.data.index.gauge.ROW`` of every sample, in memory; it must have been measured."""
        return self.columns.values(name, np.arange(len(self)))

    def contents(self) -> tuple[Contents, ...]:
        """Which samples of which files these are.  Raises UserError when a file can no longer be read."""
        counts, hashes = [0] * len(self._files), [hashlib.sha256() for _ in self._files]
        for file, numbers in self._columns.by_file():
            counts[file] += len(numbers)
            hashes[file].update(numbers.astype("<i8").tobytes())
        return tuple(
            Contents(records.entry, records.file_sha256 or records.reader.file.content_hash(), count, of.hexdigest())
            for records, count, of in zip(self._files, counts, hashes, strict=True))


def is_whole(source: Source) -> bool:
    """Whether every sample of a file is taken once."""
    return source.rate_percent == 100 and source.num_samples is None


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
