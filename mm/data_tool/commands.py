"""The commands of ``mm-data``.

Turns flags into calls, and errors into messages with exit status 2.  To add a command, write a function like those
below that adds its parser, and list it in ``_COMMANDS``.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm.config.data import read_data
from mm.config.flags import DEFAULT_SEED
from mm.config.misspelt import parse
from mm.config.model import ModelConfig, read_model
from mm.config.notes import NoEffect
from mm.console import NEEDED, add_common_flags, positive_count, whole_number
from mm.data.encode.chat import load_tokenizer
from mm.data.index.dataset import Dataset, datasets
from mm.data.index.gauge import Gauge
from mm.data.index.sample_files import SPLITS, Split
from mm.data_tool.mock import HELP, Mock
from mm.data_tool.show import Shown
from mm.data_tool.survey import damaged_samples, survey
from mm.environment import version_line
from mm.errors import MAX_PROBLEMS, UserError, refuse
from mm.process import refused
from mm.progress import ongoing
from mm.report import check_page, write_page


def _add_command(commands: Any, names: Sequence[str], *, help: str, description: str) -> Any:
    """Add a command about the samples of a data JSON; returns the group of its optional flags."""
    parser = commands.add_parser(names[0], aliases=names[1:], help=help, description=description)
    needed = parser.add_argument_group(NEEDED)
    needed.add_argument("--mm-data", required=True, help="the data JSON")
    needed.add_argument("--mm-model", required=True, help="the model JSON")
    needed.add_argument("--seq-length", required=True, type=positive_count,
                        help="as in training: samples are truncated here")
    optional = parser.add_argument_group("Settings")
    optional.add_argument("--seed", type=_seed, default=DEFAULT_SEED,
                          help="as in training: draws samples of a rate (%%) and of val_rate (default: %(default)s)")
    return optional


def _seed(text: str) -> int:
    """Parse ``--seed``; argparse reports the error."""
    number = whole_number(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"is {text[:80]!r}; expected an integer of at least 0")
    return number


def _add_check(commands: Any) -> None:
    parser = _add_command(
        commands, ("check", "index", "stats"),
        help="find all samples that cannot be used, report statistics of the others, and keep the index for training",
        description="Reads all records and the headers of media; with --deep it also decodes all media. The next start "
                    "of training with this data JSON, model JSON and --seq-length uses the index. The exit status is 2 "
                    "if there are any problems.")
    parser.add_argument("--again", action="store_true", help="create the index again, as after images have changed")
    parser.add_argument("--deep", action="store_true", help="decode all images and videos, as training does")
    parser.add_argument("--html", type=Path, help="also write the report with histograms to this HTML file")
    parser.set_defaults(run=_check)


def _check(flags: argparse.Namespace) -> None:
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
            problems.append(f"{count:,} problem{'s' * (count != 1)}{listed}; repair or remove these samples, or train "
                            f"with --bad-sample skip")
    refuse(problems)


def _key_notes(path: str) -> Iterator[str]:
    """Notes about the keys of the data JSON ``path``: above all, which have no effect, and why."""
    notes = read_data(path).notes
    yield from notes
    if any(isinstance(note, NoEffect) for note in notes):
        yield f"all other keys of {path} are used, or have the only value that is possible here"


def _measured(
    flags: argparse.Namespace, problems: list[str], again: bool = False
) -> tuple[Mapping[Split, Dataset], Gauge, ModelConfig]:
    """The usable training and validation samples; unusable ones are listed in the datasets.

    A split without usable samples is left out, and its errors are added to ``problems``.
    """
    data, model = read_data(flags.mm_data).value, read_model(flags.mm_model).value
    data = dataclasses.replace(data, overwrite_cache=again or data.overwrite_cache)
    gauge = Gauge.from_config(data, model, flags.seq_length)
    return datasets(data, problems, True, gauge, flags.seed), gauge, model


def _add_show(commands: Any) -> None:
    parser = _add_command(commands, ("show",), help="show a sample as the model sees it",
                          description="Its tokens, with target tokens marked; --html also shows its resized images.")
    parser.add_argument("--sample", type=int, default=0,
                        help="index of the sample in its split, counted from 0 (default: %(default)s)")
    parser.add_argument("--split", choices=SPLITS, default="training", help="its split (default: %(default)s)")
    parser.add_argument("--html", type=Path, help="HTML file to write, with images and frames")
    parser.set_defaults(run=_show)


def _show(flags: argparse.Namespace) -> None:
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


def _add_mock(commands: Any) -> None:
    parser = commands.add_parser("mock", help="generate data of a given size",
                                 description="Random images and texts, for trying out memory use and speed.")
    parser.add_argument_group(NEEDED).add_argument(
        "--output", required=True, type=Path, help="directory for data.jsonl and images/")
    sizes = parser.add_argument_group("Sizes")
    for one in dataclasses.fields(Mock):
        sizes.add_argument(f"--{one.name.replace('_', '-')}", type=int, default=one.default,
                           help=f"{one.metadata[HELP]} (default: %(default)s)")
    sizes.add_argument("--tokenizer", help="Hugging Face directory, whose tokens --text-length counts")
    parser.set_defaults(run=_mock)


def _mock(flags: argparse.Namespace) -> None:
    mock = Mock(**{one.name: getattr(flags, one.name) for one in dataclasses.fields(Mock)})
    print(f"written: {mock.write(flags.output, load_tokenizer(flags.tokenizer) if flags.tokenizer else None)}")


_COMMANDS = (_add_check, _add_show, _add_mock)


def run(words: Sequence[str]) -> int:
    """Run one command.  Returns the exit status: 0, or 2 for errors that the user can fix."""
    parser = argparse.ArgumentParser(prog="mm-data", description="Checks, measures and shows data files.")
    add_common_flags(parser, version_line(parser.prog), parser.prog)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    try:
        flags = parse(parser, words)
        flags.run(flags)
    except UserError as error:
        return refused(error)
    return 0
