"""Cached ViT outputs are found by all their inputs, and never confused."""

import json
import math
import os
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from mm.batch import Microbatch
from mm.data.encode import SampleEncoder
from mm.data.index.dataset import Dataset
from mm.data.loader.feature_cache import (
    CRC32_BYTES,
    FeatureCache,
    path_of,
    pixel_facts,
    read_features,
    used_bytes,
    write_features,
)
from mm.data.loader.loader import StepLoader
from mm.data.media.image_patches import ImagePlan
from mm.data.media.video_patches import VideoPlan
from mm.data.sample import Image, Video
from mm.errors import UserError
from tests.data.clips import even, write_clip
from tests.data.oracle import photo

ROW_BYTES = 24
RECORDS = [
    {"messages": [("user", "Hello."), ("assistant", "Yes.")]},
    {"messages": [("user", "<image>"), ("assistant", "A cat.")], "images": ["one.png"]},
    {"messages": [("user", "<image><image>"), ("assistant", "Two.")], "images": ["two.jpg", "one.png"]},
]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    photo(200, 90, seed=1).save(tmp_path / "one.png")
    photo(61, 143, seed=2).save(tmp_path / "two.jpg")
    return tmp_path


@pytest.fixture
def read(write_dataset, model_config, pictures: Path):
    """Reads one microbatch of all of ``RECORDS``, with the cache or without."""
    records = [{**record, "images": [str(pictures / one) for one in record.get("images", [])]} for record in RECORDS]
    data = write_dataset(records)

    def read(cache: FeatureCache | None, num_workers: int = 0) -> Microbatch:
        encoder = SampleEncoder.from_config(data, model_config, 4096)
        loader = StepLoader(Dataset(data), encoder, [[[0, 1, 2]]], num_workers, features=cache)
        step = next(loader)
        loader.close()
        return step.microbatches[0]

    return read


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(str(tmp_path / "cache"), "the ViT", ROW_BYTES)


def keep(cache: FeatureCache, microbatch: Microbatch) -> list[torch.Tensor]:
    """Rows for each image, as the rank with the ViT's last layer keeps them."""
    made = [torch.randn(math.prod(grid), ROW_BYTES // 4, generator=torch.Generator().manual_seed(math.prod(grid)))
            for grid in microbatch.image_grids]
    for key, rows in zip(microbatch.feature_keys, made, strict=True):
        if key:
            write_features(cache.directory, key, rows)
    return made


def test_a_microbatch_has_pixels_and_keys_and_later_features(read, cache: FeatureCache) -> None:
    plain = read(None)
    first = read(cache)
    assert torch.equal(first.pixel_values, plain.pixel_values) and first.image_grids == plain.image_grids
    assert not first.skips_vision and first.features is None and plain.feature_keys == ()
    assert len(first.feature_keys) == 3 and len(set(first.feature_keys)) == 2  # one.png is there twice
    made = keep(cache, first)
    second = read(cache)
    assert second.skips_vision and second.pixel_values is None and second.feature_keys == ()
    assert torch.equal(second.features.view(torch.float32), torch.cat(made))
    assert second.feature_bytes == ROW_BYTES
    for name in ("token_ids", "labels", "positions"):
        assert torch.equal(getattr(second, name), getattr(plain, name))
    assert second.image_grids == plain.image_grids and second.normalisations == plain.normalisations
    kept = dict(zip(first.feature_keys, made, strict=True)).values()
    assert used_bytes(cache.directory) == sum(rows.nbytes + CRC32_BYTES for rows in kept)


def test_if_one_is_missing_all_are_computed_and_only_that_one_is_written(read, cache: FeatureCache) -> None:
    first = read(cache)
    keep(cache, first)
    path_of(cache.directory, first.feature_keys[0]).unlink()
    second = read(cache)
    assert not second.skips_vision and torch.equal(second.pixel_values, first.pixel_values)
    assert second.feature_keys == tuple(key if key == first.feature_keys[0] else "" for key in first.feature_keys)


def test_another_vit_dtype_or_picture_is_not_found(read, cache: FeatureCache, pictures: Path) -> None:
    keep(cache, read(cache))
    assert not read(replace(cache, vision="another ViT")).skips_vision
    assert not read(replace(cache, row_bytes=ROW_BYTES // 2)).skips_vision
    assert read(cache).skips_vision
    before = os.stat(pictures / "one.png")
    (pictures / "one.png").write_bytes((pictures / "one.png").read_bytes()[:-1])  # without its last byte
    os.utime(pictures / "one.png", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [bool(key) for key in read(cache).feature_keys].count(True) == 2


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows, key = torch.randn(5, 8).bfloat16(), "0123456789abcdef" * 2
    write_features(str(tmp_path), key, rows)
    assert torch.equal(read_features(str(tmp_path), key, 5, 16).view(torch.bfloat16), rows)
    assert [path.name for path in tmp_path.glob("*/*")] == [f"{key}.vit"]
    with pytest.raises(UserError, match=r"have 80 bytes, not 64; delete the file"):
        read_features(str(tmp_path), key, 4, 16)
    content = bytearray(path_of(str(tmp_path), key).read_bytes())
    content[7] ^= 1
    path_of(str(tmp_path), key).write_bytes(content)
    with pytest.raises(UserError, match="do not match their checksum; delete the file"):
        read_features(str(tmp_path), key, 5, 16)
    with pytest.raises(UserError, match="cannot read these cached ViT features: No such file"):
        read_features(str(tmp_path), "f" * 32, 4, 16)


def test_every_plan_field_that_affects_pixels_changes_the_key(write_dataset, model_config, pictures: Path) -> None:
    """Each field of both kinds of plan, changed alone; a picture's path and a video's seconds do not affect pixels."""
    clip = write_clip(pictures / "clip.mp4", even(60))
    encoder = SampleEncoder.from_config(write_dataset(), model_config, 4096)
    image, video = encoder.planned(Image(str(pictures / "one.png"))), encoder.planned(Video(str(clip)))
    assert isinstance(image, ImagePlan) and isinstance(video, VideoPlan)
    mean, processor = (0.1, 0.2, 0.3), image.processor
    wanted = video.wanted
    others = [
        image, replace(image, processor=replace(processor, image_mean=mean)),
        replace(image, processor=replace(processor, image_std=mean)),
        video, replace(video, repeats=(*video.repeats[:-1], 7)), replace(video, steps=(((28, 28), 3),)),
        replace(video, grid=(1, 2, 2)), replace(video, wanted=replace(wanted, times=(0, *wanted.times[1:-1], 9))),
        replace(video, wanted=replace(wanted, time_base=Fraction(1, 7))),
        replace(video, wanted=replace(wanted, is_upright=not wanted.is_upright)),
    ]  # fmt: skip
    found = [json.dumps(pixel_facts(one, encoder.videos)) for one in others]
    constants = replace(encoder.videos, constants=replace(encoder.videos.constants, image_std=mean))
    found.append(json.dumps(pixel_facts(video, constants)))
    assert len(set(found)) == len(found)
    for same in (replace(video, seconds=9.0), replace(video, path="elsewhere.mp4")):
        assert json.dumps(pixel_facts(same, encoder.videos)) == found[3]
    other = SampleEncoder.from_config(write_dataset(video_fps=4.0), model_config, 4096)
    assert pixel_facts(other.planned(Video(str(clip))), other.videos) != pixel_facts(video, encoder.videos)
