"""The index: its lengths equal the encoder's, and it is created once per content and setting."""

import json
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from mm.batch import BatchTotals
from mm.data.index import dataset as sample_files
from mm.data.index.dataset import Dataset
from mm.data.index.index import Checker, Measure
from mm.data.loader.loader import StepLoader
from mm.data.sample import Lengths
from mm.errors import UserError
from tests.data.clips import even, write_clip
from tests.data.oracle import RECORDS, photo


@pytest.fixture
def made(monkeypatch):
    """The files that were fully checked, in order."""
    found, make = [], sample_files.make_index

    def counted(checker, *arguments):
        found.append(Path(checker.reader.file.path).name)
        return make(checker, *arguments)

    monkeypatch.setattr(sample_files, "make_index", counted)
    return found


@pytest.fixture
def cached(write_dataset, tmp_path):
    """``write_dataset`` with its own cache folder."""
    return lambda *records, **changes: write_dataset(*records, **{"cache_dir": str(tmp_path / "cache"), **changes})


def encoded_length(dataset, number, measure, model_config):
    """The number of tokens of an encoded sample; all of its lengths in the index must be those of the encoding."""
    totals = BatchTotals.of([measure.encoder.encode(dataset[number])], model_config.vision)
    assert {name: int(values[number]) for name, values in vars(dataset.lengths).items()} == {
        "num_tokens": totals.num_tokens, "num_target_tokens": totals.num_target_tokens,
        "num_media": totals.num_images, "num_patches": totals.num_patches,
        "num_image_pairs": totals.num_image_pairs, "num_window_pairs": totals.num_window_pairs,
    }
    return totals.num_tokens


@pytest.mark.parametrize("changes", [{}, {"mask_history": True}, {"train_on_prompt": True},
                                     {"image_resize": "llamafactory"}, {"image_max_pixels": 60_000},
                                     {"packing": True}, {"truncation": "turns", "mask_history": True}])
@pytest.mark.parametrize("seq_length", [4096, 90, 60, 45])
def test_the_lengths_equal_the_encoders(cached, model_config, seq_length, changes):
    data = cached([*RECORDS, {"messages": [("system", "a"), ("user", "b"), ("assistant", "c")]}], **changes)
    measure = Measure.from_config(data, model_config, seq_length)
    dataset = Dataset(data, skips_bad=True, measure=measure)
    assert len(dataset) + dataset.num_too_long >= 3 and (data.drops_turns or not dataset.num_too_long)
    assert seq_length != 4096 or not (dataset.column("num_dropped_tokens").any() or dataset.num_too_long)
    whole = Dataset(data, measure=Measure.from_config(data, model_config, 4096)).lengths.num_tokens
    for number in range(len(dataset)):
        place = int(dataset[number].where.rpartition(" ")[2])
        num_tokens = encoded_length(dataset, number, measure, model_config)
        assert dataset.column("num_dropped_tokens")[number] == whole[place] - num_tokens
    assert [str(values.dtype) for values in vars(dataset.lengths).values()] == ["int32"] * 4 + ["int64"] * 2


def test_the_lengths_of_a_video_equal_the_encoders(cached, model_config, tmp_path):
    """2.5 seconds at 2 frames per second, next to a picture and after plain text."""
    write_clip(tmp_path / "clip.mp4", even(75))
    shown = {"messages": [("user", "<video> or <image>?"), ("assistant", "A bar.")], "images": ["wide.png"],
             "videos": [str(tmp_path / "clip.mp4")]}
    data = cached([RECORDS[0], shown], video_max_pixels=96 * 96)
    data = replace(data, attr=replace(data.attr, videos="videos"))
    measure = Measure.from_config(data, model_config, 4096)
    for _ in range(2):  # the second time from the index
        assert encoded_length(Dataset(data, measure=measure), 1, measure, model_config)


def test_several_processes_give_the_same_index_as_one(cached, model_config, monkeypatch, tmp_path):
    """Oddities are counted over all of them, and named by the first record; also at the next start."""
    monkeypatch.setattr("mm.data.records.records.BLOCK_BYTES", 4096)
    records = [{**record, "solution": "x"} if record is RECORDS[1] else record for record in RECORDS]
    data = cached([*records, {"messages": [("user", "no answer")]}] * 120, preprocessing_num_workers=1)
    measure = Measure.from_config(data, model_config, 4096)
    alone = Dataset(data, True, measure)
    together = Dataset(replace(data, preprocessing_num_workers=2, overwrite_cache=True), True, measure)
    assert len(alone) == len(together) == 120 * len(RECORDS) and together.skipped == alone.skipped
    assert len(alone.skipped) == 120 and alone.skipped[-1].message().startswith(f"{tmp_path}/data.json:")
    for name, values in vars(alone.lengths).items():
        assert (values == vars(together.lengths)[name]).all()
    assert together[500] == alone[500]
    note = (f"120 records, the first is {tmp_path}/data.json: record 1: nothing reads 'solution'; docs/data.md lists "
            f"the keys that are read")
    assert alone.notes == together.notes == Dataset(data, True, measure).notes == [note]
    copy = pickle.loads(pickle.dumps(together))
    assert copy[499] == alone[499] and (copy.lengths.num_tokens == alone.lengths.num_tokens).all()
    assert isinstance(copy.lengths, Lengths)
    assert len(pickle.dumps((measure, together))) - len(pickle.dumps(measure)) < 10_000
    few = cached([{**RECORDS[0], f"key {number}": 1} for number in range(50)])
    found = Dataset(few, measure=measure).notes
    assert len(found) == 21 and found[-1].startswith("30 records, the first is ")


