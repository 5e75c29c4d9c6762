"""Generated data of a given size, for trying out memory use and speed before the real data exist."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from pydantic import Field
from pydantic.dataclasses import dataclass

from mm.config.schema import STRICT, Count, NaturalNumber, Seed
from mm.console import Progress
from mm.errors import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORDS = ("the", "a", "picture", "shows", "two", "red", "small", "house", "on", "green", "field", "and", "one", "old",
          "tree", "near", "water", "under", "open", "sky")  # fmt: skip
"""Each is one token of Qwen's tokenizer when preceded by a space."""

@dataclass(frozen=True, config=STRICT)
class Mock:
    """The size of a generated dataset.  All samples have the same size, and no two are equal."""

    num_samples: Count = Field(default=100, description="samples")
    num_images: NaturalNumber = Field(default=1, description="images of each sample")
    width: Count = Field(default=640, description="pixels of an image from left to right")
    height: Count = Field(default=480, description="pixels of an image from top to bottom")
    text_length: Count = Field(default=256, description="words of each answer, or tokens with --tokenizer")
    num_pictures: Count = Field(default=16, description="different image files, which the samples share")
    seed: Seed = Field(default=1234, description="draws images and texts")

    def write(self, directory: Path, tokenizer: "PreTrainedTokenizerBase | None" = None) -> Path:
        """Write ``data.jsonl`` and ``images/`` to ``directory``; returns the path of the former.

        Raises UserError if ``data.jsonl`` already exists.
        """
        target = directory / "data.jsonl"
        refuse([f"{target} already exists; give another directory, or remove it"] if target.exists() else [])
        (directory / "images").mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(self.seed)
        names = [f"images/{number:05}.jpg" for number in range(self.num_pictures if self.num_images else 0)]
        for name in Progress("drawing pictures", len(names), "pictures").each(names):
            coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
            coarse.resize((self.width, self.height), Image.Resampling.BICUBIC).save(directory / name, quality=90)
        with open(target, "w", encoding="utf-8") as stream:
            for number in Progress("writing samples", self.num_samples, "samples").each(range(self.num_samples)):
                images = [names[(number * self.num_images + at) % len(names)] for at in range(self.num_images)]
                stream.write(json.dumps(self._record(number, images, random, tokenizer)) + "\n")
        return target

    def _record(self, number: int, images: list[str], random: np.random.Generator,
                tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, Any]:
        answer = _text(self.text_length, random, tokenizer)
        return {"id": number, "images": images, "messages": [
            {"role": "user", "content": "<image>" * len(images) + f"Question {number}: what is there to be seen?"},
            {"role": "assistant", "content": answer}]}


def _text(length: int, random: np.random.Generator, tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """Random words, cut to ``length``."""
    words = [_WORDS[index] for index in random.integers(0, len(_WORDS), length)]
    if tokenizer is None:
        return " ".join(words)
    while len(ids := tokenizer(" ".join(words), add_special_tokens=False)["input_ids"]) < length:
        words += words
    return str(tokenizer.decode(ids[:length]))
