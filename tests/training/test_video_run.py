"""Training on real videos, read by a data worker and its decoder, on two pipeline stages."""

import json

import pytest

from tests.data.clips import even, write_clip
from tests.data.conftest import hf_directory  # noqa: F401
from tests.data.oracle import photo
from tests.launch import run_ranks


def test_two_stages_learn_from_videos_as_one_rank_does(hf_directory, tmp_path):  # noqa: F811
    write_clip(tmp_path / "plain.mp4", even(75))
    write_clip(tmp_path / "turned.mp4", even(60), rotation=90)
    photo(200, 90, seed=1).save(tmp_path / "wide.png")
    found = []
    for num_ranks in (1, 2):
        output = tmp_path / f"{num_ranks}.json"
        run_ranks(num_ranks, "tests.training.video_run", str(hf_directory), str(tmp_path), str(output))
        found.append(json.loads(output.read_text()))
    one, two = found
    # 2.5 s at 2 and at 6 frames a second, the first to an even number, the second at most 12; 2 s
    assert all(sorted(t for t, _, _ in step["grids"]) == [1, 1, 2, 2, 6] for step in two)
    for alone, together in zip(one, two, strict=True):
        # Largest relative differences measured, fp32 on CPU: loss 0, gradient norm 5e-8.
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
        assert together["grids"] == alone["grids"]
    assert two[-1]["loss"] < two[0]["loss"]
