"""The commands of ``mm-data``: samples are shown as encoded, the index is kept, generated data have the wanted size."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from demo.tiny_checkpoint import build
from mm.batch import IGNORE_INDEX
from mm.config.run import load_run
from mm.data.encode import SampleEncoder
from mm.data.index.dataset import Dataset
from mm.data.index.index import Measure
from mm.data.media.image_patches import ImageProcessor
from mm.data_tool.cli import main
from mm.data_tool.commands import Shown, write_mock
from mm.data_tool.flags import MockFlags
from mm.errors import UserError
from mm.run.preflight import check
from tests.data.oracle import PREPROCESSOR, RECORDS, data_config, photo
from tests.files import EXAMPLES
from tests.tiny_inputs import write_data


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_patches_join_to_the_frames_they_were_cut_from(times, rows, columns) -> None:
    settings = {name: value for name, value in PREPROCESSOR.items() if not name.endswith(("type", "class"))}
    processor = ImageProcessor(**settings | {name: tuple(settings[name]) for name in ("image_mean", "image_std")})
    frames = torch.randint(0, 256, (2 * times, 28 * rows, 28 * columns, 3), dtype=torch.uint8)
    patches, grid = processor.to_patches(frames)
    assert torch.equal(processor.joined(patches, grid), frames)


@pytest.mark.parametrize("index", range(len(RECORDS)))
def test_a_sample_is_shown_whole(write_dataset, model_config, index) -> None:
    data = write_dataset()
    encoder, sample = SampleEncoder.from_config(data, model_config, 4096), Dataset(data)[index]
    encoded, shown = encoder.encode(sample), Shown.of(sample, encoder)
    learnt = [token for token in encoded.labels.tolist() if token != IGNORE_INDEX]
    assert "".join(text for kind, text in shown.groups if kind == "target") == encoder.chat.tokenizer.decode(learnt)
    assert (shown.num_tokens, shown.num_target_tokens) == (encoded.num_tokens, len(learnt))
    media = [text for kind, text in shown.groups if kind == "media"]
    assert media == [f"[{t * h * w // 4} visual tokens]" for t, h, w in encoded.image_grids]
    assert [frame.shape for frame in shown.frames] == [(14 * h, 14 * w, 3) for _, h, w in encoded.image_grids]
    for frame, item in zip(shown.frames, sample.media, strict=True):
        size = frame.shape[1::-1]
        with Image.open(item.path) as image:
            assert np.array_equal(frame, np.asarray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC)))
    assert "[[" in shown.text()
    page = shown.html()
    legend, turns = page.split('<div class="turns">')
    assert page.count("<img ") == len(shown.frames) and turns.count('class="target"') == sum(
        kind == "target" for kind, _ in shown.groups)
    assert 'class="target">target tokens' in legend and 'class="media">tokens of an image or video' in legend
    for frame in shown.frames:
        assert f"<small>{frame.shape[1]} x {frame.shape[0]} pixels</small>" in page


def test_every_sample_has_the_requested_size(tmp_path, hf_directory, model_config, tokenizer) -> None:
    def write(output):
        return write_mock(MockFlags(num_samples=5, num_images=2, width=56, height=84, text_length=40, num_pictures=3,
                                    output=output, tokenizer=str(hf_directory)))

    path = write(tmp_path / "made")
    config = data_config(hf_directory, tmp_path / "made", path)
    dataset, encoder = Dataset(config), SampleEncoder.from_config(config, model_config, 4096)
    assert len(dataset) == 5
    answers = [dataset[number].turns[-1].text for number in range(5)]
    assert len(set(answers)) == 5
    assert {len(tokenizer(answer, add_special_tokens=False)["input_ids"]) for answer in answers} == {40}
    assert {encoder.encode(dataset[number]).image_grids for number in range(5)} == {((1, 6, 4),) * 2}
    assert len(list((tmp_path / "made" / "images").iterdir())) == 3
    assert write(tmp_path / "again").read_text() == path.read_text(), "a function of the seed"


def test_nothing_is_overwritten(tmp_path) -> None:
    write_mock(MockFlags(num_samples=1, num_images=0, output=tmp_path))
    with pytest.raises(UserError, match=r"data.jsonl already exists"):
        write_mock(MockFlags(output=tmp_path))


LLAVA = {"id": "1", "image": "1.png", "conversations": [{"from": "human", "value": "<image>?"},
                                                        {"from": "gpt", "value": "猫"}]}


def test_training_uses_the_index_created_beforehand(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "media").mkdir()
    photo(60, 60).save(tmp_path / "media/1.png")
    (tmp_path / "llava.json").write_text(json.dumps([LLAVA] * 4))
    build(tmp_path / "hf", ["One? 1", "Two and three and four? They are of no use here."], seed=0)
    write_data(tmp_path, tmp_path / "llava.json", dataset_dir=str(tmp_path / "media"), val_rate=0.5)
    common = ["--mm-data", str(tmp_path / "data.json"), "--mm-model", str(EXAMPLES / "model_tiny.json"),
              "--seq-length", "64"]

    def check_data(name: str, *more: str) -> int:
        return main([name, *common, *more])

    assert check_data("index") == 0
    out = capsys.readouterr().out
    assert "Training samples" in out and "Validation samples" in out
    (rows,) = (tmp_path / "media/.mm-index").glob("*.rows")
    made = rows.stat().st_mtime_ns
    assert check_data("stats") == 0 and rows.stat().st_mtime_ns == made
    assert check_data("check", "--again") == 0 and rows.stat().st_mtime_ns > made
    run = load_run([*common, "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3", "--log-dir",
                    str(tmp_path / "logs")], 2, {})
    monkeypatch.delattr("mm.data.index.dataset.make_index")
    assert check(run).problems == []
    assert len(Dataset(run.data, measure=Measure.from_config(run.data, run.model, 64), seed=run.args.seed)) == 2
