"""The index: its lengths equal the encoder's, and it is created once per content and setting."""

import json
import multiprocessing
import os
import pickle
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from pyarrow import Table, parquet

from mm.batch import BatchTotals
from mm.data import workers
from mm.data.feed.loader import StepLoader
from mm.data.index import indexed_file as indexed
from mm.data.index.dataset import Dataset, validation_dataset
from mm.data.index.gauge import Gauge
from mm.data.index.index import Checker
from mm.data.lengths import Lengths
from mm.errors import UserError
from tests.data.clips import even, write_clip
from tests.data.oracle import RECORDS, data_config, photo


@pytest.fixture
def made(monkeypatch):
    """The files that were fully checked, in order."""
    found, make = [], indexed.make_index

    def counted(checker, *arguments):
        found.append(Path(checker.reader.file.path).name)
        return make(checker, *arguments)

    monkeypatch.setattr(indexed, "make_index", counted)
    return found


@pytest.fixture
def cached(write_dataset, tmp_path):
    """``write_dataset`` with its own cache folder."""
    return lambda *records, **changes: write_dataset(*records, **{"cache_dir": str(tmp_path / "cache"), **changes})


@pytest.mark.parametrize("changes", [{}, {"mask_history": True}, {"train_on_prompt": True},
                                     {"image_resize": "llamafactory"}, {"image_max_pixels": 60_000},
                                     {"packing": True}, {"truncation": "turns", "mask_history": True}])
@pytest.mark.parametrize("seq_length", [4096, 90, 60, 45])
def test_the_lengths_equal_the_encoders(cached, model_config, seq_length, changes):
    data = cached([*RECORDS, {"messages": [("system", "a"), ("user", "b"), ("assistant", "c")]}], **changes)
    gauge = Gauge.from_config(data, model_config, seq_length)
    dataset = Dataset(data, skips_bad=True, gauge=gauge)
    assert len(dataset) + dataset.num_too_long >= 3 and (data.drops_turns or not dataset.num_too_long)
    assert seq_length != 4096 or not (dataset.column("num_dropped_tokens").any() or dataset.num_too_long)
    whole = Dataset(data, gauge=Gauge.from_config(data, model_config, 4096)).lengths.num_tokens
    for number in range(len(dataset)):
        microbatch = gauge.encoder.encode(dataset[number])
        totals = BatchTotals.of([microbatch], model_config.vision)
        row = {name: int(values[number]) for name, values in vars(dataset.lengths).items()}
        assert row == {
            "num_tokens": totals.num_tokens, "num_target_tokens": totals.num_target_tokens,
            "num_media": totals.num_images, "num_patches": totals.num_patches,
            "num_image_pairs": totals.num_image_pairs, "num_window_pairs": totals.num_window_pairs,
        }
        place = int(dataset[number].where.rpartition(" ")[2])
        assert dataset.column("num_dropped_tokens")[number] == whole[place] - totals.num_tokens
    assert [str(values.dtype) for values in vars(dataset.lengths).values()] == ["int32"] * 4 + ["int64"] * 2


def test_the_lengths_of_a_video_equal_the_encoders(cached, model_config, tmp_path):
    """2.5 seconds at 2 frames per second, next to a picture and after plain text."""
    write_clip(tmp_path / "clip.mp4", even(75))
    shown = {"messages": [("user", "<video> or <image>?"), ("assistant", "A bar.")], "images": ["wide.png"],
             "videos": [str(tmp_path / "clip.mp4")]}
    data = cached([RECORDS[0], shown], video_max_pixels=96 * 96)
    data = replace(data, attr=replace(data.attr, videos="videos"))
    gauge = Gauge.from_config(data, model_config, 4096)
    for _ in range(2):  # the second time from the index
        dataset = Dataset(data, gauge=gauge)
        outline = gauge.encoder.outline(dataset[1])
        totals = BatchTotals.of([gauge.encoder.encode(dataset[1])], model_config.vision)
        lengths = dataset.lengths
        assert (lengths.num_tokens[1], lengths.num_target_tokens[1]) == (totals.num_tokens, totals.num_target_tokens)
        assert (lengths.num_media[1], lengths.num_patches[1]) == (totals.num_images, totals.num_patches)
        assert (lengths.num_image_pairs[1], lengths.num_window_pairs[1]) == (
            totals.num_image_pairs, totals.num_window_pairs)
        video, _ = outline.media
        (pairs, *_) = video.grid
        assert dataset.column("num_frames").tolist() == [0, 2 * pairs] == [0, 4]


