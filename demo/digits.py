"""Writes scikit-learn's 1,797 scanned handwritten digits as PNG files, short videos of them, and a dataset in
MindSpeed-MM's JSON form.

The scans come with the scikit-learn package (test set of the UCI "Optical Recognition of Handwritten Digits"), so
nothing is downloaded.  Independent of the trainer.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import ColorRange
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.utils import Bunch

PICTURE_SIDE = 84
"""Pixels: three merged tokens of 28 pixels each way, so windows of 56 pixels come in all four border shapes."""
QUESTION = "<image>Which digit is this?"
TWO_PICTURES_QUESTION = "<image><image>Which two digits are these?"
VIDEO_QUESTION = "<video>Which two digits are shown, in turn?"
FRAMES_PER_SECOND = 2
"""The rate at which the trainer samples, so it takes all frames."""
FRAMES_PER_DIGIT = 2
"""The ViT processes pairs of frames: each pair shows one digit in two places."""
NUM_HELD_OUT = 360
NUM_MOVED = 3
"""Extra pictures per training scan, slightly shifted and rotated: 1,437 scans alone are soon memorised."""
_MAX_SHIFT_PIXELS = 6
_MAX_TURN_DEGREES = 10.0
_MAX_STEP_PIXELS = 2  # of a digit, from one frame of a video to the next
NUM_TWO_PICTURES = 60
NUM_VIDEOS = 120
NUM_HELD_OUT_VIDEOS = 60
NUM_TEXT_ONLY = 30
_MAX_INK = 16  # load_digits counts inked pixels of a 4x4 block


@dataclass(frozen=True)
class DigitsDataset:
    """Where the files are; media paths in the JSON files ``train`` and ``held_out`` are relative to ``directory``."""

    directory: Path
    train: Path
    held_out: Path


def write(directory: Path, seed: int, *, num_held_out_samples: int | None = None) -> DigitsDataset:
    """Write the pictures, the videos and both JSON files into ``directory``.

    The split is random by scan, so training and held-out scans share writers.  The training part has one sample per
    scan, ``NUM_MOVED`` more with it moved, ``NUM_TWO_PICTURES`` samples with two scans, ``NUM_VIDEOS`` with a video of
    two, and ``NUM_TEXT_ONLY`` without any.  The held-out part has one sample per scan and ``NUM_HELD_OUT_VIDEOS``
    with a video, alternating while both last; only the first ``num_held_out_samples`` of them if that is given.
    """
    scans = load_digits()
    assert isinstance(scans, Bunch), "a tuple comes only on request"
    (directory / "pictures").mkdir(parents=True, exist_ok=True)
    pictures = [picture(scan) for scan in scans.images]
    names = [f"pictures/{index:04d}.png" for index in range(len(pictures))]
    for name, one in zip(names, pictures, strict=True):
        _save(one, directory / name)
    digits = [int(digit) for digit in scans.target]

    order = list(range(len(names)))
    rng = random.Random(seed)
    rng.shuffle(order)
    train, held_out = order[NUM_HELD_OUT:], order[:NUM_HELD_OUT]
    samples = [_one_picture(names[index], digits[index]) for index in train]
    for index in train:
        for number in range(NUM_MOVED):
            name = f"pictures/{index:04d}_moved{number}.png"
            _save(_moved(pictures[index], rng), directory / name)
            samples.append(_one_picture(name, digits[index]))
    for _ in range(NUM_TWO_PICTURES):
        left, right = rng.sample(train, 2)
        both = f"{digits[left]} and {digits[right]}"
        samples.append(sample(TWO_PICTURES_QUESTION, both, images=[names[left], names[right]]))
    samples += [_counting(rng.randrange(9)) for _ in range(NUM_TEXT_ONLY)]
    videos = [_video(directory, pictures, digits, pool, rng) for pool, count in
              ((train, NUM_VIDEOS), (held_out, NUM_HELD_OUT_VIDEOS)) for _ in range(count)]
    samples += videos[:NUM_VIDEOS]
    rng.shuffle(samples)

    dataset = DigitsDataset(directory, directory / "train.json", directory / "held_out.json")
    write_samples(dataset.train, samples)
    asked = [_one_picture(names[index], digits[index]) for index in held_out]
    in_turn = [sample for both in zip_longest(asked, videos[NUM_VIDEOS:]) for sample in both if sample is not None]
    write_samples(dataset.held_out, in_turn[:num_held_out_samples])
    return dataset


def texts(path: Path) -> list[str]:
    """Every message of a dataset file, for training a tokenizer."""
    samples = json.loads(path.read_text(encoding="utf-8"))
    return [message["content"] for sample in samples for message in sample["messages"]]


def picture(scan: np.ndarray) -> Image.Image:
    """An 8x8 scan (ink from 0 to 16) as a grey picture of ``PICTURE_SIDE`` pixels, white ink on black."""
    grey = Image.fromarray(np.round(scan * (255 / _MAX_INK)).astype(np.uint8))
    return grey.resize((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.BICUBIC)


def _save(picture: Image.Image, path: Path) -> None:
    """Write a PNG file in the quickest way: of 6,108 small pictures, the compression takes longest."""
    picture.save(path, compress_level=1)


def _moved(scan: Image.Image, rng: random.Random) -> Image.Image:
    shift = (rng.randint(-_MAX_SHIFT_PIXELS, _MAX_SHIFT_PIXELS), rng.randint(-_MAX_SHIFT_PIXELS, _MAX_SHIFT_PIXELS))
    turn = rng.uniform(-_MAX_TURN_DEGREES, _MAX_TURN_DEGREES)
    return scan.rotate(turn, Image.Resampling.BICUBIC, translate=shift)


def _video(
    directory: Path, pictures: Sequence[Image.Image], digits: Sequence[int], pool: Sequence[int], rng: random.Random
) -> dict:
    """A sample with a video of two scans from ``pool``, one after the other, each moving slightly."""
    shown = rng.sample(pool, 2)
    name = "videos/" + "_".join(f"{index:04d}" for index in shown) + ".mp4"
    frames = []
    for index in shown:
        x, y, *steps = (rng.randint(-_MAX_STEP_PIXELS, _MAX_STEP_PIXELS) for _ in range(4))
        for number in range(FRAMES_PER_DIGIT):
            shift = (x + number * steps[0], y + number * steps[1])
            frames.append(pictures[index].rotate(0, translate=shift))
    write_video(directory / name, frames)
    first, second = (digits[index] for index in shown)
    return sample(VIDEO_QUESTION, f"{first} then {second}", videos=[name])


def write_video(path: Path, frames: Sequence[Image.Image]) -> None:
    """Write grey frames as lossless H.264, so that every decoder returns them exactly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND, options={"qp": "0"})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuvj420p"
        stream.codec_context.color_range = ColorRange.JPEG
        for frame in frames:
            picture_of_video = av.VideoFrame.from_ndarray(np.asarray(frame), format="gray")
            picture_of_video.color_range = ColorRange.JPEG  # black 0, white 255; otherwise grey values are rounded
            container.mux(stream.encode(picture_of_video))
        container.mux(stream.encode(None))


def _one_picture(name: str, digit: int) -> dict:
    return sample(QUESTION, str(digit), images=[name])


def _counting(number: int) -> dict:
    return sample(f"Which digit comes after {number}?", str(number + 1))


def sample(question: str, answer: str, *, images: Sequence[str] = (), videos: Sequence[str] = ()) -> dict:
    """A sample in MindSpeed-MM's format; media paths are relative to the JSON file."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": images, "videos": videos}


def write_samples(path: Path, samples: Sequence[dict]) -> None:
    """Write a dataset file."""
    path.write_text(json.dumps(samples, indent=1) + "\n", encoding="utf-8")
