"""Every kind of bad record and file that users bring (reliability.md, table B, rows 18 to 30 and 41), as a real file.

Each stops the run before it trains, with file and line; with ``--bad-sample skip`` the good samples of the file are
trained on and the others are listed.  Row 26, text on one replica and pictures on another, is in tests/parallel.
"""

import base64
import json
import re
from contextlib import closing
from dataclasses import asdict, replace

import pytest
import torch
from pyarrow import Table, parquet

from mm.data.encode import SampleEncoder
from mm.data.index.dataset import Dataset, changed
from mm.data.index.index import Measure
from mm.data.loader.loader import StepLoader
from mm.data.loader.quarantine import LEDGER, Quarantine
from mm.errors import UserError
from tests.data.clips import damage_frame, even, write_clip
from tests.data.oracle import data_config, photo
from tests.files import json_lines


def record(*texts, **columns) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)], **columns}


GOOD = record("Hi", "Hello")
SEQ_LENGTH = 300


@pytest.fixture
def opened(tmp_path, hf_directory, model_config):
    """The samples of a file with this content, in the folder of ``a.png`` (20 visual tokens)."""
    photo(140, 112).save(tmp_path / "a.png")

    def dataset(content, name="data.json", skips_bad=False, seq_length=SEQ_LENGTH, **changes) -> Dataset:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        data = data_config(hf_directory, tmp_path, path, **changes)
        return Dataset(data, skips_bad, Measure.from_config(data, model_config, seq_length))

    return dataset


def lines(*records) -> str:
    return "\n".join(one if isinstance(one, str) else json.dumps(one) for one in records)