def test_several_processes_give_the_same_index_as_one(cached, model_config, monkeypatch, tmp_path):
    data = cached([*RECORDS, {"messages": [("user", "no answer")]}] * 120, preprocessing_num_workers=1)
    monkeypatch.setattr("mm.data.read.spans.BLOCK_BYTES", 4096)
    gauge = Gauge.from_config(data, model_config, 4096)
    alone = Dataset(data, True, gauge)
    together = Dataset(replace(data, preprocessing_num_workers=2, overwrite_cache=True), True, gauge)
    assert len(alone) == len(together) == 120 * len(RECORDS) and together.skipped == alone.skipped
    assert len(alone.skipped) == 120 and alone.skipped[-1].message().startswith(f"{tmp_path}/data.json:")
    for name, values in vars(alone.lengths).items():
        assert (values == vars(together.lengths)[name]).all()
    assert together[500] == alone[500]


def test_the_second_start_uses_the_index_of_the_first(cached, model_config, made):
    data = cached()
    gauge = Gauge.from_config(data, model_config, 4096)
    first = Dataset(data, gauge=gauge)
    second = Dataset(data, gauge=Gauge.from_config(data, model_config, 4096))
    assert made == ["data.json"]
    assert [second[number] for number in range(len(second))] == [first[number] for number in range(len(first))]
    assert second.contents() == first.contents()
    Dataset(replace(data, overwrite_cache=True), gauge=gauge)
    assert len(made) == 2


def test_keys_that_nothing_reads_are_noted_at_every_start(cached, model_config, made, tmp_path, monkeypatch):
    """Counted over blocks and processes, named by the first record; with a limit only those within it."""
    monkeypatch.setattr("mm.data.read.spans.BLOCK_BYTES", 4096)
    records = [{**RECORDS[0], "id": number} | ({"solution": "x"} if number % 2 else {}) for number in range(300)]
    records[7]["hint"] = records[9]["hint"] = "x"
    data = cached(records, preprocessing_num_workers=2)
    gauge, path = Gauge.from_config(data, model_config, 4096), f"{tmp_path}/data.json"
    notes = [f"nothing reads {key}, which {count} records have (the first is {path}: record {first} (id {first})); "
             f"docs/data.md lists the keys that are read" for key, count, first in (("'solution'", 150, 1),
                                                                                  ("'hint'", 2, 7))]
    for _ in range(2):
        assert Dataset(data, gauge=gauge).notes == notes
    assert Dataset(replace(data, max_samples=4), gauge=gauge).notes == notes[:1]
    assert made == ["data.json"]
    assert Dataset(data).notes == notes  # without a tokenizer nothing is cached
    few = cached([{**RECORDS[0], f"key {number}": 1} for number in range(50)])
    found = Dataset(few, gauge=gauge).notes
    assert len(found) == 21 and found[-1].startswith("nothing reads the other unknown keys, which 30 records have")


def test_changed_inputs_create_a_new_index(cached, model_config, made, tmp_path, hf_directory):
    data = cached()

    def opened(data, seq_length=4096, model=model_config):
        Dataset(data, True, Gauge.from_config(data, model, seq_length))
        return len(made)

    assert opened(data) == 1
    assert opened(replace(data, max_samples=99, shuffle=False)) == 1
    assert opened(data, 4000) == 2
    assert opened(replace(data, image_max_pixels=90_000)) == 3
    assert opened(replace(data, train_on_prompt=True)) == 4
    assert opened(replace(data, attr=replace(data.attr, system="sys"))) == 5
    assert opened(replace(data, media_roots=(*data.media_roots, str(hf_directory)))) == 6
    vision = replace(model_config.vision, window_attn_size=56)
    assert opened(data, model=replace(model_config, vision=vision)) == 7
    copy = tmp_path / "copy of hf"
    copy.mkdir()
    for path in hf_directory.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert opened(replace(data, model_name_or_path=str(copy))) == 7  # the same bytes elsewhere
    config = json.loads((copy / "tokenizer.json").read_text())
    config["model"]["merges"].pop()
    (copy / "tokenizer.json").write_text(json.dumps(config))
    assert opened(replace(data, model_name_or_path=str(copy))) == 8
    path = Path(data.dataset[0])
    path.write_text(path.read_text().replace("Hello", "HELLO"))
    assert opened(data) == 9
    assert opened(data) == 9
    assert opened(replace(data, packing=True)) == 10
    assert opened(replace(data, packing=True, truncation="tokens")) == 10


