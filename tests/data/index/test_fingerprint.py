"""What a checkpoint records about its data, and how changes are reported."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mm.data.index.dataset import Dataset, Fingerprint, TrainedOn, changed
from mm.data.index.measure import Measure
from mm.errors import UserError

A, B, C = (Fingerprint(f"{name}.json", f"sha of {name}", 10, f"samples of {name}") for name in "abc")

ORDER = "shuffled by --seed 3"

CHANGES = {
    "nothing": ((A, B), (A, B), []),
    "another name": ((A, B), (replace(A, dataset="moved/a.json"), B), []),
    "order": ((A, B), (B, A),
              ["the datasets were a.json, b.json, and are now b.json, a.json"]),
    "content": ((A, B), (A, replace(B, file_sha256="x", num_samples=11)),
                ["b.json has changed (10 then, 11 now)"]),
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
