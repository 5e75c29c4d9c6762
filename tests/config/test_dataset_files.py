import json
from pathlib import Path

import pytest

from mm.config.data import Attributes, DataConfig, DatasetFile, dataset_files
from mm.errors import UserError

ATTR = Attributes(messages="messages", images="images")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a.json", "b.jsonl", "odd%50", "data/c.json", "data/deep/d.json", "data/media/x.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(dataset: str, **changes) -> DataConfig:
    return DataConfig(**{"model_name_or_path": "hf", "dataset": dataset, "attr": ATTR, **changes})


def register(folder: Path, entries: object, name: str = "data/dataset_info.json") -> None:
    (folder / name).write_text(json.dumps(entries))


def test_files_with_rates(folder):
    assert dataset_files(config("a.json, b.jsonl%50,odd%50,odd%50%12.5,a.json%250"), "dataset") == [
        DatasetFile("a.json", "a.json", ATTR, "data"), DatasetFile("b.jsonl", "b.jsonl", ATTR, "data", 50.0),
        DatasetFile("odd%50", "odd%50", ATTR, "data"), DatasetFile("odd%50", "odd%50", ATTR, "data", 12.5),
        DatasetFile("a.json", "a.json", ATTR, "data", 250.0)]
    assert dataset_files(config("a.json"), "val_dataset") == []
    assert dataset_files(config("a.json", val_dataset="b.jsonl%10"), "val_dataset") == [
        DatasetFile("b.jsonl", "b.jsonl", ATTR, "data", 10.0)]


def test_names_of_llama_factorys_registry_and_of_qwens(folder):
    register(folder, {
        "chat": {"file_name": "c.json", "formatting": "sharegpt", "columns": {"messages": "msgs", "images": "pics"},
                 "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "u", "assistant_tag": "a",
                          "system_tag": None, "observation_tag": "tool"}, "num_samples": 7, "split": "train"},
        "plain": {"file_name": "deep/d.json", "formatting": "alpaca", "columns": {"prompt": "q", "history": None}},
        "qwen": {"annotation_path": "c.json", "data_path": "media"},
    })
    assert dataset_files(config("chat%50,plain,qwen,a.json"), "dataset") == [
        DatasetFile("chat", "data/c.json", Attributes(
            messages="msgs", images="pics", role_tag="role", content_tag="content", user_tag="u", assistant_tag="a",
            system_tag=None), "data", 50.0, 7),
        DatasetFile("plain", "data/deep/d.json", Attributes(formatting="alpaca", prompt="q"), "data"),
        DatasetFile("qwen", "data/c.json", Attributes(), "data/media"), DatasetFile("a.json", "a.json", ATTR, "data")]


def test_a_registry_may_stand_elsewhere(folder):
    register(folder, {"mine": {"file_name": "a.json"}}, "names.json")
    (source,) = dataset_files(config("mine", dataset_info="names.json"), "dataset")
    assert (source.path, source.media_root) == ("a.json", "data")
    with pytest.raises(UserError, match=r"other.json: cannot be read"):
        dataset_files(config("mine", dataset_info="other.json"), "dataset")


@pytest.mark.parametrize(("entry", "what"), [
    (3, "is 3; expected an object"),
    ({}, "has no file_name; give"),
    ({"file_name": "no.json"}, "has the file 'data/no.json', which does not exist"),
    ({"file_name": "c.json", "media_dir": "no"}, "has the media folder 'data/no', which is not a directory"),
    ({"file_nam": "c.json"}, "did you mean 'file_name'"),
    ({"hf_hub_url": "a/b"}, "name a local file as file_name"),
    ({"file_name": "c.json", "ranking": True}, "x.ranking is true, which is not supported"),
    ({"file_name": "c.json", "formatting": "openai"}, "formatting is \"openai\"; expected one of sharegpt, alpaca"),
    ({"file_name": "c.json", "columns": {"message": "m"}}, "x.columns.message is not read here (did you mean"),
    ({"file_name": "c.json", "columns": {"chosen": "m"}}, "x.columns.chosen is not read here"),
    ({"file_name": "c.json", "columns": {"messages": 3}}, "x: messages is 3; expected a string"),
    ({"file_name": "c.json", "columns": []}, "x.columns is []; expected an object"),
    ({"file_name": "c.json", "num_samples": 0}, "x.num_samples is 0; expected an integer of at least 1"),
])
def test_bad_entries(folder, entry, what):
    register(folder, {"x": entry})
    with pytest.raises(UserError) as error:
        dataset_files(config("x"), "dataset")
    assert what in str(error.value) and "dataset_info.json: x" in str(error.value)


def test_missing_names_are_reported_together(folder):
    with pytest.raises(UserError) as error:
        dataset_files(config("no.json,a.json,none"), "dataset")
    assert len(error.value.problems) == 2
    assert all("and there is no data/dataset_info.json" in problem for problem in error.value.problems)
    with pytest.raises(UserError, match=r"dataset is 'data', which is a directory; name the JSON"):
        dataset_files(config("data"), "dataset")
    register(folder, {"llava": {"file_name": "c.json"}})
    with pytest.raises(UserError, match=r"'lava', which is not a file, and no name in .* .did you mean 'llava'"):
        dataset_files(config("lava"), "dataset")
    register(folder, [])
    with pytest.raises(UserError, match="is not an object"):
        dataset_files(config("llava"), "dataset")
