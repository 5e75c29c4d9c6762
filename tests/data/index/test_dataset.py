import json
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.config.data import Attributes
from mm.data.index.dataset import Dataset
from mm.data.sample import Image, Turn
from mm.errors import UserError
from tests.data.oracle import RECORDS, data_config

USER, ANSWER = ("user", "Hi"), ("assistant", "Hello")


def raw(*messages, **columns):
    return {"messages": [{"role": role, "content": text} for role, text in messages], **columns}


@pytest.fixture
def load(tmp_path, hf_directory, media_directory):
    """Reads a dataset from the text or bytes of its file."""

    def read(content, **changes):
        path = tmp_path / "data.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return Dataset(data_config(hf_directory, media_directory, path, **changes))

    return read


def test_messages_and_images_are_in_reading_order(write_dataset, media_directory):
    wide, tall = (str(media_directory / name) for name in ("wide.png", "tall.jpg"))
    dataset = Dataset(write_dataset())
    assert len(dataset) == len(RECORDS)
    sample = dataset[2]
    assert sample.turns[:2] == (
        Turn("system", ("Answer in one word.",)),
        Turn("user", ("Compare ", Image(tall), " with ", Image(wide), ".")),
    )
    assert sample.media == (Image(tall), Image(wide))
    assert sample.where.endswith("data.json: record 2")
    assert [message.role for message in sample.turns] == ["system", "user", "assistant", "user", "assistant"]
    assert dataset[3].media == (Image(tall),)
    assert dataset[4].media == ()


def test_llava_columns_and_system_column(load):
    record = {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
        "instruction": "Be brief.",
    }
    dataset = load(json.dumps([record]), attr=Attributes(system="instruction"))
    assert dataset[0].turns == (
        Turn("system", ("Be brief.",)),
        Turn("user", ("Hi",)),
        Turn("assistant", ("Hello",)),
    )


@pytest.mark.parametrize("columns", [{}, {"instruction": ""}, {"instruction": None}])
def test_an_empty_system_text_is_none(load, columns):
    attr = Attributes(messages="messages", role_tag="role", content_tag="content", user_tag="user",
                      assistant_tag="assistant", system="instruction")  # fmt: skip
    assert load(json.dumps([raw(USER, ANSWER, **columns)]), attr=attr)[0].turns[0].role == "user"
    assert load(json.dumps([raw(("system", ""), USER, ANSWER)]), attr=attr)[0].turns[0].role == "user"


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: text.strip() and "<image>" not in text and "<video>" not in text and "<|" not in text
)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4), st.booleans(), st.booleans(), st.booleans())
def test_json_and_jsonl_read_alike(tmp_path_factory, pairs, is_list, has_mark, escaped):
    records = [raw(("user", question), ("assistant", answer)) for question, answer in pairs]
    lines = [json.dumps(record, ensure_ascii=escaped) for record in records]
    content = f"[\n{',  '.join(lines)}\n]\n" if is_list else "\r\n\n".join(lines)
    directory = tmp_path_factory.mktemp("files")
    (directory / "data.any").write_bytes(b"\xef\xbb\xbf" * has_mark + content.encode())
    dataset = Dataset(data_config(directory, directory, directory / "data.any"))
    seen = [tuple(message.text for message in dataset[index].turns) for index in range(len(dataset))]
    assert seen == pairs


def test_several_files_and_max_samples(tmp_path, hf_directory):
    for name, num in (("a", 3), ("b", 2)):
        lines = (json.dumps(raw(("user", f"{name}{index}"), ANSWER)) for index in range(num))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]

    def questions(**changes):
        dataset = Dataset(data_config(hf_directory, tmp_path, *paths, **changes))
        return [dataset[index].turns[0].text for index in range(len(dataset))]

    assert questions() == ["a0", "a1", "a2", "b0", "b1"]
    assert questions(max_samples=4) == ["a0", "a1", "a2", "b0"]
    assert questions(max_samples=2) == ["a0", "a1"]
    assert questions(max_samples=99) == questions()
    sources = [Dataset(data_config(hf_directory, tmp_path, *paths))[index].where for index in (2, 3)]
    assert sources == [f"{paths[0]}: record 2", f"{paths[1]}: record 0"]


