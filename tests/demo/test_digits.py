"""The digits dataset: real scans, a clean split, and files that the trainer reads."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from demo import digits
from mm.config.data import read_data
from mm.data.dataset import Dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> digits.DigitsDataset:
    return digits.write(tmp_path_factory.mktemp("digits"), seed=0)


def read(path: Path) -> list[dict]:
    return json.loads(path.read_text())


def test_every_scan_is_a_picture_of_that_scan(dataset: digits.DigitsDataset):
    scans = load_digits()
    scanned = [path for path in (dataset.directory / "pictures").iterdir() if "moved" not in path.name]
    assert len(scanned) == len(scans.images) == 1797
    for index in (0, 1000, 1796):
        with Image.open(dataset.directory / f"pictures/{index:04d}.png") as picture:
            assert picture.size == (84, 84)
            shrunk = np.asarray(picture.resize((8, 8), Image.Resampling.BOX)) / 255 * 16
        correlation = np.corrcoef(shrunk.ravel(), scans.images[index].ravel())[0, 1]
        assert correlation > 0.95


def scan_of(name: str) -> int:
    """``pictures/0012.png`` and ``pictures/0012_moved1.png`` are of scan 12."""
    return int(Path(name).stem[:4])


def test_no_held_out_scan_is_trained_on_moved_or_not(dataset: digits.DigitsDataset):
    trained = {scan_of(name) for sample in read(dataset.train) for name in sample["images"]}
    held_out = {scan_of(name) for sample in read(dataset.held_out) for name in sample["images"]}
    assert len(held_out) == digits.NUM_HELD_OUT
    assert len(trained) == 1797 - digits.NUM_HELD_OUT
    assert not trained & held_out


def test_answers_are_the_labels(dataset: digits.DigitsDataset):
    labels = load_digits().target
    for sample in read(dataset.train) + read(dataset.held_out):
        shown = " and ".join(str(labels[scan_of(name)]) for name in sample["images"])
        if sample["images"]:
            assert sample["messages"][1] == {"role": "assistant", "content": shown}


def test_training_mixes_text_one_and_two_pictures(dataset: digits.DigitsDataset):
    counts = [len(sample["images"]) for sample in read(dataset.train)]
    assert counts.count(0) == digits.NUM_TEXT_ONLY
    assert counts.count(2) == digits.NUM_TWO_PICTURES
    assert counts.count(1) == (1797 - digits.NUM_HELD_OUT) * (1 + digits.NUM_MOVED)
    for sample in read(dataset.train):
        assert sample["messages"][0]["content"].count("<image>") == len(sample["images"])
    assert counts != sorted(counts)


def test_moved_pictures_differ_from_the_scan_and_stay_in_the_frame(dataset: digits.DigitsDataset):
    moved = sorted((dataset.directory / "pictures").glob("*_moved*.png"))
    assert len(moved) == (1797 - digits.NUM_HELD_OUT) * digits.NUM_MOVED
    for path in moved[::200]:
        with Image.open(path) as picture, Image.open(path.with_name(f"{path.stem[:4]}.png")) as scan:
            ink, original = np.asarray(picture, float), np.asarray(scan, float)
        assert ink.shape == original.shape
        assert not np.array_equal(ink, original)
        assert ink.sum() > 0.8 * original.sum()


def test_same_seed_same_files(dataset: digits.DigitsDataset, tmp_path: Path):
    again = digits.write(tmp_path / "same", seed=0)
    other = digits.write(tmp_path / "other", seed=1)
    assert again.train.read_bytes() == dataset.train.read_bytes()
    assert other.train.read_bytes() != dataset.train.read_bytes()


def test_fewer_held_out_samples_leave_the_training_part_as_it_is(dataset: digits.DigitsDataset, tmp_path: Path):
    few = digits.write(tmp_path, seed=0, num_held_out_samples=5)
    assert read(few.held_out) == read(dataset.held_out)[:5]
    assert read(few.train) == read(dataset.train)


def test_the_trainer_reads_it_with_the_columns_of_data_tiny_json(dataset: digits.DigitsDataset, tmp_path: Path):
    data = json.loads(Path("examples/qwen2.5vl/data_tiny.json").read_text())
    data["dataset_param"]["basic_parameters"] |= {
        "dataset": str(dataset.train), "dataset_dir": str(dataset.directory),
    }  # fmt: skip
    (tmp_path / "data.json").write_text(json.dumps(data))
    samples = Dataset(read_data(str(tmp_path / "data.json")).value)
    raw = read(dataset.train)
    assert len(samples) == len(raw)
    for index in (0, 700, len(raw) - 1):
        assert len(samples[index].media) == len(raw[index]["images"])
        assert samples[index].turns[-1].text == raw[index]["messages"][1]["content"]
