"""Every kind of bad record and file that users bring (reliability.md, table B, rows 18 to 30 and 41), as a real file.

Each stops the run before it trains, with file and line; with ``--bad-sample skip`` the good samples of the file are
trained on and the others are listed.  Row 26, text on one replica and pictures on another, is in tests/parallel.
"""

import json

import pytest

from mm.data.dataset import Dataset
from mm.data.gauge import Gauge
from mm.data.sample import Image
from mm.errors import UserError
from tests.data.oracle import data_config, photo


def record(*texts, **columns) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)], **columns}


GOOD = record("Hi", "Hello")
SEQ_LENGTH = 300


@pytest.fixture
def opened(tmp_path, hf_directory, model_config):
    """The samples of a file with this content, which lies beside ``a.png`` (20 visual tokens)."""
    photo(140, 112).save(tmp_path / "a.png")

    def dataset(content, name="data.json", skips_bad=False, seq_length=SEQ_LENGTH) -> Dataset:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        data = data_config(hf_directory, tmp_path, path)
        return Dataset(data, skips_bad, Gauge.from_config(data, model_config, seq_length))

    return dataset


def lines(*records) -> str:
    return "\n".join(one if isinstance(one, str) else json.dumps(one) for one in records)


@pytest.mark.parametrize("content", ["", "\n \n\t\n", "[]", " [ ]\n"])
@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_18_a_file_without_samples(opened, name, content):
    for skips_bad in (False, True):
        with pytest.raises(UserError, match="holds no sample"):
            opened(content, name, skips_bad)


@pytest.mark.parametrize(("name", "content"), [
    ("a list.jsonl", json.dumps([GOOD, GOOD], indent=1)), ("lines.json", lines(GOOD, "", GOOD)),
    ("list.txt", json.dumps([GOOD, GOOD])), ("lines", lines(GOOD, GOOD) + "\n\n"),
])
def test_18_what_a_file_holds_is_seen_in_it(opened, name, content):
    assert len(opened(content, name)) == 2


@pytest.mark.parametrize(("content", "what"), [
    (b"\x1f\x8b" + b"0" * 50, "is compressed"), (lines(GOOD).encode("utf-16"), "is in UTF-16"),
    ("[" + json.dumps(GOOD), "found the end of the file"), ("[" + json.dumps(GOOD)[:-9], ":1:.*not valid JSON"),
])
def test_19_a_file_that_cannot_be_read_to_its_end_is_refused_in_any_case(opened, content, what):
    for skips_bad in (False, True):
        with pytest.raises(UserError, match=what):
            opened(content, skips_bad=skips_bad)


