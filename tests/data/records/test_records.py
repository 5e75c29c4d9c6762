"""JSON lists, JSON Lines and Parquet files, record by record."""

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pyarrow as arrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from mm.data.encode import SampleEncoder
from mm.data.index.dataset import Dataset
from mm.data.index.index import Measure
from mm.data.loader.feature_cache import _content
from mm.data.records import records
from mm.data.records.records import open_records
from mm.errors import UserError
from mm.generation.prompts import read_prompts
from tests.config.test_parse import JSON_VALUES
from tests.data.oracle import data_config, photo

RECORDS = [{"name": "one", "count": 1}, {"name": "zwölf", "count": 12}, {"name": "three", "count": 3}]


def write_list(path: Path) -> None:
    path.write_text("\n" + json.dumps(RECORDS, indent=1, ensure_ascii=False), encoding="utf-8")


def write_lines(path: Path) -> None:
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS), encoding="utf-8-sig")


def write_parquet(path: Path) -> None:
    parquet.write_table(arrow.Table.from_pylist(RECORDS), path, row_group_size=2)


LINES: dict[Callable[[Path], None], list[int]] = {
    write_list: [3, 7, 11], write_lines: [1, 2, 3], write_parquet: [0, 0, 0]}
"""For the writer of each kind of file: the lines in which its records begin."""


@pytest.mark.parametrize("write", LINES)
def test_every_kind_is_read_by_the_same_methods(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path, problems = tmp_path / "records.txt", list[str]()
    write(path)
    file = pickle.loads(pickle.dumps(open_records(str(path))))
    found = list(file.records(problems))
    assert problems == [] and [one.index for one in found] == [0, 1, 2]
    assert [one.value for one in found] == [file.read(one.span) for one in found] == RECORDS
    assert [one.line for one in found] == LINES[write]
    assert [file.where(one) for one in found] == [
        f"{path}:{line}" if line else f"{path}: record {number}" for number, line in enumerate(LINES[write])]
    before = file.content_hash()
    os.utime(path, ns=(0, 0))
    for use in (lambda: file.read(found[0].span), lambda: next(file.blocks([])), file.content_hash):
        with pytest.raises(UserError, match=r"records.txt: has changed since this run checked it; start the run again"):
            use()
    assert open_records(str(path)).content_hash() == before
    path.unlink()
    with pytest.raises(UserError, match=r"records.txt: can no longer be read: No such file or directory"):
        file.read(found[0].span)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "wide").write_text("{}", encoding="utf-16")
    (tmp_path / "cut").write_bytes(b"PAR1 and nothing more")
    for name, problem in (("wide", "is a binary, packed or UTF-16 file"), ("cut", "is not a complete Parquet file"),
                          ("absent", "is not a regular file")):
        with pytest.raises(UserError, match=problem):
            open_records(str(tmp_path / name))


spaces = st.text(" \t\r\n", max_size=4)


def found_in(content: bytes, is_list: bool) -> list[tuple[bytes, int]]:
    """The bytes of each record, and its line.  Raises UserError."""
    find = records._list_spans if is_list else records._line_spans
    return [(content[start:end].strip(), line) for block in find(io.BytesIO(content)) for start, end, line in block]


@pytest.fixture(params=[1, 7, 1 << 18], autouse=True)
def block_bytes(request, monkeypatch):
    """Blocks of one byte, so that blocks end at every possible position."""
    monkeypatch.setattr(records, "BLOCK_BYTES", request.param)


@given(some=st.lists(JSON_VALUES, min_size=1, max_size=6), escaped=st.booleans(), data=st.data())
@pytest.mark.parametrize("is_list", [True, False])
def test_records_are_found_with_their_lines(is_list, some, escaped, data):
    written = [json.dumps(record, ensure_ascii=escaped).encode() for record in some]
    content, expected = b"[" * is_list, []
    for number, one in enumerate(written):
        content += (b"," if is_list else b"\r\n") * bool(number) + data.draw(spaces).encode()
        expected.append((one, content.count(b"\n") + 1))
        content += one + data.draw(spaces).encode()
    assert found_in(content + b"]" * is_list + data.draw(spaces).encode(), is_list) == expected


