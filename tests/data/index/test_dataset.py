"""Samples of a data JSON in order, and what a checkpoint records about them."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.data.index.dataset import Dataset, Fingerprint, TrainedOn, changed
from mm.data.index.index import Measure
from mm.data.sample import Image, Turn
from mm.errors import UserError
from tests.data.oracle import ATTRIBUTES, RECORDS, data_config

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


@pytest.mark.parametrize("columns", [{}, {"instruction": ""}, {"instruction": None}])
def test_an_empty_system_text_is_none(load, columns):
    attr = replace(ATTRIBUTES, images=None, system="instruction")
    assert load(json.dumps([raw(USER, ANSWER, **columns)]), attr=attr)[0].turns[0].role == "user"
    assert load(json.dumps([raw(("system", ""), USER, ANSWER)]), attr=attr)[0].turns[0].role == "user"


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: text.strip() and "<image>" not in text and "<video>" not in text and "<|" not in text)


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


def test_images_without_a_column_for_them_are_found(load):
    """By their usual names: LLaVA's files need no ``attr`` at all."""
    attr = replace(ATTRIBUTES, images=None)
    for column, value in (("images", ["wide.png"]), ("image", "wide.png"), ("image", ["wide.png"])):
        sample = load(json.dumps([raw(("user", "<image>"), ANSWER, **{column: value})]), attr=attr)[0]
        assert [part.path.rpartition("/")[2] for part in sample.media] == ["wide.png"]
    with pytest.raises(UserError, match="has 0 <image> in its messages but 1 image"):
        load(json.dumps([raw(USER, ANSWER, images=["wide.png"])]), attr=attr)
    with pytest.raises(UserError, match="has 'images' and 'image'; keep one"):
        load(json.dumps([raw(("user", "<image>"), ANSWER, images=["wide.png"], image="wide.png")]), attr=attr)
    assert len(load(json.dumps([raw(USER, ANSWER, images=[])]), attr=attr)) == 1


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
    "blank": (" \n\n", "has no samples"),
    "empty list": ("[ ]", "has no samples"),
    "cut in a list": (f"[{GOOD},\n{GOOD[:-4]}", r"data.json:2: record 1 \(counted from 0\): not valid JSON: Untermin"),
    "list without end": (f"[{GOOD}", "expected ',' or ']' after it"),
    "comma and end of file": (f"[{GOOD},\n", "record 1 .*: not valid JSON: Expecting value; the file may be truncated"),
    "two lists": (f"[{GOOD}][{GOOD}]", "expected the end of the file"),
    "missing comma": (f"[{GOOD} {GOOD}]", "expected ',' or ']' after it"),
    "deep": ("{}" + "[" * 200_000, "not valid JSON"),
    "deep in a list": ("[" * 200_000, "nested too deeply"),
    "long number in a list": (f"[{'9' * 5000}]", "not valid JSON: Exceeds the limit"),
    "other encoding": ("中文".encode("gbk"), r"data.json:1: record 0 \(counted from 0\): byte 0x.. is not UTF-8"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_with_the_place(load, name):
    content, message = BAD_FILES[name]
    with pytest.raises(UserError, match=message):
        load(content)


def test_a_file_that_is_not_there_is_named(tmp_path, hf_directory):
    meant = tmp_path / "train.json"
    meant.write_text("[]")
    with pytest.raises(UserError, match=rf"'train.json', which is not a file \(did you mean '{meant}'\?\)"):
        Dataset(data_config(hf_directory, tmp_path, "train.json"))
    with pytest.raises(UserError, match=r"absent.json', which is not a file, and there is no .*dataset_info.json"):
        Dataset(data_config(hf_directory, tmp_path, tmp_path / "absent.json"))


def test_the_pickle_is_small_and_complete(load):
    dataset = load("\n".join(json.dumps(raw(("user", "x" * 1000 + str(n)), ANSWER)) for n in range(100)))
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 10_000
    assert pickle.loads(pickled)[42] == dataset[42]


A, B, C = (Fingerprint(f"{name}.json", f"sha of {name}", 10, f"samples of {name}") for name in "abc")

ORDER = "shuffled by --seed 3"

CHANGES = {
    "nothing": ((A, B), (A, B), []),
    "another name": ((A, B), (replace(A, dataset="moved/a.json"), B), []),
    "order": ((A, B), (B, A), ["the datasets were a.json, b.json, and are now b.json, a.json"]),
    "content": ((A, B), (A, replace(B, file_sha256="x", num_samples=11)), ["b.json has changed (10 then, 11 now)"]),
    "rate": ((A, B), (replace(A, num_samples=5, samples_sha256="x"), B),
             ["other samples of a.json are used (10 then, 5 now), because of a rate (%), max_samples, val_rate, "
              "--seed, --seq-length, or repaired samples"]),
    "one more": ((A,), (A, B), ["b.json with 10 samples is new"]),
    "one less": ((A, B), (B,), ["a.json with 10 samples is missing"]),
    "once less": ((A, A, B), (A, B), ["the datasets were a.json, a.json, b.json, and are now a.json, b.json"]),
    "everything": ((A, B), (C,), ["c.json with 10 samples is new", "a.json with 10 samples is missing",
                                  "b.json with 10 samples is missing"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_named(name):
    then, now, expected = CHANGES[name]
    assert list(changed(then, now)) == expected


def test_changed_data_are_refused_or_start_at_the_first_sample():
    """Unchanged data continue in either case, so a restarted job continues."""
    before = TrainedOn((A, B), began_at=40)
    assert TrainedOn.from_json(json.loads(json.dumps(before.to_json())), Path("save")) == before
    for allowed in (False, True):
        assert before.followed_by((A, B), ORDER, 100, allowed) == replace(before, order=ORDER)  # did not say
    with pytest.raises(UserError, match=r"the data differ from those of the checkpoint: c.json .* new; b.json"
                                        r".*  This changes the order .* --allow-new-data, .*; or --finetune"):
        before.followed_by((A, C), ORDER, 100, False)
    after = before.followed_by((A, C), ORDER, 100, True)
    assert after == TrainedOn((A, C), 100, ORDER) and after.followed_by((A, C), ORDER, 160, True) == after


def test_a_changed_order_is_refused_or_starts_at_the_first_sample():
    before = TrainedOn((A, B), 40, ORDER)
    other = "shuffled by --seed 5"
    with pytest.raises(UserError, match=r"the samples were shuffled by --seed 3, and are now shuffled by --seed 5.  "
                                        r"This .* give the same data and --seed; or add --allow-new-data"):
        before.followed_by((A, B), other, 100, False)
    assert before.followed_by((A, B), other, 100, True) == TrainedOn((A, B), 100, other)


def test_contents_of_a_dataset(write_dataset, model_config, tmp_path, monkeypatch):
    """Depends on the content of the files and the selected samples, not on file names or other settings."""
    records = [{"messages": [("user", f"{number}"), ("assistant", "x")]} for number in range(20)]
    data = write_dataset(records, cache_dir=str(tmp_path / "cache"))
    (path,) = data.dataset
    (tmp_path / "moved.json").write_bytes((tmp_path / "data.json").read_bytes())
    (tmp_path / "other.json").write_bytes((tmp_path / "data.json").read_bytes().replace(b"19", b"20"))

    def of(*dataset, seed=0, seq_length=4096, **changes):
        settings = replace(data, dataset=dataset or (path,), **changes)
        return Dataset(settings, True, Measure.from_config(settings, model_config, seq_length), seed).fingerprints()

    first = of()
    assert [(one.dataset, one.num_samples) for one in first] == [(path, 20)] and first == of()
    moved = of(str(tmp_path / "moved.json"))
    for same in (moved, of(shuffle=False), of(seq_length=2000), of(packing=True), of(seed=1)):
        assert not list(changed(first, same))
    for other in (of(str(tmp_path / "other.json")), of(f"{path}%50"), of(max_samples=19), of(val_rate=0.1),
                  of(path, path), of(f"{path}%200")):
        assert list(changed(first, other))
    assert list(changed(of(f"{path}%50"), of(f"{path}%50", seed=1)))
    monkeypatch.chdir(tmp_path)
    half = of(f"{path}%50", seed=1)
    for same in (f"{path}%50", "data.json%50", "moved.json%50"):
        assert not list(changed(half, of(same, seed=1)))
    assert list(changed(of(path, str(tmp_path / "other.json")), of(str(tmp_path / "other.json"), path)))
    assert sum(one.num_samples for one in of(path, path, val_rate=0.25)) == 30
