"""The flags of ``mm-data``; without torch, for its help."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from mm.config.args import DEFAULT_SEED
from mm.config.parse import STRICT, Count, NaturalNumber, PathText, Seed


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataFlags:
    """What the commands that read data need."""

    mm_data: PathText = Field(description="the data JSON")
    mm_model: PathText = Field(description="the model JSON")
    seq_length: Count = Field(description="as in training: samples are truncated here")
    seed: Seed = Field(DEFAULT_SEED, description="as in training: draws the samples of a rate (%) and of val_rate")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckFlags(DataFlags):
    """``mm-data check``."""

    deep: bool = Field(False, description="decode all images and videos, as training does")
    again: bool = Field(False, description="create the index again, for example after images have changed")
    html: Path | None = Field(None, description="also write the report with histograms to this HTML file")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ShowFlags(DataFlags):
    """``mm-data show``."""

    sample: NaturalNumber = Field(0, description="index of the sample in its split, counted from 0")
    split: Literal["training", "validation"] = Field("training", description="its split")
    html: Path | None = Field(None, description="HTML file to write, with images and frames")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MockFlags:
    """``mm-data mock``: all samples have the same size, and no two are equal."""

    num_samples: Count = Field(default=100, description="samples")
    num_images: NaturalNumber = Field(default=1, description="images of each sample")
    width: Count = Field(default=640, description="pixels of an image from left to right")
    height: Count = Field(default=480, description="pixels of an image from top to bottom")
    text_length: Count = Field(default=256, description="words of each answer, or tokens with --tokenizer")
    num_pictures: Count = Field(default=16, description="different image files, which the samples share")
    seed: Seed = Field(default=1234, description="draws images and texts")
    output: Path = Field(description="directory for data.jsonl and images/")
    tokenizer: str | None = Field(default=None, description="Hugging Face directory, whose tokens --text-length counts")
