"""Writes scikit-learn's 1,797 scanned handwritten digits as PNG files and a dataset in MindSpeed-MM's JSON form.

The scans come with the scikit-learn package (test set of the UCI "Optical Recognition of Handwritten Digits"), so
nothing is downloaded.  Knows nothing of the trainer.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

PICTURE_SIDE = 84
"""Pixels: three merged tokens of 28 pixels each way, so windows of 56 pixels come in all four border shapes."""
QUESTION = "<image>Which digit is this?"
TWO_PICTURES_QUESTION = "<image><image>Which two digits are these?"
NUM_HELD_OUT = 360
NUM_MOVED = 3
"""Further pictures of each training scan, a little shifted and turned: 1,437 scans alone are soon learnt by heart."""
_MAX_SHIFT_PIXELS = 6
_MAX_TURN_DEGREES = 10.0
NUM_TWO_PICTURES = 60
NUM_TEXT_ONLY = 30
_MAX_INK = 16  # load_digits counts inked pixels of a 4x4 block


@dataclass(frozen=True)
class DigitsDataset:
    """Where the files are; image paths in the JSON files ``train`` and ``held_out`` are relative to ``directory``."""

    directory: Path
    train: Path
    held_out: Path


def write(directory: Path, seed: int, *, num_held_out_samples: int | None = None) -> DigitsDataset:
    """Write the pictures and both JSON files into ``directory``.

    The split is random by scan, so training and held-out scans share writers.  The training part holds one sample per
    scan, ``NUM_MOVED`` more with it moved, ``NUM_TWO_PICTURES`` samples with two scans and ``NUM_TEXT_ONLY`` without
    any.  The held-out part has one sample per scan, and of those the first ``num_held_out_samples`` where it is given.
    """
    scans = load_digits()
    pictures = directory / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    names = []
    for index, scan in enumerate(scans.images):
        name = f"pictures/{index:04d}.png"
        picture(scan).save(directory / name)
        names.append(name)
    digits = [int(digit) for digit in scans.target]

    order = list(range(len(names)))
    rng = random.Random(seed)
    rng.shuffle(order)
    train, held_out = order[NUM_HELD_OUT:], order[:NUM_HELD_OUT][:num_held_out_samples]
    samples = [_one_picture(names[index], digits[index]) for index in train]
    for index in train:
        for number in range(NUM_MOVED):
            name = f"pictures/{index:04d}_moved{number}.png"
            _moved(picture(scans.images[index]), rng).save(directory / name)
            samples.append(_one_picture(name, digits[index]))
    for _ in range(NUM_TWO_PICTURES):
        left, right = rng.sample(train, 2)
        samples.append(
            _sample(TWO_PICTURES_QUESTION, f"{digits[left]} and {digits[right]}", [names[left], names[right]])
        )
    samples += [_counting(rng.randrange(9)) for _ in range(NUM_TEXT_ONLY)]
    rng.shuffle(samples)

    dataset = DigitsDataset(directory, directory / "train.json", directory / "held_out.json")
    _write_json(dataset.train, samples)
    _write_json(dataset.held_out, [_one_picture(names[index], digits[index]) for index in held_out])
    return dataset


def texts(path: Path) -> list[str]:
    """Every message of a dataset file, for training a tokenizer."""
    samples = json.loads(path.read_text(encoding="utf-8"))
    return [message["content"] for sample in samples for message in sample["messages"]]


def picture(scan: np.ndarray) -> Image.Image:
    """An 8x8 scan (ink from 0 to 16) as a grey picture of ``PICTURE_SIDE`` pixels, white ink on black."""
    grey = Image.fromarray(np.round(scan * (255 / _MAX_INK)).astype(np.uint8))
    return grey.resize((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.BICUBIC)


def _moved(scan: Image.Image, rng: random.Random) -> Image.Image:
    shift = (rng.randint(-_MAX_SHIFT_PIXELS, _MAX_SHIFT_PIXELS), rng.randint(-_MAX_SHIFT_PIXELS, _MAX_SHIFT_PIXELS))
    turn = rng.uniform(-_MAX_TURN_DEGREES, _MAX_TURN_DEGREES)
    return scan.rotate(turn, Image.Resampling.BICUBIC, translate=shift)


def _one_picture(name: str, digit: int) -> dict:
    return _sample(QUESTION, str(digit), [name])


def _counting(number: int) -> dict:
    return _sample(f"Which digit comes after {number}?", str(number + 1), [])


def _sample(question: str, answer: str, images: list[str]) -> dict:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": images}


def _write_json(path: Path, content: list) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
