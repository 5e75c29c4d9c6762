"""The commands of ``mm-data``.

Turns flags into calls, and errors into messages with exit status 2.  To add a command, write a function like those
below that adds its parser, and list it in ``_COMMANDS``.
"""

import argparse
import dataclasses
import sys
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
from mm.data.index.dataset import Dataset, datasets, notes_of
from mm.data.index.gauge import Gauge
from mm.data.index.sample_files import SPLITS, Split
from mm.data_tool.kinds import pictures_by_kind
from mm.data_tool.llava import convert_llava, summary
from mm.data_tool.mock import HELP, Mock
from mm.data_tool.show import Shown
from mm.data_tool.survey import MediaFindings, look, survey
from mm.environment import version_line
from mm.errors import MAX_PROBLEMS, UserError, counted, printable, refuse
from mm.process import print_notes, refused
from mm.progress import ongoing
from mm.report import check_page, write_page


def _add_index(commands: Any) -> None:
    parser = commands.add_parser(
        "index", help="check and measure all samples beforehand, so that training starts at once",
        description="Checks all samples and keeps the result, as the trainer does at its first start. The next start "
                    "with this data JSON, model JSON and --seq-length uses it.")
    _add_needed(parser)
    made = parser.add_argument_group("How the index is made")
    made.add_argument("--again", action="store_true", help="create it again, for example after images have changed")
    made.add_argument("--num-workers", type=positive_count,
                      help="processes (default: preprocessing_num_workers of the data JSON, else one per CPU)")
    made.add_argument("--bad-sample", choices=("error", "skip"), default="error",
                      help="as in training (default: %(default)s)")
    _add_seed(made)
    parser.set_defaults(run=_index)


def _add_needed(parser: argparse.ArgumentParser) -> None:
    needed = parser.add_argument_group(NEEDED)
    needed.add_argument("--mm-data", required=True, help="the data JSON")
    needed.add_argument("--mm-model", required=True, help="the model JSON")
    needed.add_argument("--seq-length", required=True, type=positive_count,
                        help="as in training: samples are truncated here")


def _add_seed(group: Any) -> None:
    group.add_argument("--seed", type=_seed, default=DEFAULT_SEED,
                       help="as in training: draws the samples of a rate (%%) and of val_rate (default: %(default)s)")


def _seed(text: str) -> int:
    """Parse ``--seed``; argparse reports the error."""
    number = whole_number(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"is {text[:80]!r}; expected an integer of at least 0")
    return number


def _index(flags: argparse.Namespace) -> None:
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


def _add_convert(commands: Any) -> None:
    formats = commands.add_parser("convert", help="convert records to another format").add_subparsers(
        required=True, metavar="FORMAT")
    parser = formats.add_parser("llava", help="LLaVA's conversations to MindSpeed-MM's messages",
                                description="Optional: the trainer also reads LLaVA's files directly.")
    needed = parser.add_argument_group(NEEDED)
    needed.add_argument("--input", required=True, type=Path, help="LLaVA's records, as JSON or JSONL")
    needed.add_argument("--media-folder", required=True, help="folder of the images and videos in the records")
    needed.add_argument("--output", required=True, type=Path, help="must not exist; NAME.jsonl becomes JSONL")
    parser.set_defaults(run=_convert)


def _convert(flags: argparse.Namespace) -> None:
    done = convert_llava(flags.input, flags.output, flags.media_folder)
    print(printable(summary(done, flags.output, flags.media_folder)))


def _add_check(commands: Any) -> None:
    parser = commands.add_parser(
        "check", help="find all samples that cannot be used, and report statistics of the others",
        description="Reads all records and the headers of media; with --deep it also decodes all media. The exit "
                    "status is 2 if there are any problems.")
    _add_needed(parser)
    checked = parser.add_argument_group("What is checked and written")
    checked.add_argument("--deep", action="store_true", help="decode all images and videos, as training does")
    checked.add_argument("--html", type=Path, help="also write the report with histograms to this HTML file")
    _add_seed(checked)
    parser.set_defaults(run=_check)


def _add_stats(commands: Any) -> None:
    parser = commands.add_parser("stats", help="report statistics of samples, and how samplers would distribute them",
                                 description="The statistics of mm-data check, for the samples that can be used.")
    _add_needed(parser)
    _add_seed(parser.add_argument_group("Which samples"))
    parser.set_defaults(run=_stats)


def _check(flags: argparse.Namespace) -> None:
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


def _stats(flags: argparse.Namespace) -> None:
    problems: list[str] = []
    splits, _, model = _measured(flags, problems)
    if splits:
        with ongoing("computing the statistics"):
            report = survey(flags.mm_data, splits, model, flags.seq_length, MediaFindings())
        print(dataclasses.replace(report, problems=()).text())
    refuse(problems)


def _measured(flags: argparse.Namespace, problems: list[str]) -> tuple[Mapping[Split, Dataset], Gauge, ModelConfig]:
    """The usable training and validation samples; unusable ones are listed in the datasets.

    A split without usable samples is left out, and its errors are added to ``problems``.
    """
    data, model = read_data(flags.mm_data).value, read_model(flags.mm_model).value
    gauge = Gauge.from_config(data, model, flags.seq_length)
    return datasets(data, problems, True, gauge, flags.seed), gauge, model


def _add_show(commands: Any) -> None:
    parser = commands.add_parser(
        "show", help="show a sample as the model sees it",
        description="Its tokens, with the target tokens marked; --html also shows its images after resizing.")
    _add_needed(parser)
    shown = parser.add_argument_group("Which sample, and where")
    shown.add_argument("--sample", type=int, default=0,
                       help="index of the sample in its split, counted from 0 (default: %(default)s)")
    shown.add_argument("--split", "--part", choices=SPLITS, default="training",
                       help="its split; earlier versions called it --part (default: %(default)s)")
    shown.add_argument("--html", type=Path, help="HTML file to write, with images and frames")
    _add_seed(shown)
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
    print(shown.text(sys.stdout.isatty()))
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


_COMMANDS = (_add_check, _add_stats, _add_show, _add_index, _add_convert, _add_mock)


def run(words: Sequence[str]) -> int:
    """Run one command.  Returns the exit status: 0, or 2 for errors that the user can fix."""
    parser = argparse.ArgumentParser(prog="mm-data", description="Checks, measures and converts data files.")
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