def test_the_same_bytes_under_another_name_are_not_checked_again(cached, model_config, made, tmp_path):
    data = cached([*RECORDS, {"messages": []}])
    gauge = Gauge.from_config(data, model_config, 4096)
    Dataset(data, True, gauge)
    (tmp_path / "moved.json").write_bytes(Path(data.dataset[0]).read_bytes())
    moved = Dataset(replace(data, dataset=(str(tmp_path / "moved.json"),)), True, gauge)
    assert made == ["data.json"]
    assert moved.skipped[0].message().startswith(f"{tmp_path}/moved.json:")
    assert moved[0].where == f"{tmp_path}/moved.json: record 0"


def test_repaired_pictures_are_found(cached, model_config, made, tmp_path):
    data = cached([*RECORDS, {"messages": [("user", "<image>"), ("assistant", "x")], "images": [f"{tmp_path}/a.png"]}])
    gauge = Gauge.from_config(data, model_config, 4096)
    for _ in range(2):
        with pytest.raises(UserError, match=r"record 5 .*a.png' is not a regular file"):
            Dataset(data, gauge=gauge)
        assert len(Dataset(data, True, gauge)) == len(RECORDS)
    assert len(made) == 1
    photo(60, 60).save(tmp_path / "a.png")
    assert len(Dataset(data, gauge=gauge)) == len(RECORDS) + 1
    assert len(made) == 2


def test_bad_records_without_media_are_not_checked_again(cached, model_config, tmp_path, monkeypatch):
    picture = {"messages": [("user", "<image>"), ("assistant", "x")], "images": [f"{tmp_path}/a.png"]}
    data = cached([*RECORDS, picture, {"messages": [("user", ""), ("assistant", "x")]}])
    gauge = Gauge.from_config(data, model_config, 4096)
    first, looked_at = Dataset(data, True, gauge), []
    check = Checker.__call__

    def noted(checker, block):
        looked_at.append(block.first_index)
        return check(checker, block)

    monkeypatch.setattr(Checker, "__call__", noted)
    second = Dataset(data, True, gauge)
    assert second.skipped == first.skipped and [one.index for one in first.skipped] == [5, 6]
    assert looked_at == [5]


def test_a_picture_that_changes_later_is_noticed_when_it_is_read(cached, model_config, tmp_path, made):
    photo(60, 60).save(tmp_path / "a.png")
    data = cached([{"messages": [("user", "<image>"), ("assistant", "x")], "images": [f"{tmp_path}/a.png"]}])
    gauge = Gauge.from_config(data, model_config, 4096)
    dataset = Dataset(data, gauge=gauge)
    os.utime(tmp_path / "a.png", (1, 1))  # as in a copy: other times alone are no change
    assert dataset[0].media
    photo(90, 60).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"record 0: an image or video of it has changed .*mm-data index --again"):
        Dataset(data, gauge=gauge)[0]
    assert Dataset(replace(data, overwrite_cache=True), gauge=gauge)[0].media
    (tmp_path / "a.png").unlink()
    with pytest.raises(UserError, match=r"data.json: record 0: .*a.png' is not a regular file"):
        Dataset(data, gauge=gauge)[0]
    assert len(made) == 2