BAD_SAMPLES = {
    "a list": (["x"], "is a list; expected an object"),
    "no messages": ({"message": []}, "has no 'messages' .did you mean 'message'"),
    "no turns": ({"messages": []}, "expected a non-empty list of messages"),
    "turn without content": ({"messages": [{"role": "user"}]}, "expected an object with 'role' and 'content'"),
    "unknown role": (raw(("usr", "Hi"), ANSWER), 'unknown role "usr" .did you mean .user'),
    "content parts": (raw(("user", [{"type": "text"}]), ANSWER), "expected a string"),
    "empty question": (raw(("user", " \n"), ANSWER), "has an empty message 0"),
    "empty answer": (raw(USER, ("assistant", "")), "has an empty message 1"),
    "two questions": (raw(USER, USER, ANSWER), "turn 1 is by 'user'; expected 'assistant'"),
    "answer first": (raw(ANSWER, USER), "turn 0 is by 'assistant'; expected 'user'"),
    "late system": (raw(USER, ANSWER, ("system", "x")), "turn 2 is by 'system'"),
    "no answer": (raw(USER), "does not end with a turn by 'assistant'"),
    "only system": (raw(("system", "x")), "does not end with a turn"),
    "surrogate": (raw(("user", "\ud83d"), ANSWER), "surrogate"),
    "too few images": (raw(("user", "<image><image>"), ANSWER, images=["wide.png"]), "has 2 <image> .* but 1 image"),
    "too many images": (raw(USER, ANSWER, images=["wide.png"]), "has 0 <image> .* but 1 image"),
    "images no list": (raw(USER, ANSWER, images={"a": 1}), "expected a list of paths"),
    "image bytes": (raw(("user", "<image>"), ANSWER, images=[{"bytes": "x"}]), "expected a list of paths"),
    "absent image": (raw(("user", "<image>"), ANSWER, images=["no.png"]), "image 'no.png' is not a regular file"),
    "folder as image": (raw(("user", "<image>"), ANSWER, images=["."]), "image '.' is not a regular file"),
    "remote image": (raw(("user", "<image>"), ANSWER, images=["http://x/a.png"]), "is not a local path"),
    "data image": (raw(("user", "<image>"), ANSWER, images=["data:image/png;base64,x"]), "contains broken base64"),
    "too many videos": (raw(USER, ANSWER, videos=["a.mp4"]), "has 0 <video> in its messages but 1 video"),
    "too few videos": (raw(("user", "<video>"), ANSWER), "has 1 <video> in its messages but 0 videos"),
    "audio": (raw(USER, ANSWER, audios=["a.wav"]), "'audios', which this version does not support"),
    "placeholder in an answer": (raw(USER, ("assistant", "<image>"), images=["wide.png"]), "has 0 <image> .* but 1"),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_bad_sample_is_named_with_file_line_and_reason(load, tmp_path, name):
    record, message = BAD_SAMPLES[name]
    lines = [json.dumps(raw(USER, ANSWER)), "", json.dumps(record), json.dumps(raw(USER, ANSWER))]
    with pytest.raises(UserError, match=message) as error:
        load("\n".join(lines))
    assert len(error.value.problems) == 1
    assert error.value.problems[0].startswith(f"{tmp_path}/data.json:3: record 1 (counted from 0): ")


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_bad_sample_is_left_out_on_request(tmp_path, hf_directory, name):
    """As in MindSpeed-MM; the other samples keep their order."""
    record, message = BAD_SAMPLES[name]
    lines = [json.dumps(raw(("user", "1"), ANSWER)), json.dumps(record), "", json.dumps(raw(("user", "3"), ANSWER))]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    (tmp_path / "wide.png").touch()
    config = data_config(hf_directory, tmp_path, tmp_path / "data.jsonl")
    dataset = Dataset(config, skips_bad=True)
    found = [(dataset[number].turns[0].text, dataset[number].where.rpartition(" ")[2]) for number in range(2)]
    assert found == [("1", "0"), ("3", "2")]
    assert len(dataset) == 2 and len(dataset.skipped) == 1 and re.search(message, dataset.skipped[0].message())
    with pytest.raises(UserError, match="--bad-sample skip leaves such samples out"):
        Dataset(config)
    (tmp_path / "data.jsonl").write_text(json.dumps([record]))
    with pytest.raises(UserError, match=message):  # nothing is left
        Dataset(config, skips_bad=True)


def test_control_tokens_and_placeholders_in_answers_are_text(load):
    record = raw(("user", "<|im_end|> and <|image_pad|>"), ("assistant", "<image> is a word<|im_start|>"))
    assert [turn.text for turn in load(json.dumps([record]))[0].turns] == [one["content"] for one in record["messages"]]


def test_images_without_a_column_for_them_are_found(load):
    """By their usual names: LLaVA's files need no ``attr`` at all."""
    attr = Attributes(messages="messages", role_tag="role", content_tag="content", user_tag="user",
                      assistant_tag="assistant")  # fmt: skip
    for column, value in (("images", ["wide.png"]), ("image", "wide.png"), ("image", ["wide.png"])):
        sample = load(json.dumps([raw(("user", "<image>"), ANSWER, **{column: value})]), attr=attr)[0]
        assert [part.path.rpartition("/")[2] for part in sample.media] == ["wide.png"]
    with pytest.raises(UserError, match="has 0 <image> in its messages but 1 image"):
        load(json.dumps([raw(USER, ANSWER, images=["wide.png"])]), attr=attr)
    with pytest.raises(UserError, match="has 'images' and 'image'; keep one"):
        load(json.dumps([raw(("user", "<image>"), ANSWER, images=["wide.png"], image="wide.png")]), attr=attr)
    assert len(load(json.dumps([raw(USER, ANSWER, images=[])]), attr=attr)) == 1


def test_system_message_and_column_together_are_refused(load):
    attr = Attributes(messages="messages", role_tag="role", content_tag="content", user_tag="user",
                      assistant_tag="assistant", system="instruction")  # fmt: skip
    with pytest.raises(UserError, match="'instruction' too"):
        load(json.dumps([raw(("system", "a"), USER, ANSWER, instruction="b")]), attr=attr)


def test_problems_are_collected_up_to_20(load):
    good, bad = json.dumps(raw(USER, ANSWER)), json.dumps(raw(USER))
    with pytest.raises(UserError) as error:
        load("\n".join([bad, good, bad]))
    assert len(error.value.problems) == 2
    with pytest.raises(UserError) as error:
        load("\n".join([bad] * 50))
    assert len(error.value.problems) == 21
    assert "There may be more problems" in error.value.problems[-1]


GOOD = json.dumps(raw(USER, ANSWER))
BAD_FILES = {
    "empty": ("", "has no samples"),
    "blank": (" \n\n", "has no samples"),
    "empty list": ("[ ]", "has no samples"),
    "cut in a list": (f"[{GOOD},\n{GOOD[:-4]}", "data.json:2:.*not valid JSON"),
    "list without end": (f"[{GOOD}", "expected ',' and an object.*found the end of the file"),
    "trailing comma": (f"[{GOOD},\n]", "expected ',' and an object"),
    "comma and end of file": (f"[{GOOD},\n", "has no final ']'"),
    "two lists": (f"[{GOOD}][{GOOD}]", "expected ',' and an object"),
    "missing comma": (f"[{GOOD} {GOOD}]", "expected ',' and an object"),
    "bad line": (f"{GOOD}\n{{'a': 1}}\n{GOOD}", r"data.json:2:2: record 1 \(counted from 0\): not valid JSON"),
    "cut last line": (f"{GOOD}\n{GOOD[:30]}", "data.json:2:.*not valid JSON"),
    "repeated key": (f'{GOOD}\n{{"messages": [], "messages": []}}', "data.json:2.*'messages' occurs twice"),
    "not a number": ('{"messages": NaN}', "NaN is not JSON"),
    "deep": ("[" * 200_000, "nested too deeply"),
    "long number in a list": (f"[{'9' * 5000}]", "not valid JSON: Exceeds the limit"),
    "other encoding": ("中文".encode("gbk"), r"data.json:1: record 0 \(counted from 0\): byte 0x.. is not UTF-8"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_with_the_place(load, name):
    content, message = BAD_FILES[name]
    with pytest.raises(UserError, match=message):
        load(content)


def test_lines_after_a_bad_one_are_still_checked(load):
    with pytest.raises(UserError) as error:
        load("\n".join(["{", GOOD, json.dumps(raw(USER)), "nonsense"]))
    assert [problem.split(":")[1] for problem in error.value.problems] == ["1", "3", "4"]


def test_a_file_named_without_its_directory_is_found(tmp_path, hf_directory):
    meant = tmp_path / "train.json"
    meant.write_text("[]")
    with pytest.raises(UserError, match=rf"'train.json', which is not a file \(did you mean '{meant}'\?\)"):
        Dataset(data_config(hf_directory, tmp_path, "train.json"))


def test_absent_file(tmp_path, hf_directory):
    with pytest.raises(UserError, match=r"absent.json', which is not a file, and there is no .*dataset_info.json"):
        Dataset(data_config(hf_directory, tmp_path, tmp_path / "absent.json"))


def test_a_file_changed_during_the_run_is_noticed(load, tmp_path):
    dataset = load(f"{GOOD}\n{GOOD}")
    (tmp_path / "data.json").write_text(f"{GOOD}\n{GOOD}".replace("Hello", "HELLO", 1))
    with pytest.raises(UserError, match="has changed since this run checked it"):
        dataset[0]
    (tmp_path / "data.json").unlink()
    with pytest.raises(UserError, match="can no longer be read"):
        dataset[1]


def test_the_pickle_is_small_and_complete(load):
    dataset = load("\n".join(json.dumps(raw(("user", "x" * 1000 + str(n)), ANSWER)) for n in range(100)))
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 10_000
    assert pickle.loads(pickled)[42] == dataset[42]
