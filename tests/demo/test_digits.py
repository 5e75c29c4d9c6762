"""The digits dataset: real scans, a clean split, and files that the trainer reads."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from demo import digits
from demo.evaluate import read_video
from mm.config.data import read_data
from mm.data.index.dataset import Dataset


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


def scans_of(sample: dict) -> list[int]:
    """``pictures/0012.png`` and ``pictures/0012_moved1.png`` show scan 12, ``videos/0012_0034.mp4`` shows two."""
    pictures = [int(Path(name).stem[:4]) for name in sample["images"]]
    return pictures + [int(index) for name in sample["videos"] for index in Path(name).stem.split("_")]


def test_no_held_out_scan_is_trained_on_moved_or_not(dataset: digits.DigitsDataset):
    trained, held_out = ({scan for sample in read(path) for scan in scans_of(sample)}
                         for path in (dataset.train, dataset.held_out))
    assert len(held_out) == digits.NUM_HELD_OUT
    assert len(trained) == 1797 - digits.NUM_HELD_OUT
    assert not trained & held_out


def test_answers_are_the_labels(dataset: digits.DigitsDataset):
    labels = load_digits().target
    for sample in read(dataset.train) + read(dataset.held_out):
        shown = (" then " if sample["videos"] else " and ").join(str(labels[scan]) for scan in scans_of(sample))
        if shown:
            assert sample["messages"][1] == {"role": "assistant", "content": shown}


def test_training_mixes_text_pictures_and_videos(dataset: digits.DigitsDataset):
    samples = read(dataset.train)
    counts = [(len(sample["images"]), len(sample["videos"])) for sample in samples]
    assert counts.count((0, 0)) == digits.NUM_TEXT_ONLY
    assert counts.count((2, 0)) == digits.NUM_TWO_PICTURES
    assert counts.count((0, 1)) == digits.NUM_VIDEOS
    assert counts.count((1, 0)) == (1797 - digits.NUM_HELD_OUT) * (1 + digits.NUM_MOVED)
    for sample in samples:
        question = sample["messages"][0]["content"]
        assert (question.count("<image>"), question.count("<video>")) == (len(sample["images"]), len(sample["videos"]))
    assert counts != sorted(counts)


def test_held_out_videos_and_pictures_alternate(dataset: digits.DigitsDataset):
    kinds = [len(sample["videos"]) for sample in read(dataset.held_out)]
    num_videos = digits.NUM_HELD_OUT_VIDEOS
    assert kinds == [0, 1] * num_videos + [0] * (digits.NUM_HELD_OUT - num_videos)


def test_videos_show_one_scan_after_another(dataset: digits.DigitsDataset):
    paths = sorted((dataset.directory / "videos").iterdir())
    assert len(paths) == digits.NUM_VIDEOS + digits.NUM_HELD_OUT_VIDEOS
    scans = load_digits().images
    for path in paths[::30]:
        frames, seconds = read_video(path)
        assert (len(frames), seconds) == (4, 0.5)
        for frame, index in zip(frames, np.repeat([int(one) for one in path.stem.split("_")], 2), strict=True):
            ink, scan = (np.asarray(one.convert("L"), float) for one in (frame, digits.picture(scans[index])))
            away = range(-4, 5)  # a place and one step of two pixels each way
            assert max(np.corrcoef(np.roll(scan, (y, x), (0, 1)).ravel(), ink.ravel())[0, 1]
                       for y in away for x in away) > 0.95  # fmt: skip


def test_frames_round_trip_exactly(tmp_path: Path):
    """So the golden losses do not depend on the codec's implementation."""
    rng = np.random.default_rng(0)
    drawn = [Image.fromarray(rng.integers(0, 256, (84, 84), dtype=np.uint8)) for _ in range(4)]
    digits.write_video(tmp_path / "noise.mp4", drawn)
    for frame, found in zip(drawn, read_video(tmp_path / "noise.mp4")[0], strict=True):
        assert np.array_equal(np.asarray(found), np.stack([np.asarray(frame)] * 3, axis=2))


def test_moved_pictures_differ_from_the_scan_and_stay_in_the_frame(dataset: digits.DigitsDataset):
    moved = sorted((dataset.directory / "pictures").glob("*_moved*.png"))
    assert len(moved) == (1797 - digits.NUM_HELD_OUT) * digits.NUM_MOVED
    for path in moved[::200]:
        with Image.open(path) as picture, Image.open(path.with_name(f"{path.stem[:4]}.png")) as scan:
            ink, original = np.asarray(picture, float), np.asarray(scan, float)
        assert ink.shape == original.shape
        assert not np.array_equal(ink, original)
        assert ink.sum() > 0.8 * original.sum()


def test_another_seed_other_files(dataset: digits.DigitsDataset, tmp_path: Path):
    other = digits.write(tmp_path, seed=1)
    assert other.train.read_bytes() != dataset.train.read_bytes()


def test_the_same_seed_and_fewer_held_out_samples_leave_the_training_part_as_it_is(
    dataset: digits.DigitsDataset, tmp_path: Path
):
    few = digits.write(tmp_path, seed=0, num_held_out_samples=5)
    assert read(few.held_out) == read(dataset.held_out)[:5]
    assert few.train.read_bytes() == dataset.train.read_bytes()


def test_the_trainer_reads_it_with_the_columns_of_data_tiny_json(dataset: digits.DigitsDataset, tmp_path: Path):
    data = json.loads(Path("examples/qwen2.5vl/data_tiny.json").read_text())
    data["dataset_param"]["basic_parameters"] |= {
        "dataset": str(dataset.train), "dataset_dir": str(dataset.directory),
    }  # fmt: skip
    (tmp_path / "data.json").write_text(json.dumps(data))
    config = read_data(str(tmp_path / "data.json")).value
    assert config.packs and config.is_balanced
    samples = Dataset(config)
    raw = read(dataset.train)
    assert len(samples) == len(raw)
    with_video = next(index for index, sample in enumerate(raw) if sample["videos"])
    for index in (0, 700, with_video, len(raw) - 1):
        assert len(samples[index].media) == len(raw[index]["images"]) + len(raw[index]["videos"])
        assert samples[index].turns[-1].text == raw[index]["messages"][1]["content"]