BAD_RECORDS = {
    "19 a cut last line": (lines(GOOD, GOOD, json.dumps(GOOD)[:-5]), 3, "not valid JSON"),
    "19 one bad line": (lines(GOOD, "{'a': 1}", GOOD), 2, "not valid JSON"),
    "19 another encoding in one line": (
        lines(GOOD).encode() + b'\n{"messages": "\xd6\xd0"}\n' + lines(GOOD).encode(), 2, "is not UTF-8"),
    "19 a key twice": (lines(GOOD, '{"messages": 1, "messages": 2}', GOOD), 2, "'messages' stands twice"),
    "19 a record nested too deeply": (lines(GOOD, "[" * 200_000 + "]" * 200_000, GOOD), 2, "is nested too deeply"),
    "20 no messages": (lines(GOOD, {"message": []}, GOOD), 2, "has no 'messages'"),
    "20 null messages": (lines(GOOD, {"messages": None}, GOOD), 2, "expected a list of messages"),
    "20 messages as a text": (lines(GOOD, {"messages": "Hi"}, GOOD), 2, "expected a list of messages"),
    "20 images of another type": (lines(GOOD, record("<image>", "x", images=3), GOOD), 2, "expected a list of paths"),
    "21 too few pictures": (lines(GOOD, record("<image><image>", "x", images=["a.png"]), GOOD), 2,
                            "has 2 <image> in its messages but 1 images"),
    "21 too many pictures": (lines(GOOD, record("<image>", "x", images=["a.png"] * 2), GOOD), 2,
                             "has 1 <image> in its messages but 2 images"),
    "21 a place in an answer": (lines(GOOD, record("Hi", "<image>", images=["a.png"]), GOOD), 2,
                                "has 0 <image> in its messages but 1 images"),
    "22 two questions": (lines(GOOD, {"messages": GOOD["messages"][:1] * 2}, GOOD), 2, "turn 1 is of 'user'"),
    "22 ends with a question": (lines(GOOD, record("a", "b", "c"), GOOD), 2, "ends without a turn of 'assistant'"),
    "22 unknown role": (lines(GOOD, {"messages": [{"role": "usr", "content": "a"}]}, GOOD), 2, "unknown role 'usr'"),
    "22 empty": (lines(GOOD, record("a", "  "), GOOD), 2, "has an empty message 1"),
    "30 200 pictures": (lines(GOOD, record("<image>" * 200, "x", images=["a.png"] * 200), GOOD), 2,
                        "its 200 images and videos take 4000 tokens, more than --seq-length 300"),
    "31 a missing picture": (lines(GOOD, record("<image>", "x", images=["no.png"]), GOOD), 2, "is no regular file"),
    "41 http": (lines(GOOD, record("<image>", "x", images=["https://x/a.png"]), GOOD), 2, "is not a local path"),
    "41 data": (lines(GOOD, record("<image>", "x", images=["data:image/png;base64,AA"]), GOOD), 2, "is not a local"),
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
        (skipped,) = (one.told() for one in dataset.skipped)
        assert skipped.startswith(f"{tmp_path}/data.json:{line}:") and "--bad-sample" not in skipped


@pytest.mark.parametrize("images", ["a.png", ["a.png"]])
def test_20_one_path_is_a_list_and_null_is_none(opened, tmp_path, images):
    dataset = opened(lines(record("<image>", "x", images=images), record("a", "b", images=None)))
    assert [sample.media for sample in (dataset[0], dataset[1])] == [(Image(f"{tmp_path}/a.png"),), ()]


def test_23_nothing_left_to_learn(opened):
    """The question is so much longer that in proportion nothing of the answer is left."""
    content = lines(GOOD, record("word " * 400, "x x x x x x"))
    assert len(opened(content)) == 2
    with pytest.raises(UserError, match=r"data.json:2: sample 1 .* no token of its answers is left to learn"):
        opened(content, seq_length=8)
    assert len(opened(content, seq_length=8, skips_bad=True)) == 1


def test_24_a_long_sample_is_cut_beside_its_picture(opened):
    """As it was: never within it."""
    dataset = opened(lines(record("<image>" + "word " * 400, "x " * 400, images=["a.png"])))
    lengths = dataset.lengths
    assert (lengths.num_tokens[0], lengths.num_media[0], lengths.num_patches[0]) == (SEQ_LENGTH, 1, 80)
    dataset = opened(lines(record("word " * 400 + "<image>", "x " * 400, images=["a.png"])))
    assert (dataset.lengths.num_media[0], dataset.lengths.num_patches[0]) == (0, 0)
    assert dataset.lengths.num_tokens[0] <= SEQ_LENGTH


def test_25_control_tokens_in_texts_are_text(opened, model_config):
    dataset = opened(lines(record("<|im_end|><|image_pad|><image>", "<|im_start|>", images=["a.png"])))
    assert dataset.lengths.num_media[0] == 1 and dataset.lengths.num_patches[0] == 80


def test_27_the_same_record_many_times_and_one_alone(opened):
    assert len(opened(lines(*[record("<image>", "x", images=["a.png"], id="1")] * 5))) == 5
    assert len(opened(lines(GOOD))) == 1


def test_28_an_edited_file_is_other_data(opened, tmp_path):
    first = opened(lines(GOOD, GOOD))
    second = opened(lines(GOOD, record("Hi", "HELLO")))
    assert first.fingerprint != second.fingerprint
    with pytest.raises(UserError, match="was changed after this run had checked it"):
        first[0]
    assert second[1].turns[1].text == "HELLO"


@pytest.mark.parametrize(("answer", "is_outside"), [
    ("<|box_start|>(10,20),(90,100)<|box_end|>", False), ("<|box_start|>(10,20),(900,100)<|box_end|>", True),
    ('[{"bbox_2d": [1, 2, 3, 400.5], "label": "cat"}]', True), ('{"point_2d": [1, 2]}', False),
    ("It costs 900.", False),
])
def test_29_places_beyond_the_picture_are_noted(opened, answer, is_outside):
    notes = opened(lines(GOOD, record("<image>", answer, images=["a.png"]))).notes
    assert [("1 samples, the first is 1, name places" in note) for note in notes] == [True] * is_outside
