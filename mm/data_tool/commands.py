"""The commands of ``mm-data``, each a function of its flags in ``mm.data_tool.cli``."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mm.config.data import read_data
from mm.config.model import ModelConfig, read_model
from mm.config.notes import NoEffect
from mm.data.encode.chat import load_tokenizer
from mm.data.index.dataset import Dataset, datasets, notes_of
from mm.data.index.gauge import Gauge
from mm.data.index.sample_files import Split
from mm.data_tool.flags import CheckFlags, DataFlags, IndexFlags, LlavaFlags, MockFlags, ShowFlags, StatsFlags
from mm.data_tool.kinds import pictures_by_kind
from mm.data_tool.llava import convert_llava, summary
from mm.data_tool.show import Shown
from mm.data_tool.survey import MediaFindings, look, survey
from mm.errors import MAX_PROBLEMS, UserError, counted, printable, refuse
from mm.process import print_notes
from mm.progress import ongoing
from mm.report import check_page, write_page


def _index(flags: IndexFlags) -> None:
    """Create the index of the training and validation samples, and print a summary."""
    data, model = read_data(flags.mm_data).value, read_model(flags.mm_model).value
    data = dataclasses.replace(
        data, overwrite_cache=flags.again or data.overwrite_cache,
        preprocessing_num_workers=flags.num_workers or data.preprocessing_num_workers)
    gauge, skips_bad = Gauge.from_config(data, model, flags.seq_length), flags.bad_sample == "skip"
    problems: list[str] = []
    splits = datasets(data, problems, skips_bad, gauge, flags.seed)
    refuse(problems)
    for name, dataset in splits.items():
        lengths = dataset.lengths
        print(f"{name}: {counted(len(dataset), 'sample')}, {lengths.num_tokens.sum(dtype='int64'):,} tokens (at most "
              f"{lengths.num_tokens.max():,} in one), {lengths.num_media.sum(dtype='int64'):,} images and videos of "
              f"{lengths.num_patches.sum(dtype='int64'):,} patches")
    left_out = (f"left out: {one.message()}" for dataset in splits.values() for one in dataset.skipped)
    print_notes(dict.fromkeys((*notes_of(splits), *left_out)))


def _convert(flags: LlavaFlags) -> None:
    done = convert_llava(flags.input, flags.output, flags.media_folder)
    print(printable(summary(done, flags.output, flags.media_folder)))


def _check(flags: CheckFlags) -> None:
    check_page(flags.html)
    problems: list[str] = []
    splits, gauge, model = _measured(flags, problems)
    if splits:
        looked = look(splits, gauge.encoder, flags.deep)
        with ongoing("computing the statistics"):
            report = survey(flags.mm_data, splits, model, flags.seq_length, looked)
        report = dataclasses.replace(report, notes=(*report.notes, *_key_notes(flags.mm_data)))
        print(report.text())
        if flags.html is not None:
            print("\n" + write_page(flags.html, report.html(pictures_by_kind(report.problems))))
        if count := len(report.problems):
            listed = "" if count <= MAX_PROBLEMS or flags.html else (
                f", of which {MAX_PROBLEMS} are shown (--html PAGE lists all)")
            problems.append(f"{count:,} problem{'s' * (count != 1)}{listed}; repair or remove these samples, or train "
                            f"with --bad-sample skip")
    refuse(problems)


def _key_notes(path: str) -> Iterator[str]:
    """Notes about the keys of the data JSON ``path``: above all, which have no effect, and why."""
    notes = read_data(path).notes
    yield from notes
    if any(isinstance(note, NoEffect) for note in notes):
        yield f"all other keys of {path} are used, or have the only value that is possible here"


def _stats(flags: StatsFlags) -> None:
    problems: list[str] = []
    splits, _, model = _measured(flags, problems)
    if splits:
        with ongoing("computing the statistics"):
            report = survey(flags.mm_data, splits, model, flags.seq_length, MediaFindings())
        print(dataclasses.replace(report, problems=()).text())
    refuse(problems)


def _measured(flags: DataFlags, problems: list[str]) -> tuple[Mapping[Split, Dataset], Gauge, ModelConfig]:
    """The usable training and validation samples; unusable ones are listed in the datasets.

    A split without usable samples is left out, and its errors are added to ``problems``.
    """
    data, model = read_data(flags.mm_data).value, read_model(flags.mm_model).value
    gauge = Gauge.from_config(data, model, flags.seq_length)
    return datasets(data, problems, True, gauge, flags.seed), gauge, model


def _show(flags: ShowFlags) -> None:
    check_page(flags.html)
    problems: list[str] = []
    splits, gauge, _ = _measured(flags, problems)
    dataset = splits.get(flags.split)
    if dataset is None:
        raise UserError(
            problems or f"--split is {flags.split}, but {flags.mm_data} has neither val_dataset nor val_rate")
    refuse([] if 0 <= flags.sample < len(dataset) else [
        f"--sample is {flags.sample}; there are {len(dataset)} samples for {flags.split}, counted from 0"])
    shown = Shown.of(dataset[flags.sample], gauge.encoder)
    print(shown.text(sys.stdout.isatty()))
    if flags.html is not None:
        print("\n" + write_page(flags.html, shown.html()))


def _mock(flags: MockFlags) -> None:
    print(f"written: {flags.write(flags.output, load_tokenizer(flags.tokenizer) if flags.tokenizer else None)}")


_COMMANDS: Mapping[type, Callable[[Any], None]] = {
    CheckFlags: _check, StatsFlags: _stats, ShowFlags: _show, IndexFlags: _index, LlavaFlags: _convert,
    MockFlags: _mock}  # fmt: skip


def run(flags: DataFlags | LlavaFlags | MockFlags) -> None:
    """Run the command that the flags belong to; raises UserError for errors that the user can fix."""
    _COMMANDS[type(flags)](flags)