def test_one_of_several_creates_it(cached, model_config, made):
    """The others wait; each then maps the same file."""
    data = cached(RECORDS * 20, preprocessing_num_workers=1)
    measure = Measure.from_config(data, model_config, 4096)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda _: Dataset(data, measure=measure), range(3)))
    assert len(made) == 1 and len({dataset.columns.files[0].path for dataset in found}) == 1


def test_changed_inputs_create_a_new_index(cached, model_config, made, tmp_path, hf_directory):
    data = cached([*RECORDS, {"messages": []}])

    def opened(data, seq_length=4096, model=model_config):
        return Dataset(data, True, Measure.from_config(data, model, seq_length))

    first = opened(data)
    second = opened(data)
    assert [second[number] for number in range(5)] == [first[number] for number in range(5)]
    assert second.fingerprints() == first.fingerprints() and second.skipped == first.skipped
    assert made == ["data.json"]
    path = tmp_path / "moved.json"  # the same bytes under another name
    path.write_bytes(Path(data.dataset[0]).read_bytes())
    moved = opened(replace(data, dataset=(str(path),), shuffle=False))
    assert made == ["data.json"] and moved.skipped[0].message().startswith(f"{path}:")
    assert moved[0].where == f"{path}: record 0"
    vision = replace(model_config.vision, window_attn_size=56)
    copy = shutil.copytree(hf_directory, tmp_path / "copy of hf")
    opened(replace(data, model_name_or_path=str(copy)))  # the same bytes elsewhere
    assert len(made) == 1
    config = json.loads((copy / "tokenizer.json").read_text())
    config["model"]["merges"].pop()
    (copy / "tokenizer.json").write_text(json.dumps(config))
    for number, changed in enumerate((
            (data, 4000), (replace(data, image_max_pixels=90_000),), (replace(data, train_on_prompt=True),),
            (replace(data, attr=replace(data.attr, system="sys")),), (data, 4096, replace(model_config, vision=vision)),
            (replace(data, media_roots=(*data.media_roots, str(hf_directory))),), (replace(data, packing=True),),
            (replace(data, model_name_or_path=str(copy)),), (replace(data, overwrite_cache=True),))):
        opened(*changed)
        assert len(made) == 2 + number
    path = Path(data.dataset[0])
    path.write_text(path.read_text().replace("Hello", "HELLO"))
    opened(data)
    assert len(made) == 11


def test_repaired_pictures_are_found(cached, model_config, made, tmp_path, monkeypatch):
    """Only the bad records are looked at again."""
    data = cached([*RECORDS, {"messages": [("user", "<image>"), ("assistant", "x")], "images": [f"{tmp_path}/a.png"]},
                   {"messages": [("user", ""), ("assistant", "x")]}])
    measure, looked_at, check = Measure.from_config(data, model_config, 4096), [], Checker.__call__

    def noted(checker, block):
        looked_at.append(block.first_index)
        return check(checker, block)

    with pytest.raises(UserError, match=r"record 5 .*a.png' is not a regular file"):
        Dataset(data, measure=measure)
    monkeypatch.setattr(Checker, "__call__", noted)
    found = Dataset(data, True, measure)
    assert len(found) == len(RECORDS) and [one.index for one in found.skipped] == [5, 6]
    assert len(made) == 1 and set(looked_at) == {5, 6}
    photo(60, 60).save(tmp_path / "a.png")
    assert len(Dataset(data, True, measure)) == len(RECORDS) + 1
    assert len(made) == 2


def test_a_picture_that_changes_later_is_noticed_when_it_is_read(cached, model_config, tmp_path, made):
    photo(60, 60).save(tmp_path / "a.png")
    data = cached([{"messages": [("user", "<image>"), ("assistant", "x")], "images": [f"{tmp_path}/a.png"]}])
    measure = Measure.from_config(data, model_config, 4096)
    first = Dataset(data, measure=measure)

    def read(dataset):
        with closing(StepLoader(dataset, measure.encoder, [[[0]]], 0)) as loader:
            return next(loader)

    photo(60, 60, seed=3).save(tmp_path / "a.png")  # other colours give the same lengths
    assert read(first) and Dataset(data, measure=measure).fingerprints() == first.fingerprints()
    photo(190, 60).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"record 0: an image or video of it has changed .*mm-data check --again"):
        read(Dataset(data, measure=measure))
    assert read(Dataset(replace(data, overwrite_cache=True), measure=measure))
    (tmp_path / "a.png").unlink()
    with pytest.raises(UserError, match=r"data.json: record 0: .*a.png' is not a regular file"):
        read(Dataset(data, measure=measure))
    assert len(made) == 2