def test_a_picture_of_the_same_size_that_changes_later_is_noticed_when_it_is_read(cached, model_config, tmp_path, made):
    """A BMP file of 90 x 60 pixels has as many bytes as one of 60 x 90; other colours give the same lengths."""
    path = tmp_path / "a.bmp"
    photo(88, 60).save(path)
    size = path.stat().st_size
    data = cached([{"messages": [("user", "<image>"), ("assistant", "x")], "images": [str(path)]}])
    gauge = Gauge.from_config(data, model_config, 4096)
    first = Dataset(data, gauge=gauge).contents()

    def changed(width, height, seed):
        photo(width, height, seed=seed).save(path)
        os.utime(path, (seed, seed))
        assert path.stat().st_size == size
        return Dataset(data, gauge=gauge)

    dataset = changed(88, 60, seed=1)
    assert dataset[0].media and dataset.contents() == first  # what a checkpoint keeps does not look at times
    dataset = changed(30 * 4, 44, seed=2)
    with pytest.raises(UserError, match=r"record 0: an image or video of it has changed .*mm-data index --again"):
        dataset[0]
    assert pickle.loads(pickle.dumps(dataset)).contents() == first
    with pytest.raises(UserError, match="has changed since it was measured"):  # in a worker, too
        pickle.loads(pickle.dumps(dataset))[0]
    assert Dataset(replace(data, overwrite_cache=True), gauge=gauge)[0].media and len(made) == 2


def test_an_index_of_an_older_version_is_recreated_with_a_note(cached, model_config, tmp_path, made):
    data = cached()
    path = Path(data.dataset[0])
    os.utime(path, (1, 1))  # long enough ago for its checksum to be remembered
    gauge = Gauge.from_config(data, model_config, 4096)
    Dataset(data, gauge=gauge)
    (memory,) = (tmp_path / "cache" / "files").iterdir()
    remembered = json.loads(memory.read_text())
    # as an older version wrote it, whose rows had another name
    del remembered["json_crc32"]
    remembered["form"] = 5
    checksum = zlib.crc32(json.dumps(remembered, sort_keys=True).encode())
    memory.write_text(json.dumps({**remembered, "json_crc32": checksum}))
    for rows in (tmp_path / "cache").glob("*.npy"):
        rows.rename(rows.with_name(f"{'0' * 32}.rows"))
    for expected in (["its index is from an older version and is created again"], []):
        assert [note.removeprefix(f"{path}: ") for note in Dataset(data, gauge=gauge).notes] == expected
    assert len(made) == 2


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b""), lambda path: path.unlink(),
                                    lambda path: path.write_bytes(path.read_bytes()[:-8]),
                                    lambda path: path.write_bytes(path.read_bytes()[:-8] + b"\1" * 8),
                                    lambda path: path.write_bytes(path.read_bytes().replace(b"1", b"2")),
                                    lambda path: path.write_text("[1]"),
                                    lambda path: path.write_text("[" * 200_000),
                                    lambda path: path.write_bytes(bytes(path.stat().st_size))])
@pytest.mark.parametrize("kind", ["*.npy", "*.json"])
def test_a_damaged_index_is_recreated(cached, model_config, made, tmp_path, kind, damage):
    """With a note, unless it was deleted."""
    data = cached()
    gauge = Gauge.from_config(data, model_config, 4096)
    expected = Dataset(data, gauge=gauge).lengths.num_tokens.tolist()
    (path,) = (tmp_path / "cache").glob(kind)
    damage(path)
    for notes in ([f"{path} does not match its checksum, and is created again"] * path.exists(), []):
        dataset = Dataset(data, gauge=gauge)
        assert dataset.lengths.num_tokens.tolist() == expected and dataset.notes == notes
    assert len(made) == 2