@given(st.lists(JSON_VALUES, min_size=1, max_size=3), st.data())
def test_a_list_truncated_anywhere_is_detected(some, data):
    content = json.dumps(some).encode()
    with pytest.raises(UserError, match=":1: record"):
        found_in(content[: data.draw(st.integers(1, len(content) - 1))], True)


@pytest.mark.parametrize("content", [b"[1] 2", b"[1]]", b"[] x", b"[1,]", b"[,1]", b"[1 2]", b"[1,,2]", b"[1}",
                                     b"[tru]", b"['a']"])
def test_other_content_is_detected(content):
    with pytest.raises(UserError):
        found_in(content, True)


def test_an_unterminated_record_is_not_read_to_the_end_of_the_file(monkeypatch):
    monkeypatch.setattr(records, "_MAX_RECORD_BYTES", 1 << 10)
    monkeypatch.setattr(records, "BLOCK_BYTES", 64)
    stream = io.BytesIO(b'[1,\n"' + b"x" * 5_000_000)
    with pytest.raises(UserError, match=r":2: record 1 \(counted from 0\): not valid JSON: Unterminated string"):
        list(records._list_spans(stream))
    assert stream.tell() <= 4 << 10


IMAGE = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
MESSAGES = arrow.list_(arrow.struct([("role", arrow.string()), ("content", arrow.string())]))


def png(seed: int, width: int = 60) -> bytes:
    stream = io.BytesIO()
    photo(width, 56, seed=seed).save(stream, "PNG")
    return stream.getvalue()


def messages(num_images: int) -> list[dict]:
    return [{"role": "user", "content": "<image>" * num_images + "What?"}, {"role": "assistant", "content": "It is."}]


def write(path: Path, rows: list[dict], column: str, kind: arrow.DataType) -> Path:
    schema = arrow.schema([("id", arrow.string()), (column, kind), ("messages", MESSAGES)])
    parquet.write_table(arrow.Table.from_pylist(rows, schema), path, row_group_size=4)
    return path


def test_lists_of_embedded_pictures_equal_files(tmp_path, hf_directory, model_config):
    """Ten rows with no, one and two pictures in groups of four, one of which names a file instead.

    Equal grids and patches, read in any order, and again from the index.
    """
    rows, expected = [], []
    for number in range(10):
        pictures = {f"{number}_{at}.png": png(10 * number + at, 60 + 28 * at) for at in range(number % 3)}
        for name, content in pictures.items():
            (tmp_path / name).write_bytes(content)
        expected.append({"messages": messages(len(pictures)), "images": [*pictures]})
        images = [{"bytes": None, "path": name} if number == 4 else {"bytes": content, "path": f"inside_{name}"}
                  for name, content in pictures.items()]
        rows.append({"id": f"n{number}", "images": images, "messages": messages(len(images))})
    many = write(tmp_path / "many.parquet", rows, "images", arrow.list_(IMAGE))
    (tmp_path / "files.json").write_text(json.dumps(expected))
    found, files = (data_config(hf_directory, tmp_path, tmp_path / name, preprocessing_num_workers=1,
                                cache_dir=str(tmp_path / "cache")) for name in ("many.parquet", "files.json"))
    measure = Measure.from_config(found, model_config, 512)
    encoder: SampleEncoder = measure.encoder
    other = Dataset(files, measure=measure)
    for _ in range(2):
        dataset = Dataset(found, measure=measure)
        assert dataset.notes == [] and len(dataset) == len(other) == 10
        for name, values in vars(dataset.lengths).items():
            assert values.tolist() == vars(other.lengths)[name].tolist(), name
        for number in (8, 1, 4, 9, 2, 0):
            ours, theirs = encoder.encode(dataset[number]), encoder.encode(other[number])
            assert ours.image_grids == theirs.image_grids and ours.token_ids.tolist() == theirs.token_ids.tolist()
            assert (ours.pixel_values is None) == (theirs.pixel_values is None)
            assert ours.pixel_values is None or torch.equal(ours.pixel_values, theirs.pixel_values)
    sample = dataset[8]
    assert pickle.loads(pickle.dumps(sample)) == sample and len(pickle.dumps(sample)) < 2000  # without the bytes
    first, second = (part.path for part in sample.media)
    assert first != second and {first, second} == {part.path for part in dataset[8].media}
    (tmp_path / "same.png").write_bytes(png(80))
    assert _content(first) == _content(str(tmp_path / "same.png"))  # features that are kept of it
    prompts, problems = read_prompts(str(many), ())
    assert problems == [] and len({one.digest for one in prompts}) == 7  # four have the same text and no picture


