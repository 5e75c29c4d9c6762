"""Samples of many kinds: with the peer's settings equal to LLaMA-Factory, with ours equal to transformers."""

import json

import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from mm.batch import IGNORE_INDEX
from mm.data.encode import SampleEncoder
from mm.data.index.dataset import Dataset
from tests import llama_factory
from tests.data.oracle import PREPROCESSOR, data_config, photo, pixel_numbers

LONG = "a long line of many words, of which there is no end, "
BOUNDS = (0, 100_000)
Row = tuple[list[str], list[tuple[int, int]], dict[str, bool], int]
ROWS: dict[str, Row] = {
    # turns, user and assistant in turn; sizes of pictures; settings; --seq-length
    "text": (["Hi.", "Hello."], [], {}, 4096),
    "other scripts": (["请描述 Ωmega", "café 图 \U0001f600"], [], {}, 4096),
    "two turns": (["One?", "First.", "Two?", "Second."], [], {}, 4096),
    "four turns": ([f"{number}?" for number in range(8)], [], {}, 4096),
    "masked history": (["One?", "First.", "Two?", "Second."], [], {"mask_history": True}, 4096),
    "prompt training": (["One?", "First.", "Two?", "Second."], [], {"train_on_prompt": True}, 4096),
    "picture": (["<image>What?", "This."], [(640, 480)], {}, 4096),
    "upright picture": (["What? <image>", "This."], [(480, 640)], {}, 4096),
    "small picture": (["<image>", "Small."], [(20, 40)], {}, 4096),
    "tiny picture": (["<image>", "Tiny."], [(5, 3)], {}, 4096),
    "wide strip": (["<image>", "Wide."], [(5000, 20)], {}, 4096),
    "high strip": (["<image>", "High."], [(20, 5000)], {}, 4096),
    "large picture": (["<image>", "Large."], [(2000, 1500)], {}, 4096),
    "exact picture": (["<image>", "Exact."], [(280, 252)], {}, 4096),
    "two pictures": (["<image> or <image>?", "Both."], [(300, 200), (28, 600)], {}, 4096),
    "pictures in turns": (["<image>?", "One.", "<image>?", "Two."], [(100, 100), (90, 333)], {}, 4096),
    "picture, prompt training": (["<image>?", "One."], [(100, 100)], {"train_on_prompt": True}, 4096),
    "picture, masked history": (["<image>?", "One.", "And?", "Two."], [(90, 90)], {"mask_history": True}, 4096),
    "long question": ([LONG * 20, "Yes."], [], {}, 100),
    "long answer": (["Tell.", LONG * 20], [], {}, 100),
    "both long": ([LONG * 20, LONG * 30], [], {}, 120),
    "long, many turns": ([LONG] * 8, [], {}, 150),
    "long, masked history": ([LONG] * 8, [], {"mask_history": True}, 150),
    "long, prompt training": ([LONG * 9, LONG * 9], [], {"train_on_prompt": True}, 111),
    "long question after a picture": ([f"<image>{LONG * 30}", "Yes."], [(100, 100)], {}, 200),
    "long answer to a picture": (["<image>?", LONG * 30], [(100, 100)], {}, 200),
    "long, last turn with a picture": ([LONG, LONG, "<image>?", LONG], [(56, 56)], {"mask_history": True}, 120),
}


@pytest.fixture
def made(tmp_path, hf_directory):
    """The sample of a row, and what encodes it."""

    def make(name: str, **changes):
        turns, sizes, settings, seq_length = ROWS[name]
        for number, size in enumerate(sizes):
            photo(*size, seed=number).save(tmp_path / f"{number}.png")
        record = {
            "messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)],
            "images": [f"{number}.png" for number in range(len(sizes))],
        }
        (tmp_path / "data.json").write_text(json.dumps([record]))
        config = data_config(hf_directory, tmp_path, tmp_path / "data.json", image_min_pixels=BOUNDS[0],
                             image_max_pixels=BOUNDS[1], **settings, **changes)  # fmt: skip
        return Dataset(config)[0], config, seq_length

    return make


def pixels(images: list[Image.Image], **settings):
    """``pixel_values`` and grids of transformers' processor."""
    if not images:
        return None, []
    answer = Qwen2VLImageProcessorPil(**PREPROCESSOR | settings)(images, return_tensors="pt")
    return answer["pixel_values"], answer["image_grid_thw"].tolist()


def same_pictures(encoded, values, grids) -> bool:
    return [list(grid) for grid in encoded.image_grids] == grids and (
        encoded.pixel_values is None if values is None else torch.equal(pixel_numbers(encoded), values))


@pytest.mark.parametrize("name", ROWS)
def test_with_the_peers_settings(made, tokenizer, model_config, name):
    sample, config, seq_length = made(name, image_resize="llamafactory")
    encoded = SampleEncoder.from_config(config, model_config, seq_length).encode(sample)
    values, grids = pixels([llama_factory.preprocessed(Image.open(one.path), *BOUNDS) for one in sample.media])
    pairs = llama_factory.encoded_pairs(tokenizer, sample.turns, [t * h * w // 4 for t, h, w in grids])
    ids, labels = llama_factory.sample(pairs, seq_length, **ROWS[name][2])
    assert encoded.token_ids.tolist() == ids
    assert encoded.labels.tolist() == [*labels[1:], IGNORE_INDEX]
    assert same_pictures(encoded, values, grids)


STRIPS = {(5000, 20), (20, 5000)}
FITTING = [name for name, row in ROWS.items() if row[3] == 4096 and not STRIPS & {*row[1]}]


@pytest.mark.parametrize("name", FITTING)
def test_with_our_settings(made, reference, model_config, name):
    """Without extreme aspect ratios, which transformers refuses, and truncation, which it does not have."""
    sample, config, seq_length = made(name)
    encoded = SampleEncoder.from_config(config, model_config, seq_length).encode(sample)
    values, grids = pixels([Image.open(one.path) for one in sample.media], max_pixels=BOUNDS[1])
    messages = reference.messages({"messages": [(turn.role, turn.text) for turn in sample.turns]})
    assert encoded.token_ids.tolist() == reference.token_ids(messages, grids)
    labels = reference.labels(messages, grids, last_only=config.mask_history)
    if not config.train_on_prompt:  # what transformers itself does not know
        assert encoded.labels.tolist() == [*labels[1:], IGNORE_INDEX]
    assert same_pictures(encoded, values, grids)