@pytest.mark.parametrize("kind", ["files/*.json", "*.npy"])
def test_a_damaged_checksum_or_selection_is_recreated_with_a_note(cached, model_config, tmp_path, kind):
    data = cached(max_samples=2, val_rate=0.5) if kind == "*.npy" else cached()
    os.utime(data.dataset[0], (1, 1))  # long enough ago for its checksum to be remembered
    gauge = Gauge.from_config(data, model_config, 4096)
    expected = Dataset(data, True, gauge).lengths.num_tokens.tolist()
    path = min((tmp_path / "cache").glob(kind), key=lambda one: one.stat().st_size)
    path.write_bytes(bytes(path.stat().st_size))
    for notes in ([f"{path} does not match its checksum, and is created again"], []):
        dataset = Dataset(data, True, gauge)
        assert dataset.lengths.num_tokens.tolist() == expected and dataset.notes == notes


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(bytes(path.stat().st_size)),
                                    lambda path: os.truncate(path, path.stat().st_size // 2)])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_index_that_is_changed_during_a_run_ends_it_and_blames_no_sample(
    cached, model_config, tmp_path, damage, num_workers
):
    data = cached()
    gauge = Gauge.from_config(data, model_config, 4096)
    Dataset(data, gauge=gauge)
    dataset = Dataset(data, gauge=gauge)
    (path,) = (tmp_path / "cache").glob("*.npy")
    steps = [[[number]] for number in range(len(dataset))] * 9
    with closing(StepLoader(dataset, gauge.encoder, steps, num_workers, 1, skips_bad=True)) as loader:
        assert not next(loader).bad
        damage(path)
        with pytest.raises(UserError, match="this index of the samples was deleted or changed by another program"):
            for step in loader:
                assert not step.bad


def test_no_pickle_is_read(cached, model_config, made, tmp_path):
    data = cached()
    gauge = Gauge.from_config(data, model_config, 4096)
    Dataset(data, gauge=gauge)
    (path,) = (tmp_path / "cache").glob("*.npy")
    path.write_bytes(pickle.dumps({"a": 1}))
    assert len(Dataset(data, gauge=gauge)) == len(RECORDS) and len(made) == 2


