"""Parquet files as ``datasets`` of Hugging Face writes them: pictures inside, beside a column of messages."""

import io
import json
import pickle
from pathlib import Path

import pyarrow as arrow
import pytest
import torch
from pyarrow import parquet

from demo.tiny_checkpoint import build
from mm.data.encode.encoder import SampleEncoder
from mm.data.feed.features import _content
from mm.data.index.dataset import Dataset
from mm.data.index.gauge import Gauge
from mm.data.media.picture import load_image
from mm.data.read import parquet as ours
from mm.data.read.open_records import open_records
from mm.data.sample import Inline
from mm.data_tool.commands import run as mm_data
from mm.errors import UserError
from mm.generation.prompts import read_prompts
from tests.data.oracle import data_config, photo
from tests.files import EXAMPLES

IMAGE = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
MESSAGES = arrow.list_(arrow.struct([("role", arrow.string()), ("content", arrow.string())]))


def png(seed: int, width: int = 60) -> bytes:
    stream = io.BytesIO()
    photo(width, 56, seed=seed).save(stream, "PNG")
    return stream.getvalue()


def messages(num_images: int) -> list[dict]:
    return [{"role": "user", "content": "<image>" * num_images + "What?"}, {"role": "assistant", "content": "It is."}]


def write(path: Path, rows: list[dict], column: str, kind: arrow.DataType, feature: object, group: int = 4) -> Path:
    """With the features in the schema's metadata."""
    features = {"id": {"dtype": "string", "_type": "Value"}, column: feature}
    schema = arrow.schema([("id", arrow.string()), (column, kind), ("messages", MESSAGES)],
                          {"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(arrow.Table.from_pylist(rows, schema), path, row_group_size=group)
    return path


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Ten rows with no, one and two pictures in groups of four; one names a file instead."""
    (tmp_path / "beside.png").write_bytes(png(99))
    rows = []
    for number in range(10):
        images = [{"bytes": png(10 * number + at, 60 + 28 * at), "path": f"{number}_{at}.png"}
                  for at in range(number % 3)]
        rows.append({"id": f"n{number}", "images": images, "messages": messages(len(images))})
    rows[4]["images"] = [{"bytes": None, "path": "beside.png"}]
    return write(tmp_path / "many.parquet", rows, "images", arrow.list_(IMAGE), [{"_type": "Image"}])


def test_lists_of_embedded_pictures_equal_files(many, tmp_path, hf_directory, model_config):
    """Equal grids and patches, read in any order, and again from the index."""
    expected = []
    for number in range(10):
        paths = []
        for at in range(number % 3):
            path = tmp_path / f"own_{number}_{at}.png"
            path.write_bytes(png(10 * number + at, 60 + 28 * at) if number != 4 else png(99))
            paths.append(path.name)
        expected.append({"messages": messages(len(paths)), "images": paths})
    (tmp_path / "files.json").write_text(json.dumps(expected))
    found, files = (data_config(hf_directory, tmp_path, tmp_path / name, preprocessing_num_workers=1,
                                cache_dir=str(tmp_path / "cache")) for name in ("many.parquet", "files.json"))
    gauge = Gauge.from_config(found, model_config, 512)
    encoder: SampleEncoder = gauge.encoder
    other = Dataset(files, gauge=gauge)
    for _ in range(2):
        dataset = Dataset(found, gauge=gauge)
        assert dataset.notes == [] and len(dataset) == len(other) == 10
        for name, values in vars(dataset.lengths).items():
            assert values.tolist() == vars(other.lengths)[name].tolist(), name
        for number in (8, 1, 4, 9, 2, 0):
            ours_, theirs = encoder.encode(dataset[number]), encoder.encode(other[number])
            assert ours_.image_grids == theirs.image_grids and ours_.token_ids.tolist() == theirs.token_ids.tolist()
            assert (ours_.pixel_values is None) == (theirs.pixel_values is None)
            assert ours_.pixel_values is None or torch.equal(ours_.pixel_values, theirs.pixel_values)
    sample = dataset[8]
    assert pickle.loads(pickle.dumps(sample)) == sample and len(pickle.dumps(sample)) < 2000
    first, second = (part.path for part in sample.media)
    assert first != second and {first, second} == {part.path for part in dataset[8].media}  # without being read
    (tmp_path / "same.png").write_bytes(png(80))
    assert _content(first) == _content(str(tmp_path / "same.png"))  # features that are kept of it


def test_column_names_may_have_dots(tmp_path):
    """As in LeRobot's files, where one name may also begin with another."""
    rows = [{"observation": {"bytes": png(number), "path": "a.png"}, "observation.image": [
        {"bytes": png(10 + number), "path": "b.png"}], "task.name": "t"} for number in range(3)]
    schema = arrow.schema([("observation.image", arrow.list_(IMAGE)), ("observation", IMAGE),
                           ("task.name", arrow.string())])
    path = tmp_path / "dots.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows, schema), path)
    records = [raw.value for raw in open_records(str(path)).records([])]
    assert [one["observation"].content for one in records] == [png(number) for number in range(3)]
    assert [one["observation.image"][0].content for one in records] == [png(10 + number) for number in range(3)]
    assert {one["task.name"] for one in records} == {"t"}


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "changed.parquet"
    parquet.write_table(arrow.table({"prompt": ["old"] * 3}), path)
    file = open_records(str(path))
    (block,) = file.blocks([])
    parquet.write_table(arrow.table({"prompt": ["a new text"] * 3}), path)
    for records in (file.read_block(block), file.blocks([])):
        with pytest.raises(UserError, match="has changed since this run checked it"):
            next(iter(records))


def test_only_a_few_rows_are_in_memory(tmp_path, monkeypatch):
    """Records are read without pictures, and pictures one batch at a time."""
    rows = [{"id": str(number), "image": {"bytes": png(number), "path": None}, "messages": messages(1)}
            for number in range(40)]
    path = write(tmp_path / "one.parquet", rows, "image", IMAGE, {"_type": "Image"}, group=40)
    file = open_records(str(path))
    batches = []
    take = ours._ImageStream._begin

    def begin(stream):
        take(stream)
        coming = stream._batches
        stream._batches = (batches.append(len(one)) or one for one in coming)

    monkeypatch.setattr(ours._ImageStream, "_begin", begin)
    records = [raw.value for raw in file.records([])]
    assert [one["id"] for one in records] == [str(number) for number in range(40)] and batches == []
    assert ours._row_group(str(path), file.version, 0).nbytes < 10_000
    assert all(isinstance(one["image"], Inline) and str(one["image"]) == "column 'image'" for one in records)
    assert records[3]["image"].content == png(3) and batches == [16]
    assert [one["image"].content for one in records] == [png(number) for number in range(40)]
    assert batches == [16, 16, 8]
    assert load_image(records[0]["image"]).size == (60, 56)
    assert records[20]["image"].content == png(20) and len(records[20]["image"].digest) == 64
    path.write_bytes(path.read_bytes() + b"x")
    fresh = pickle.loads(pickle.dumps(records[1]["image"]))
    ours._stream.cache_clear()
    with pytest.raises(UserError, match="has changed since this run checked it"):
        _ = fresh.content


def test_bad_pictures_large_groups_and_videos_are_reported(tmp_path, hf_directory, model_config, monkeypatch):
    rows = [{"id": f"n{number}", "image": {"bytes": content, "path": "cat.png"}, "messages": messages(1)}
            for number, content in enumerate([png(0), b"no picture", png(2)])]
    path = write(tmp_path / "bad.parquet", rows, "image", IMAGE, {"_type": "Image"})
    monkeypatch.setattr(ours, "_MAX_GROUP_BYTES", 100)
    data = data_config(hf_directory, tmp_path, path)
    dataset = Dataset(data, True, Gauge.from_config(data, model_config, 512))
    (bad,) = dataset.skipped
    assert (len(dataset), bad.index, bad.id, bad.line) == (2, 1, "n1", None)
    assert bad.path == "cat.png (inside the record)" and "is not an image that Pillow can read" in bad.reason
    assert "in column 'image', and to reach an image all before it in its group" in dataset.notes[0]
    rows = [{"id": "0", "videos": [{"bytes": b"0", "path": "a.mp4"}], "messages": [
        {"role": "user", "content": "<video>"}, messages(0)[1]]}]
    path = write(tmp_path / "video.parquet", rows, "videos", arrow.list_(IMAGE), {"feature": {"_type": "Video"}})
    data = data_config(hf_directory, tmp_path, path)
    with pytest.raises(UserError, match="is embedded in the record, which only images may be"):
        Dataset(data, gauge=Gauge.from_config(data, model_config, 512))


def test_the_commands_read_them(many, tmp_path, capsys):
    llava = arrow.list_(arrow.struct([("from", arrow.string()), ("value", arrow.string())]))
    rows = [{"id": "7", "image": {"bytes": png(7), "path": "x.png"}, "conversations": [
        {"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "!"}]}]
    parquet.write_table(arrow.Table.from_pylist(rows, arrow.schema(
        [("id", arrow.string()), ("image", IMAGE), ("conversations", llava)])), tmp_path / "llava.parquet")
    assert mm_data(["convert", "llava", "--input", str(tmp_path / "llava.parquet"), "--media-folder", "none",
                    "--output", str(tmp_path / "out.json")]) == 0
    (record,) = json.loads((tmp_path / "out.json").read_text())
    (path,) = record["images"]
    assert Path(path).parent == tmp_path / "out.pictures" and Path(path).suffix == ".png"
    assert Path(path).read_bytes() == png(7)
    build(tmp_path / "hf", ["One? 1", "Two and three and four? They are of no use here."], seed=0)
    data = json.loads((EXAMPLES / "data_tiny.json").read_text())
    parameters = data["dataset_param"]
    parameters["preprocess_parameters"]["model_name_or_path"] = str(tmp_path / "hf")
    parameters["basic_parameters"] |= {"dataset": str(many), "dataset_dir": str(tmp_path), "val_rate": None}
    (tmp_path / "data.json").write_text(json.dumps(data))
    given = ["--mm-data", str(tmp_path / "data.json"), "--mm-model", str(EXAMPLES / "model_tiny.json"),
             "--seq-length", "256"]
    capsys.readouterr()
    page = tmp_path / "page.html"
    assert mm_data(["check", *given, "--deep"]) == mm_data(["stats", *given]) == 0
    assert mm_data(["show", *given, "--sample", "8", "--html", str(page)]) == 0
    assert page.read_text().count("data:image/png;base64,") == 2
    assert f"{many}: record 8: " in capsys.readouterr().out


def test_prompts_have_a_digest_of_their_pictures(many):
    prompts, problems = read_prompts(str(many), ())
    assert problems == [] and len({one.digest for one in prompts}) == 10
    assert [one.digest for one in read_prompts(str(many), ())[0]] == [one.digest for one in prompts]


def test_pictures_in_lists_of_parts(tmp_path, hf_directory, model_config):
    """In OpenAI's format: read with their record, as bytes or path."""
    (tmp_path / "b.png").write_bytes(png(2))
    parts = [{"type": "image", "image": {"bytes": png(1), "path": "a.png"}, "text": None},
             {"type": "image", "image": {"bytes": None, "path": "b.png"}, "text": None},
             {"type": "text", "image": None, "text": "?"}]
    rows = [{"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": [
        {"type": "text", "text": "!", "image": None}]}]}]
    part = arrow.struct([("type", arrow.string()), ("image", IMAGE), ("text", arrow.string())])
    kind = arrow.list_(arrow.struct([("role", arrow.string()), ("content", arrow.list_(part))]))
    parquet.write_table(arrow.Table.from_pylist(rows, arrow.schema([("messages", kind)])), tmp_path / "parts.parquet")
    data = data_config(hf_directory, tmp_path, tmp_path / "parts.parquet")
    gauge = Gauge.from_config(data, model_config, 512)
    dataset = Dataset(data, gauge=gauge)
    assert [str(part.path) for part in dataset[0].media] == ["a.png (inside the record)", f"{tmp_path}/b.png"]
    assert gauge.encoder.encode(dataset[0]).num_patches == dataset.lengths.num_patches[0] > 0
