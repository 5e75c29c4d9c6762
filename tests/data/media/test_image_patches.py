import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference_smart_resize

from mm.batch import normalised
from mm.data.media.image_patches import ImageProcessor, smart_resize
from mm.data.sample import Image as ImageItem
from mm.errors import UserError
from tests import llama_factory
from tests.config.test_model import ABSENT
from tests.data.oracle import PREPROCESSOR, photo

sides = st.integers(1, 6000)


@given(sides, sides, st.sampled_from([28, 32]), st.integers(0, 10**5), st.integers(10**5, 10**7))
def test_smart_resize_equals_transformers(height, width, factor, min_pixels, max_pixels):
    try:
        expected = reference_smart_resize(height, width, factor, min_pixels, max_pixels)
    except ValueError:
        with pytest.raises(ValueError, match="200 times"):
            smart_resize(height, width, factor, min_pixels, max_pixels)
        return
    assert smart_resize(height, width, factor, min_pixels, max_pixels) == expected


def reference_patches(path, prepared=ImageOps.exif_transpose, **changes):
    processor = Qwen2VLImageProcessorPil(**{**PREPROCESSOR, **changes})
    with Image.open(path) as image:
        answer = processor([prepared(image)], return_tensors="pt")
    return answer["pixel_values"], tuple(answer["image_grid_thw"][0].tolist())


def processor_of(directory, *bounds, **settings):
    return ImageProcessor.from_directory(str(directory), *bounds, **settings)


def assert_equals_reference(path, hf_directory, max_pixels=300_000):
    processor = processor_of(hf_directory, 0, max_pixels)
    assert_equal(path, processor, reference_patches(path, max_pixels=max_pixels))


def assert_equal(path, processor, expected):
    plan = processor.plan(str(path))
    values = normalised(processor.patches(plan), processor.normalisation.constants())
    expected_values, expected_grid = expected
    assert plan.grid == expected_grid
    assert values.dtype == torch.float32
    assert torch.equal(values, expected_values)


@pytest.mark.parametrize("size", [(640, 480), (33, 700), (28, 28), (1, 1), (5, 3), (84, 56), (901, 1203), (3000, 17)])
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_patches_equal_transformers_for_photos_of_all_sizes(tmp_path, hf_directory, size, suffix):
    path = tmp_path / f"photo.{suffix}"
    photo(*size, seed=sum(size)).save(path)
    assert_equals_reference(path, hf_directory)


def test_patches_equal_transformers_for_every_byte_of_every_channel(tmp_path, hf_directory):
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    pixels = np.zeros((56, 56, 3), dtype=np.uint8)
    for channel in range(3):
        pixels[16 * channel : 16 * channel + 16, :16, channel] = ramp
    Image.fromarray(pixels).save(tmp_path / "ramp.png")
    assert_equals_reference(tmp_path / "ramp.png", hf_directory)


def saved(path, mode):
    """A photo of this mode, partly transparent if that is possible."""
    image = photo(90, 70, mode="RGB" if "A" in mode else mode).convert(mode)
    if "A" in mode:
        image.putalpha(photo(90, 70, seed=5, mode="L"))
    image.save(path)
    return path


MODES = [("L", "png"), ("1", "png"), ("P", "png"), ("RGBA", "png"), ("CMYK", "jpg")]


@pytest.mark.parametrize(("mode", "suffix"), [
    *MODES, ("LA", "png"), ("P", "gif"), ("YCbCr", "jpg"), ("RGBA", "webp"), ("RGB", "mpo"), ("RGB", "bmp"),
    ("RGB", "ppm"), ("CMYK", "tiff")])
def test_patches_equal_transformers_for_every_mode(tmp_path, hf_directory, mode, suffix):
    assert_equals_reference(saved(tmp_path / f"photo.{suffix}", mode), hf_directory)


def test_palette_transparency_becomes_white(tmp_path, hf_directory):
    path = tmp_path / "palette.png"
    photo(64, 64).quantize(16).save(path, transparency=3)
    assert_equals_reference(path, hf_directory)