def test_the_folder_of_the_index(cached, model_config, made, tmp_path, monkeypatch):
    """A file blocks the folder, because root can write everywhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "cache").write_text("")
    data = cached()
    gauge = Gauge.from_config(data, model_config, 4096)
    (note,) = Dataset(data, gauge=gauge).notes
    assert "is kept in" in note and "home/mm-data, because" in note and "cache cannot be written" in note
    assert Dataset(data, gauge=gauge).notes == [] and len(made) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dataset = Dataset(data, gauge=gauge)
    (note,) = dataset.notes
    assert "kept in memory only, so every start creates it again" in note and "basic_parameters.cache_dir" in note
    assert pickle.loads(pickle.dumps(dataset)).lengths.num_tokens.tolist() == dataset.lengths.num_tokens.tolist()


def test_without_cache_dir_it_lies_below_dataset_dir(cached, model_config, tmp_path):
    data = cached(RECORDS[:1], cache_dir=None, dataset_dir=str(tmp_path))
    Dataset(data, gauge=Gauge.from_config(data, model_config, 4096))
    assert len(list((tmp_path / ".mm-index").glob("*.npy"))) == 1


def test_few_bytes_per_sample(cached, model_config):
    data = cached(RECORDS * 400)
    dataset = Dataset(data, gauge=Gauge.from_config(data, model_config, 4096))
    gauge = dataset.files.files[0].reader.gauge  # workers get its encoder in any case, and once
    assert len(pickle.dumps((gauge, dataset))) - len(pickle.dumps(gauge)) < 10_000
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy[1999] == dataset[1999] and (copy.lengths.num_tokens == dataset.lengths.num_tokens).all()
    assert isinstance(copy.lengths, Lengths)


def test_selections_follow_the_seed_and_share_one_index(cached, model_config, made, tmp_path):
    records = [{"messages": [("user", f"{number}"), ("assistant", "x")]} for number in range(40)]
    data = cached(records)
    gauge = Gauge.from_config(data, model_config, 4096)

    def numbers(dataset):
        return [int(dataset[place].turns[0].text) for place in range(len(dataset))]

    def of(seed=0, **changes):
        return numbers(Dataset(replace(data, **changes), gauge=gauge, seed=seed))

    path = data.dataset[0]
    assert of() == list(range(40))
    half, other = of(dataset=(f"{path}%50",)), of(dataset=(f"{path}%50",), seed=1)
    assert len(half) == len(other) == 20 and half == sorted(half) and half != other
    assert of(dataset=(f"{path}%50",)) == half
    assert sorted(of(dataset=(f"{path}%150",))) == sorted([*range(40), *half])
    assert of(dataset=(f"{path}%50", path)) == [*half, *range(40)]
    assert of(dataset=(f"{path}%50", path), max_samples=25) == [*half, *range(5)]
    training = of(val_rate=0.25)
    validation = numbers(validation_dataset(replace(data, val_rate=0.25), gauge=gauge))
    assert (len(training), len(validation)) == (30, 10) and sorted(training + validation) == list(range(40))
    assert of(val_rate=0.25, seed=1) != training
    assert len(validation_dataset(replace(data, val_rate=0.25, val_max_samples=3), gauge=gauge)) == 3
    assert validation_dataset(data, gauge=gauge) is None
    assert made == ["data.json"]
    (tmp_path / "val.json").write_text(json.dumps([{"messages": [{"role": "user", "content": "7"},
                                                                  {"role": "assistant", "content": "x"}]}]))
    both = replace(data, val_dataset=(str(tmp_path / "val.json"),), val_rate=0.5)
    assert numbers(validation_dataset(both, gauge=gauge)) == [7]
    assert numbers(Dataset(both, gauge=gauge)) == list(range(40))  # val_dataset wins
    with pytest.raises(UserError, match=r"data.json: no samples are used; raise the rates"):
        of(dataset=(f"{path}%0",))
    with pytest.raises(UserError, match=r"val.json: no samples are used; raise the rates"):
        validation_dataset(replace(both, val_dataset=(f"{tmp_path / 'val.json'}%0",)), gauge=gauge)
    with pytest.raises(UserError, match=r"val_rate = 0.01 leaves no samples of \S+ for validation, of 40 usable sa"):
        validation_dataset(replace(data, val_rate=0.01), gauge=gauge)


def test_max_samples_reads_no_more_than_it_needs(cached, model_config, made, monkeypatch):
    monkeypatch.setattr("mm.data.read.spans.BLOCK_BYTES", 512)
    data = cached([*RECORDS * 10, {"messages": []}], max_samples=12)
    gauge = Gauge.from_config(data, model_config, 4096)
    assert len(Dataset(data, gauge=gauge)) == len(Dataset(data, gauge=gauge)) == 12  # the bad one is never reached
    assert len(made) == 1
    assert len(Dataset(replace(data, max_samples=None), True, gauge)) == 50
    assert len(Dataset(replace(data, max_samples=20), gauge=gauge)) == 20  # out of the whole one
    assert len(made) == 2


def test_processes_end_with_the_iterator():
    """As after enough bad samples."""
    numbers = workers.in_processes(abs, iter(range(-(10**9), 0)), 2)
    assert next(numbers) == 10**9
    numbers.close()
    assert multiprocessing.active_children() == []


def test_parquet(model_config, hf_directory, media_directory, tmp_path):
    raw = [{**record, "images": [record["images"]] if isinstance(record.get("images"), str) else record.get("images"),
            "messages": [{"role": role, "content": text} for role, text in record["messages"]]} for record in RECORDS]
    path = tmp_path / "data.json"  # what it is, is seen in it
    parquet.write_table(Table.from_pylist(raw * 3), path, row_group_size=4)
    (tmp_path / "same.json").write_text(json.dumps(raw * 3))
    of_parquet, of_json = (
        Dataset(data, gauge=Gauge.from_config(data, model_config, 4096)) for data in (
            data_config(hf_directory, media_directory, one, cache_dir=str(tmp_path)) for one in (
                path, tmp_path / "same.json")))
    assert [of_parquet[number].turns for number in range(15)] == [of_json[number].turns for number in range(15)]
    assert of_parquet.lengths.num_tokens.tolist() == of_json.lengths.num_tokens.tolist()
    parquet.write_table(Table.from_pylist([*raw, {"messages": []}]), path)
    data = data_config(hf_directory, media_directory, path, cache_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"data.json: record 5 .counted from 0.: has no 'messages'|is \[\]"):
        Dataset(data)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="is not a complete Parquet file"):
        Dataset(data)