BAD_RECORDS = {
    "19 a cut last line": (lines(GOOD, GOOD, json.dumps(GOOD)[:-5]), 3, "not valid JSON"),
    "19 one bad line": (lines(GOOD, "{'a': 1}", GOOD), 2, "not valid JSON"),
    "19 another encoding in one line": (
        lines(GOOD).encode() + b'\n{"messages": "\xd6\xd0"}\n' + lines(GOOD).encode(), 2, "is not UTF-8"),
    "19 a record nested too deeply": (lines(GOOD, "[" * 200_000 + "]" * 200_000, GOOD), 2, "too many levels"),
    "20 no messages": (lines(GOOD, {"message": []}, GOOD), 2, "has no 'messages'"),
    "20 null messages": (lines(GOOD, {"messages": None}, GOOD), 2, "expected a non-empty list of messages"),
    "20 messages as a text": (lines(GOOD, {"messages": "Hi"}, GOOD), 2, "expected a non-empty list of messages"),
    "20 images of another type": (lines(GOOD, record("<image>", "x", images=3), GOOD), 2, "expected a list of paths"),
    "21 too few pictures": (lines(GOOD, record("<image><image>", "x", images=["a.png"]), GOOD), 2,
                            "has 2 <image> in its messages but 1 image"),
    "21 too many pictures": (lines(GOOD, record("<image>", "x", images=["a.png"] * 2), GOOD), 2,
                             "has 1 <image> in its messages but 2 images"),
    "21 a place in an answer": (lines(GOOD, record("Hi", "<image>", images=["a.png"]), GOOD), 2,
                                "has 0 <image> in its messages but 1 image"),
    "22 two questions": (lines(GOOD, {"messages": GOOD["messages"][:1] * 2}, GOOD), 2, "turn 1 is by 'user'"),
    "22 ends with a question": (lines(GOOD, record("a", "b", "c"), GOOD), 2, "does not end with a turn by 'assistant'"),
    "22 unknown role": (lines(GOOD, {"messages": [{"role": "usr", "content": "a"}]}, GOOD), 2, 'unknown role "usr"'),
    "22 empty": (lines(GOOD, record("a", "  "), GOOD), 2, "has an empty message 1"),
    "30 200 pictures": (lines(GOOD, record("<image>" * 200, "x", images=["a.png"] * 200), GOOD), 2,
                        r"its images and videos \(200\) alone take 4000 tokens, which exceeds --seq-length 300"),
    "31 a missing picture": (lines(GOOD, record("<image>", "x", images=["no.png"]), GOOD), 2, "is not a regular file"),
    "41 http": (lines(GOOD, record("<image>", "x", images=["https://x/a.png"]), GOOD), 2, "is not a local path"),
    "41 broken base64": (lines(GOOD, record("<image>", "x", images=["data:image/png;base64,AA"]), GOOD), 2,
                         "'data:image/png;base64,AA...' contains broken base64"),
    "41 data of another type": (lines(GOOD, record("<image>", "x", images=["data:text/html;base64,AAAA"]), GOOD), 2,
                                "'data:text/html;base64,AAAA...' is not a data:image/png"),
    "41 data that is no picture": (lines(GOOD, record("<image>", "x", images=["data:image/png;base64,AAAA"]), GOOD), 2,
                                   "data:image/png;base64,AAAA...: is not an image"),
    "41 too large a picture": (lines(GOOD, record("<image>", "x", images=["data:image/png;base64," + "A" * 23_000_000]),
                                     GOOD), 2, "has 17,250,000 bytes, above the limit of 16,777,216"),
    "41 a video": (lines(GOOD, record("<video>", "x", videos=["data:video/mp4;base64,AAAA"]), GOOD), 2,
                   "only images may be embedded in a record"),
    "20 a list": (lines(GOOD, ["x"], GOOD), 2, "is a list; expected an object"),
    "20 a turn without content": (lines(GOOD, {"messages": [{"role": "user"}]}, GOOD), 2,
                                  "expected an object with 'role' and 'content'"),
    "22 a late system turn": (lines(GOOD, {"messages": [*GOOD["messages"], {"role": "system", "content": "x"}]}, GOOD),
                              2, "turn 2 is by 'system'"),
    "22 a surrogate": (lines(GOOD, record("\ud83d", "a"), GOOD), 2, "surrogate"),
    "31 a folder": (lines(GOOD, record("<image>", "x", images=["."]), GOOD), 2, "image '.' is not a regular file"),
    "41 s3": (lines(GOOD, record("<image>", "x", images=["s3://b/a.png"]), GOOD), 2, "download it"),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_one_bad_record(opened, tmp_path, name):
    content, line, what = BAD_RECORDS[name]
    for _ in range(2):  # the second time from the index
        with pytest.raises(UserError, match=what) as error:
            opened(content)
        (problem,) = error.value.problems
        assert problem.startswith(f"{tmp_path}/data.json:{line}:") and "--bad-sample skip" in problem
        dataset = opened(content, skips_bad=True)
        assert len(dataset) == 2 and all(dataset[number].turns[1].text == "Hello" for number in range(2))
        (skipped,) = (one.message() for one in dataset.skipped)
        assert skipped.startswith(f"{tmp_path}/data.json:{line}:") and "--bad-sample" not in skipped
        assert dataset.skipped[0].reason[0] != ":", "the message names the place once"
        assert len(json.dumps(asdict(dataset.skipped[0]))) < 1000  # so small is a row of the ledger


NAME = "Zaphod"
PRIVATE = {
    "syntax": json.dumps(record("Hi", NAME * 9)).replace('"}]', '"]'),
    "quotes": f"{{'messages': '{NAME}'}}",
    "unterminated": json.dumps(record(NAME, NAME * 9))[:-9],
    "a text for messages": {"messages": NAME},
    "a text for a message": {"messages": [NAME, NAME]},
    "content of another kind": {"messages": [{"role": "user", "content": {"text": NAME}}]},
    "a part of another kind": {"messages": [{"role": "user", "content": [[NAME]]}]},
    "a list for a text": {"messages": [{"role": "user", "content": [{"type": "text", "text": [NAME]}]}]},
    "another system": record("Hi", "Hello", system=[NAME]),
    "no picture": record(NAME + "<image>", NAME),
    "two questions": {"messages": [{"role": "user", "content": NAME}] * 2},
    "no target left": record("word " * 400, NAME + " x" * 5),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_messages_and_the_ledger_hold_no_text_of_a_record(opened, tmp_path, name):
    """They are copied into logs, bug reports and chats; line, column and keys say where to look."""
    attr = replace(data_config(tmp_path, tmp_path, tmp_path).attr, system="system")
    for content in (lines(GOOD, PRIVATE[name], GOOD), f"[{lines(PRIVATE[name])}]"):
        with pytest.raises(UserError) as error:
            opened(content, attr=attr, seq_length=8)
        assert NAME not in str(error.value) and "data.json:" in str(error.value)
    dataset = opened(lines(GOOD, PRIVATE[name], GOOD), skips_bad=True, attr=attr, seq_length=8)
    Quarantine(3, 0.9, tmp_path / LEDGER).add(dataset.skipped)
    text = (tmp_path / LEDGER).read_text()
    assert NAME not in text and json.loads(text)["line"] == 2


def test_23_no_target_left(opened):
    """The question is so long that proportional truncation leaves nothing of the answer."""
    content = lines(GOOD, record("word " * 400, "x x x x x x"))
    assert len(opened(content)) == 2
    with pytest.raises(UserError, match=r"data.json:2: record 1 .* none of its answer tokens remain"):
        opened(content, seq_length=8)
    assert len(opened(content, seq_length=8, skips_bad=True)) == 1


def test_24_a_long_sample_is_truncated_next_to_its_picture(opened):
    """Never inside it."""
    dataset = opened(lines(record("<image>" + "word " * 400, "x " * 400, images=["a.png"])))
    lengths = dataset.lengths
    assert (lengths.num_tokens[0], lengths.num_media[0], lengths.num_patches[0]) == (SEQ_LENGTH, 1, 80)
    dataset = opened(lines(record("word " * 400 + "<image>", "x " * 400, images=["a.png"])))
    assert (dataset.lengths.num_media[0], dataset.lengths.num_patches[0]) == (0, 0)
    assert dataset.lengths.num_tokens[0] <= SEQ_LENGTH


def test_24_with_packing_it_loses_whole_turns_and_both_are_counted(opened, tmp_path):
    """One loses its last two turns with their picture, one is left out; both are reported."""
    several = record("word " * 60, "short", "<image>" + "word " * 80, "x", "c", "d", images="a.png", id="several")
    alone = record("<image>" * 200, "x", images=["a.png"] * 200, id=7)
    content = lines(GOOD, several, alone, GOOD)
    for skips_bad in (False, True, False):  # the last two times from the index
        dataset = opened(content, skips_bad=skips_bad, packing=True)
        assert [dataset[number].where.rpartition(" ")[2] for number in range(len(dataset))] == ["0", "1", "3"]
        assert dataset.skipped == () and dataset.num_too_long == 1
        assert dataset.lengths.num_media.tolist() == [0, 0, 0] and dataset.lengths.num_tokens[1] <= SEQ_LENGTH
        too_long, shortened = dataset.notes
        assert re.fullmatch(
            r"1 sample left out, because not even one .* fit in --seq-length 300: raise it to 4\d\d\d, .* or shorten "
            rf"them.  The first: {tmp_path}/data.json: record 2 \(id 7\)", too_long)
        assert re.fullmatch(
            r"1 of 3 samples are longer than --seq-length 300 and lose \d+ tokens in total; the longest has \d+: raise "
            rf"--seq-length to keep more.  The first: {tmp_path}/data.json: record 1 \(id 'several'\)", shortened)
    with pytest.raises(UserError, match=r"images and videos \(200\) alone take 4000 tokens"):  # as without packing
        opened(content, packing=True, truncation="tokens")
    with pytest.raises(UserError, match=r"^1 sample left out, because .* The first: .*data.json: record 0"):
        opened(lines(alone), packing=True)


@pytest.mark.parametrize("form", ["column", "OpenAI", "Parquet"])
@pytest.mark.parametrize(("backend", "suffix"), [("pillow", "png"), ("torch", "jpg")])
def test_41_an_embedded_picture_equals_one_in_a_file(opened, tmp_path, model_config, form, backend, suffix):
    """The grid from its header, and the patches bit for bit."""
    path = tmp_path / f"b.{suffix}"
    photo(150, 97, seed=4).save(path)
    address = f"data:image/{suffix};base64,{base64.b64encode(path.read_bytes()).decode()}"
    records = [record("<image>?", "x", images=[one]) for one in (address, path.name)]
    if form == "OpenAI":
        for one in records:
            (image,) = one.pop("images")
            one["messages"][0]["content"] = [{"type": "image_url", "image_url": {"url": image}},
                                             {"type": "text", "text": "?"}]
    content = lines(*records)
    if form == "Parquet":
        parquet.write_table(Table.from_pylist(records), tmp_path / "written")
        content = (tmp_path / "written").read_bytes()
    dataset = opened(content, image_backend=backend)
    encoder = SampleEncoder.from_config(dataset._config, model_config, SEQ_LENGTH)
    inline, file = encoder.encode(dataset[0]), encoder.encode(dataset[1])
    assert torch.equal(inline.pixel_values, file.pixel_values) and inline.image_grids == file.image_grids
    assert inline.token_ids.tolist() == file.token_ids.tolist()
    for name, values in vars(dataset.lengths).items():
        assert values[0] == values[1], name
    assert dataset.lengths.num_patches[0] == inline.num_patches


def test_25_control_tokens_in_texts_are_text(opened, model_config):
    dataset = opened(lines(record("<|im_end|><|image_pad|><image>", "<|im_start|>", images=["a.png"])))
    assert dataset.lengths.num_media[0] == 1 and dataset.lengths.num_patches[0] == 80
    (note,) = dataset.notes
    assert note.startswith(f"1 record, the first is {dataset[0].where}: words that look like control tokens")


def test_42_damaged_videos_are_listed_once_each_and_the_others_are_trained_on(opened, tmp_path, model_config):
    """One is an unfinished MP4 file, which the check finds; the other is only found by decoding."""
    for name in ("good", "unfinished", "damaged"):
        write_clip(tmp_path / f"{name}.mp4", even(60), size=(160, 128), gop=1)
    whole = (tmp_path / "unfinished.mp4").read_bytes()
    (tmp_path / "unfinished.mp4").write_bytes(whole[: len(whole) // 2])
    damage_frame(tmp_path / "damaged.mp4", 39)  # of 0, 20, 39 and 59, which are taken
    shown = {name: record("<video>?", "A bar.", videos=[f"{name}.mp4"]) for name in ("good", "unfinished", "damaged")}
    attr = replace(data_config(tmp_path, tmp_path, tmp_path).attr, videos="videos")

    def loaded(*records):
        dataset = opened(lines(*records), skips_bad=True, attr=attr, video_max_pixels=96 * 96)
        encoder = SampleEncoder.from_config(dataset._config, model_config, SEQ_LENGTH)
        with closing(StepLoader(dataset, encoder, [[[number] for number in range(len(dataset))]], 0, skips_bad=True)
                     ) as loader:
            return dataset, next(loader)

    _, alone = loaded(shown["good"], GOOD)
    dataset, step = loaded(shown["good"], shown["unfinished"], shown["damaged"], GOOD)
    quarantine = Quarantine(4, 0.5, tmp_path / LEDGER)
    quarantine.add(dataset.skipped)
    quarantine.add(step.bad)
    rows = json_lines(tmp_path / LEDGER)
    assert [(row["line"], row["index"], row["path"]) for row in rows] == [
        (2, 1, f"{tmp_path}/unfinished.mp4"), (3, 2, f"{tmp_path}/damaged.mp4")]
    assert "without its index ('moov')" in rows[0]["reason"] and " s is damaged (" in rows[1]["reason"]
    first, stand_in, last = step.microbatches
    assert stand_in.token_ids.tolist() == [0] and stand_in.pixel_values is None
    for found, expected in zip((first, last), alone.microbatches, strict=True):
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.labels.tolist() == expected.labels.tolist() and found.image_grids == expected.image_grids
    assert torch.equal(first.pixel_values, alone.microbatches[0].pixel_values)


def test_28_an_edited_file_counts_as_changed_data(opened, tmp_path):
    first = opened(lines(GOOD, GOOD))
    second = opened(lines(GOOD, record("Hi", "HELLO")))
    assert list(changed(first.fingerprints(), second.fingerprints())) == [
        f"{tmp_path}/data.json has changed (2 then, 2 now)"]
    with pytest.raises(UserError, match="has changed since this run checked it"):
        first[0]
    assert second[1].turns[1].text == "HELLO"


@pytest.mark.parametrize(("answer", "is_outside"), [
    ("<|box_start|>(10,20),(90,100)<|box_end|>", False), ("<|box_start|>(10,20),(900,100)<|box_end|>", True),
    ('[{"bbox_2d": [1, 2, 3, 400.5], "label": "cat"}]', True), ('{"point_2d": [1, 2]}', False),
    ("It costs 900.", False),
])
def test_29_coordinates_outside_the_picture_are_noted(opened, answer, is_outside):
    notes = opened(lines(GOOD, record("<image>", answer, images=["a.png"]))).notes
    assert [("data.json: record 1: coordinates outside the images as the model sees them" in note)
            for note in notes] == [True] * is_outside
