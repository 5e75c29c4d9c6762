"""Samples that turn out bad while they are read: left out and listed, and every layout trains on the same good ones."""

import json
from pathlib import Path

import pytest

from mm.data.media.image_decode import image_size
from tests.data.oracle import photo
from tests.files import json_lines
from tests.tiny_inputs import metrics, run, write_inputs

BAD = (7, 20, 41, 66, 99)
NUM_SAMPLES = 100


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 samples with a picture each, whose headers are all in order; the pixels of five are not."""
    directory = write_inputs(tmp_path_factory.mktemp("bad"))
    records = []
    for number in range(NUM_SAMPLES):
        path = directory / f"picture{number}.png"
        photo(56 + 28 * (number % 3), 56, seed=number).save(path)
        if number in BAD:
            path.write_bytes(path.read_bytes()[:200])
        assert image_size(str(path))[1] == 56
        records.append({"id": f"sample-{number}", "images": [str(path)], "messages": [
            {"role": "user", "content": f"<image>What is number {number}?"},
            {"role": "assistant", "content": f"It is number {number}."}]})
    (directory / "samples.json").write_text("[" + ",\n".join(map(json.dumps, records)) + "]")
    return directory


def test_any_layout_trains_on_the_same_good_samples(inputs: Path) -> None:
    """One epoch, as one rank and as two replicas of two stages."""
    flags = ("--bad-sample", "skip", "--global-batch-size", "20", "--micro-batch-size", "5", "--train-iters", "5",
             "--load", str(inputs / "hf"))
    run(inputs, "one", 1, *flags, num_workers=1)
    run(inputs, "four", 2, *flags, num_ranks=4)
    one, four = metrics(inputs, "one"), metrics(inputs, "four")
    for key in ("num_tokens", "num_target_tokens", "num_patches", "num_images"):
        assert [row[key] for row in one] == [row[key] for row in four], key
    assert sum(row["num_images"] for row in one) == NUM_SAMPLES - len(BAD)
    assert [row["loss"] for row in four] == pytest.approx([row["loss"] for row in one], rel=1e-6)  # measured 9.8e-8
    for name in ("one", "four"):
        rows = json_lines(inputs / name / "logs" / "quarantine.jsonl")
        assert sorted(row["index"] for row in rows) == list(BAD)
        for row in rows:
            number, path = row["index"], str(inputs / f"picture{row['index']}.png")
            assert (row["dataset"], row["line"]) == (str(inputs / "samples.json"), number + 1)
            assert (row["id"], row["path"]) == (f"sample-{number}", path)
            assert row["reason"].startswith(f"{path}: the image is damaged or truncated")


def test_too_many_end_the_run_on_all_ranks(inputs: Path) -> None:
    with pytest.raises(AssertionError) as failed:
        run(inputs, "few", 2, "--bad-sample", "skip", "--max-bad-fraction", "0.02", "--global-batch-size", "20",
            "--train-iters", "5", num_ranks=4)
    said = str(failed.value)
    assert said.count("error: 3 of 100 samples cannot be used, more than --max-bad-fraction 0.02 allows") == 1
    assert "quarantine.jsonl in --log-dir lists them" in said
