"""Generated data of a given size, for trying out memory use and speed before the real data exist."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerBase

from mm.errors import refuse
from mm.progress import Progress

_WORDS = ("the", "a", "picture", "shows", "two", "red", "small", "house", "on", "green", "field", "and", "one", "old",
          "tree", "near", "water", "under", "open", "sky")  # fmt: skip
"""Each is one token of Qwen's tokenizer when preceded by a space."""

HELP = "help"
"""The key under which each field of ``Mock`` says what it means, for the help of its flag."""


@dataclass(frozen=True)
class Mock:
    """The size of a generated dataset.  All samples have the same size, and no two are equal."""

    num_samples: int = field(default=100, metadata={HELP: "samples"})
    num_images: int = field(default=1, metadata={HELP: "images of each sample"})
    width: int = field(default=640, metadata={HELP: "pixels of an image from left to right"})
    height: int = field(default=480, metadata={HELP: "pixels of an image from top to bottom"})
    text_length: int = field(default=256, metadata={HELP: "words of each answer, or tokens with --tokenizer"})
    num_pictures: int = field(default=16, metadata={HELP: "different image files, which the samples share"})
    seed: int = field(default=1234, metadata={HELP: "draws images and texts"})

    def write(self, directory: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
        """Write ``data.jsonl`` and ``images/`` to ``directory``; returns the path of the former.

        Raises UserError if ``data.jsonl`` already exists, and for invalid sizes.
        """
        target = directory / "data.jsonl"
        least = dict.fromkeys(("num_samples", "width", "height", "text_length", "num_pictures"), 1) | dict.fromkeys(
            ("num_images", "seed"), 0)
        refuse([f"{name} is {getattr(self, name)}; expected at least {bound}" for name, bound in least.items()
                if getattr(self, name) < bound])
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
                tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        answer = _text(self.text_length, random, tokenizer)
        return {"id": number, "images": images, "messages": [
            {"role": "user", "content": "<image>" * len(images) + f"Question {number}: what is there to be seen?"},
            {"role": "assistant", "content": answer}]}


def _text(length: int, random: np.random.Generator, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Random words, cut to ``length``."""
    words = [_WORDS[index] for index in random.integers(0, len(_WORDS), length)]
    if tokenizer is None:
        return " ".join(words)
    while len(ids := tokenizer(" ".join(words), add_special_tokens=False)["input_ids"]) < length:
        words += words
    return str(tokenizer.decode(ids[:length]))
