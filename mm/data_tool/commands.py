"""The commands of ``mm-data``, each a function of its flags in ``mm.data_tool.flags``."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mm.config.data import read_data
from mm.config.model import ModelConfig, read_model
from mm.config.notes import NoEffect
from mm.data.encode.chat import load_tokenizer
from mm.data.index.dataset import Dataset, datasets
from mm.data.index.measure import Gauge
from mm.data.index.sample_files import Split
from mm.data_tool.flags import CheckFlags, DataFlags, MockFlags, ShowFlags
from mm.data_tool.show import Shown
from mm.data_tool.survey import damaged_samples, survey
from mm.errors import MAX_PROBLEMS, UserError, counted, refuse
from mm.progress import ongoing
from mm.report import check_page, write_page


def _check(flags: CheckFlags) -> None:
    check_page(flags.html)
    problems: list[str] = []
    splits, gauge, model = _measured(flags, problems, flags.again)
    if splits:
        damaged = damaged_samples(splits, gauge.encoder) if flags.deep else []
        with ongoing("computing the statistics"):
            report = survey(flags.mm_data, splits, model, flags.seq_length, damaged)
        report = dataclasses.replace(report, notes=(*report.notes, *_key_notes(flags.mm_data)))
        print(report.text())
        if flags.html is not None:
            print("\n" + write_page(flags.html, report.html()))
        if count := len(report.problems):
            listed = "" if count <= MAX_PROBLEMS or flags.html else (
                f", of which {MAX_PROBLEMS} are shown (--html PAGE lists all)")
            problems.append(f"{counted(count, 'problem')}{listed}; repair or remove these samples, or train "
                            f"with --bad-sample skip")
    refuse(problems)


def _key_notes(path: str) -> Iterator[str]:
    """Notes about the keys of the data JSON ``path``: above all, which have no effect, and why."""
    notes = read_data(path).notes
    yield from notes
    if any(isinstance(note, NoEffect) for note in notes):
        yield f"all other keys of {path} are used, or have the only value that is possible here"


def _measured(
    flags: DataFlags, problems: list[str], again: bool = False
) -> tuple[Mapping[Split, Dataset], Gauge, ModelConfig]:
    """The usable training and validation samples; unusable ones are listed in the datasets.

    A split without usable samples is left out, and its errors are added to ``problems``.
    """
    data, model = read_data(flags.mm_data).value, read_model(flags.mm_model).value
    data = dataclasses.replace(data, overwrite_cache=again or data.overwrite_cache)
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
    print(shown.text())
    if flags.html is not None:
        print("\n" + write_page(flags.html, shown.html()))


def _mock(flags: MockFlags) -> None:
    print(f"written: {flags.write(flags.output, load_tokenizer(flags.tokenizer) if flags.tokenizer else None)}")


_COMMANDS: Mapping[type, Callable[[Any], None]] = {
    CheckFlags: _check, ShowFlags: _show, MockFlags: _mock}


def run(flags: DataFlags | MockFlags) -> None:
    """Run the command that the flags belong to; raises UserError for errors that the user can fix."""
    _COMMANDS[type(flags)](flags)