def test_pictures_anywhere_in_a_record(tmp_path, hf_directory, model_config):
    """In columns whose names have dots, as in LeRobot's files, and in lists of parts, as in OpenAI's format."""
    parts = [{"type": "image", "image": {"bytes": png(1), "path": "a.png"}, "text": None},
             {"type": "image", "image": {"bytes": None, "path": "b.png"}, "text": None},
             {"type": "text", "image": None, "text": "?"}]
    (tmp_path / "b.png").write_bytes(png(2))
    rows = [{"observation.image": [{"bytes": png(10), "path": None}], "messages": [
        {"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "!"}]}]}]
    part = arrow.struct([("type", arrow.string()), ("image", IMAGE), ("text", arrow.string())])
    kind = arrow.list_(arrow.struct([("role", arrow.string()), ("content", arrow.list_(part))]))
    schema = arrow.schema([("messages", kind), ("observation.image", arrow.list_(IMAGE))])
    path = tmp_path / "parts.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows, schema), path)
    ((record,),) = ([raw.value for raw in open_records(str(path)).records([])],)
    (picture,) = record["observation.image"]
    assert picture.content == png(10) and str(picture) == "observation.image/0 (inside the record)"
    data = data_config(hf_directory, tmp_path, path)
    measure = Measure.from_config(data, model_config, 512)
    dataset = Dataset(data, measure=measure)
    assert [str(part.path) for part in dataset[0].media] == ["a.png (inside the record)", f"{tmp_path}/b.png"]
    assert measure.encoder.encode(dataset[0]).num_patches == dataset.lengths.num_patches[0] > 0
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(UserError, match="has changed since this run checked it"):
        _ = picture.content


def test_bad_pictures_large_groups_and_videos_are_reported(tmp_path, hf_directory, model_config, monkeypatch):
    rows = [{"id": f"n{number}", "image": {"bytes": content, "path": "cat.png"}, "messages": messages(1)}
            for number, content in enumerate([png(0), b"no picture", png(2)])]
    path = write(tmp_path / "bad.parquet", rows, "image", IMAGE)
    monkeypatch.setattr(records, "_MAX_GROUP_BYTES", 100)
    data = data_config(hf_directory, tmp_path, path)
    dataset = Dataset(data, True, Measure.from_config(data, model_config, 512))
    (bad,) = dataset.skipped
    assert (len(dataset), bad.index, bad.id, bad.line) == (2, 1, "n1", None)
    assert bad.path == "cat.png (inside the record)" and "is not an image that Pillow can read" in bad.reason
    assert "and to reach an image its whole group is read" in dataset.notes[0]
    rows = [{"id": "0", "videos": [{"bytes": b"0", "path": "a.mp4"}], "messages": [
        {"role": "user", "content": "<video>"}, messages(0)[1]]}]
    path = write(tmp_path / "video.parquet", rows, "videos", arrow.list_(IMAGE))
    data = data_config(hf_directory, tmp_path, path)
    with pytest.raises(UserError, match="is embedded in the record, which only images may be"):
        Dataset(data, measure=Measure.from_config(data, model_config, 512))