def with_a_flipped_bit(content: bytes) -> bytes:
    return content[:20] + bytes([content[20] ^ 1]) + content[21:]


@pytest.mark.parametrize(("kind", "num_checks"), [("*.rows", 5), ("*.json", 5), ("*.numbers", 1), ("files/*", 1)])
def test_a_damaged_index_is_recreated(cached, model_config, made, tmp_path, kind, num_checks):
    """With a note, unless it was deleted; a bad sample stays the same."""
    data = cached([*RECORDS, {"messages": []}])
    os.utime(data.dataset[0], (1, 1))  # long enough ago for its checksum to be kept
    measure = Measure.from_config(data, model_config, 4096)
    first = Dataset(data, True, measure)
    expected, skipped = first.lengths.num_tokens.tolist(), first.skipped
    (path,) = (tmp_path / "cache").glob(kind)
    for damaged in (lambda content: bytes(len(content)), lambda content: content[: len(content) // 2],
                    with_a_flipped_bit, None):
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(damaged(path.read_bytes()))
        for notes in ([f"{path} does not match its checksum, and is created again"] * path.exists(), []):
            dataset = Dataset(data, True, measure)
            assert (dataset.lengths.num_tokens.tolist(), dataset.skipped, dataset.notes) == (expected, skipped, notes)
    assert len(made) == num_checks


def test_the_folder_of_the_index(cached, model_config, made, tmp_path, monkeypatch):
    """A file blocks the folder, because root can write everywhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "cache").write_text("")
    data = cached()
    os.utime(data.dataset[0], (1, 1))  # long enough ago for its checksum to be kept
    measure = Measure.from_config(data, model_config, 4096)
    for _ in range(2):
        Dataset(data, measure=measure)
    assert len(made) == 1 and len(list((tmp_path / "home/mm-data/files").iterdir())) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"cannot be written to .*cache or .*; set basic_parameters.cache_dir"):
        Dataset(data, measure=measure)
    Dataset(replace(cached(RECORDS[:1]), cache_dir=None, dataset_dir=str(tmp_path)), measure=measure)
    assert len(list((tmp_path / ".mm-index").glob("*.rows"))) == 1


def test_selections_follow_the_seed_and_share_one_index(cached, model_config, made, tmp_path):
    records = [{"messages": [("user", f"{number}"), ("assistant", "x")]} for number in range(40)]
    data = cached(records)
    measure = Measure.from_config(data, model_config, 4096)

    def of(seed=0, split="training", **changes):
        dataset = Dataset(replace(data, **changes), measure=measure, seed=seed, split=split)
        return [int(dataset[place].turns[0].text) for place in range(len(dataset))]

    path = data.dataset[0]
    assert of() == list(range(40))
    half, other = of(dataset=(f"{path}%50",)), of(dataset=(f"{path}%50",), seed=1)
    assert len(half) == len(other) == 20 and half == sorted(half) and half != other
    assert of(dataset=(f"{path}%50",)) == half
    assert sorted(of(dataset=(f"{path}%150",))) == sorted([*range(40), *half])
    assert of(dataset=(f"{path}%50", path)) == [*half, *range(40)]
    training, validation = of(val_rate=0.25), of(val_rate=0.25, split="validation")
    assert (len(training), len(validation)) == (30, 10) and sorted(training + validation) == list(range(40))
    assert of(val_rate=0.25, seed=1) != training
    assert of(val_rate=0.25, val_max_samples=3, split="validation") == validation[:3]
    assert made == ["data.json"]
    assert of(dataset=(f"{path}%50", path), max_samples=25) == [*half, *range(5)]
    (tmp_path / "val.json").write_text(json.dumps([{"messages": [{"role": "user", "content": "7"},
                                                                  {"role": "assistant", "content": "x"}]}]))
    both = {"val_dataset": (str(tmp_path / "val.json"),), "val_rate": 0.5}
    assert of(**both, split="validation") == [7]
    assert of(**both) == list(range(40))  # val_dataset wins
    with pytest.raises(UserError, match=r"data.json: no samples are used; raise the rates"):
        of(dataset=(f"{path}%0",))
    with pytest.raises(UserError, match=r"val_rate = 0.01 leaves no samples of \S+ for validation"):
        of(val_rate=0.01, split="validation")


def test_max_samples_reads_no_more_than_it_needs(cached, model_config, made, monkeypatch):
    monkeypatch.setattr("mm.data.records.records.BLOCK_BYTES", 512)
    data = cached([*RECORDS * 10, {"messages": []}], max_samples=12)
    measure = Measure.from_config(data, model_config, 4096)
    for _ in range(2):
        assert len(Dataset(data, measure=measure)) == 12  # the bad one is never reached
    assert len(made) == 1
    assert len(Dataset(replace(data, max_samples=None), True, measure)) == 50