@pytest.mark.parametrize("orientation", range(1, 10))  # 9 is none
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
def test_photographs_are_turned_upright_unless_that_is_switched_off(tmp_path, hf_directory, suffix, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"turned.{suffix}"
    photo(90, 40).save(path, exif=exif)
    assert_equals_reference(path, hf_directory)
    if suffix != "tiff":  # Pillow itself turns these
        as_they_lie = processor_of(hf_directory, is_upright=False)
        assert_equal(path, as_they_lie, reference_patches(path, lambda image: image))


SIZES = [(640, 480), (480, 640), (20, 40), (40, 20), (5, 3), (1, 1), (28, 28), (27, 300), (5000, 20), (20, 5000),
         (3000, 14), (901, 1203), (512, 512), (513, 512), (1000, 1500), (6000, 28)]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("bounds", [(0, 262144), (1024, 768 * 768), (50_000, 60_000)], ids=str)
def test_llama_factorys_rule_to_the_bit(tmp_path, hf_directory, size, bounds):
    path = tmp_path / "photo.png"
    photo(*size, seed=sum(size)).save(path)
    processor = processor_of(hf_directory, *bounds, rule="llamafactory", is_upright=False)
    assert_equal(path, processor, reference_patches(path, lambda image: llama_factory.preprocessed(image, *bounds)))


@pytest.mark.parametrize(("mode", "suffix"), MODES)
def test_llama_factorys_rule_in_every_mode(tmp_path, hf_directory, mode, suffix):
    """It drops transparency, which otherwise becomes white."""
    path = saved(tmp_path / f"photo.{suffix}", mode)
    processor = processor_of(hf_directory, 0, 3000, rule="llamafactory", is_upright=False)
    assert_equal(path, processor, reference_patches(path, lambda image: llama_factory.preprocessed(image, 0, 3000)))


def test_an_extreme_aspect_ratio_is_refused(tmp_path, hf_directory):
    photo(1001, 5).save(tmp_path / "strip.png")
    processor = ImageProcessor.from_directory(str(hf_directory))
    with pytest.raises(UserError, match=r"strip.png: one side is more than 200 times"):
        processor.plan(str(tmp_path / "strip.png"))


def test_the_tighter_pixel_bound_applies_and_0_means_none(hf_directory):
    def bounds(min_pixels, max_pixels):
        processor = ImageProcessor.from_directory(str(hf_directory), min_pixels, max_pixels)
        return processor.min_pixels, processor.max_pixels

    assert bounds(0, 0) == (3136, 12845056)
    assert bounds(1024, 262144) == (3136, 262144)
    assert bounds(10_000, 10**9) == (10_000, 12845056)
    with pytest.raises(UserError, match=r"image_max_pixels = 1000 .* 3136 is above the upper bound 1000"):
        bounds(0, 1000)


def test_an_image_may_have_bounds_of_its_own(tmp_path, hf_directory):
    path = str(tmp_path / "photo.png")
    photo(400, 300).save(path)
    processor = processor_of(hf_directory, 0, 50_000)
    assert processor.within(ImageItem(path)) is processor
    small = processor.within(ImageItem(path, max_pixels=10_000))
    assert_equal(path, small, reference_patches(path, max_pixels=10_000))
    assert processor.within(ImageItem(path, min_pixels=0)) == replace(processor, min_pixels=1)  # 0 is no bound
    large = processor.within(ImageItem(path, min_pixels=200_000, max_pixels=300_000))
    assert_equal(path, large, reference_patches(path, min_pixels=200_000, max_pixels=300_000))
    peers = processor_of(hf_directory, 0, 50_000, rule="llamafactory", is_upright=False)
    assert_equal(path, peers.within(ImageItem(path, max_pixels=10_000)),
                 reference_patches(path, lambda image: llama_factory.preprocessed(image, 0, 10_000)))
    with pytest.raises(UserError, match=r"photo.png: its min_pixels 60000 is above its max_pixels 50000"):
        processor.within(ImageItem(path, min_pixels=60_000))


FAST_SIZES = [(640, 480), (644, 480), (33, 700), (28, 28), (5, 3), (901, 1203), (48, 211), (102, 550), (1053, 305)]


@pytest.mark.parametrize("size", FAST_SIZES, ids=str)
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_torch_resizes_almost_like_pillow(tmp_path, hf_directory, size, suffix):
    """Within 2 of 255, and different in under 1% of values: at most 0.7% for 80 sizes drawn from 20 to 1500."""
    path = str(tmp_path / f"photo.{suffix}")
    photo(*size, seed=sum(size)).save(path)
    exact, fast = (processor_of(hf_directory, 0, 300_000, backend=backend) for backend in ("pillow", "torch"))
    expected, found = (one.patches(one.plan(path)) for one in (exact, fast))
    difference = (found.int() - expected.int()).abs()
    assert found.shape == expected.shape and found.dtype == torch.uint8
    assert difference.max() <= 2
    assert (difference > 0).float().mean() < 0.01


def test_constants_come_from_where_transformers_reads_them(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    assert ImageProcessor.from_directory(str(tmp_path)).max_pixels == 12845056
    saved = Qwen2VLImageProcessorPil(**{**PREPROCESSOR, "max_pixels": 50_000}).to_dict()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": saved}))
    processor = ImageProcessor.from_directory(str(tmp_path))
    assert (processor.min_pixels, processor.max_pixels) == (3136, 50_000)
    assert processor.image_mean == tuple(PREPROCESSOR["image_mean"])


def test_a_directory_without_the_settings_of_pictures_or_videos_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no preprocessor_config.json"):
        ImageProcessor.from_directory(str(tmp_path))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": PREPROCESSOR}))
    assert ImageProcessor.from_directory(str(tmp_path)).max_pixels == 12845056
    with pytest.raises(UserError, match=r"has no video_preprocessor_config.json or pre.*how videos are resized; copy"):
        ImageProcessor.from_directory(str(tmp_path), media="video")


@pytest.mark.parametrize(("change", "message"), [
    ({"patch_size": "14"}, "patch_size is '14'; expected an integer of at least 1"),
    ({"image_std": [0.2, 0, 0.2]}, "image_std is \\[0.2, 0, 0.2\\]; expected three numbers above 0"),
    ({"min_pixels": None, "max_pixels": None}, "min_pixels is None.*\\n.*max_pixels is None"),
    ({"do_resize": False}, "do_resize is False"), ({"resample": 2}, "resample is 2"),
    ({"rescale_factor": 1.0}, "rescale_factor"), ({"merge_size": ABSENT}, "merge_size is None"),
])
def test_unusable_settings_are_refused(tmp_path, change, message):
    values = {key: value for key, value in (PREPROCESSOR | change).items() if value is not ABSENT}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=message):
        ImageProcessor.from_directory(str(tmp_path))
