"""``mm-data``: checks, measures and converts data files, independent of training.

    mm-data index --mm-data data.json --mm-model model.json --seq-length 8192
    mm-data check --mm-data data.json --mm-model model.json --seq-length 8192 --deep --html report.html
    mm-data show --mm-data data.json --mm-model model.json --seq-length 8192 --sample 3 --html sample.html
    mm-data mock --output ./data/mock --num-samples 1000 --num-images 2
    mm-data convert llava --input llava.json --media-folder ./data/COCO2017/train2017 --output samples.json

The commands themselves are in ``mm.data_tool.commands``, which loads torch.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from mm.config.command_line import CommandLine, Commands
from mm.config.flags import DEFAULT_SEED
from mm.config.foreign import Fixed
from mm.config.schema import STRICT, Count, Group, NaturalNumber, PathText, Seed
from mm.data_tool.mock import Mock
from mm.ending import run_command


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataFlags:
    """What the commands that read data need."""

    mm_data: PathText = Field(description="the data JSON")
    mm_model: PathText = Field(description="the model JSON")
    seq_length: Count = Field(description="as in training: samples are truncated here")
    seed: Seed = Field(DEFAULT_SEED, description="as in training: draws the samples of a rate (%) and of val_rate")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class IndexFlags(DataFlags):
    """``mm-data index``."""

    again: Annotated[bool, Group("How the index is made")] = Field(
        False, description="create it again, for example after images have changed")
    num_workers: Count | None = Field(
        None, description="processes; absent = preprocessing_num_workers of the data JSON, else one per CPU")
    bad_sample: Literal["error", "skip"] = Field("error", description="as in training")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckFlags(DataFlags):
    """``mm-data check``."""

    deep: bool = Field(False, description="decode all images and videos, as training does")
    html: Path | None = Field(None, description="also write the report with histograms to this HTML file")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StatsFlags(DataFlags):
    """``mm-data stats``."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ShowFlags(DataFlags):
    """``mm-data show``."""

    sample: NaturalNumber = Field(0, description="index of the sample in its split, counted from 0")
    split: Literal["training", "validation"] = Field("training", description="its split")
    html: Path | None = Field(None, description="HTML file to write, with images and frames")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LlavaFlags:
    """``mm-data convert llava``."""

    input: Path = Field(description="LLaVA's records, as JSON or JSONL")
    media_folder: str = Field(description="folder of the images and videos in the records")
    output: Path = Field(description="must not exist; NAME.jsonl becomes JSONL")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MockFlags(Mock):
    """``mm-data mock``."""

    output: Path = Field(description="directory for data.jsonl and images/")
    tokenizer: str | None = Field(None, description="Hugging Face directory, whose tokens --text-length counts")


COMMANDS = Commands("mm-data", "Checks, measures and converts data files.", {
    "check": CommandLine(
        "mm-data check", "Find all samples that cannot be used, and report statistics of the others: reads all records "
        "and the headers of media; with --deep it also decodes all media.  The exit status is 2 if there are any "
        "problems.", CheckFlags),
    "stats": CommandLine(
        "mm-data stats", "Report statistics of samples, and how samplers would distribute them.", StatsFlags),
    "show": CommandLine(
        "mm-data show", "Show a sample as the model sees it: its tokens, with the target tokens marked.", ShowFlags,
        foreign={"--part": Fixed((), "write --split")}),
    "index": CommandLine(
        "mm-data index", "Check and measure all samples beforehand, so that training with this data JSON, model JSON "
        "and --seq-length starts at once.", IndexFlags),
    "convert": Commands("mm-data convert", "Convert records to another format.", {
        "llava": CommandLine(
            "mm-data convert llava", "LLaVA's conversations to MindSpeed-MM's messages.  Optional: the trainer also "
            "reads LLaVA's files directly.", LlavaFlags)}),
    "mock": CommandLine(
        "mm-data mock", "Generate random images and texts, for trying out memory use and speed.", MockFlags),
})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.  Returns the exit status: 0, 2 for errors that the user can fix, or 130 after Ctrl-C."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv),
                       lambda: "finished indexes and pages are kept; run the same command again for the rest")


def _run(words: Sequence[str]) -> int:
    from mm.progress import loading

    flags = COMMANDS.read(words)
    with loading():
        from mm.data_tool import commands

    commands.run(flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
