"""Training checkpoints on disk: atomic even if the process is killed, deleted only by their own run, cleaned up."""

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mm.checkpoint import directories
from mm.checkpoint import training_files as writer
from mm.checkpoint.manifest import MANIFEST_FILE
from mm.checkpoint.pipelined_write import Values
from mm.checkpoint.source import holds_nothing
from mm.checkpoint.tensor_io import Files
from mm.checkpoint.training_manifest import CheckpointManifest, CheckpointTensor, TrainingDirectory
from mm.errors import UserError
from mm.weights.fuse import local_shape, shard
from mm.weights.shard import split
from mm.weights.table import model_weights
from tests.killed import run_killed
from tests.mm_convert.models import SmallModel

NOBODY = 65534


def manifest(iteration: int, pieces: list[CheckpointTensor], run_id: str | None) -> CheckpointManifest:
    return CheckpointManifest(iteration, 0, 1, 1, 1, SmallModel(2).model, None, {}, tuple(pieces), run_id=run_id)


def write_small(directory: Path, iteration: int, value: float = 0.0, run_id: str | None = None) -> None:
    """Save a checkpoint of two small files."""
    temporary = writer.begin(directory, iteration, 100)
    pieces = []
    for name in ("a", "b"):
        tensor = torch.full((3,), value)
        piece = CheckpointTensor.of(tensor.dtype, tensor.shape, f"{name}.safetensors", name, "random")
        pieces += writer.write_pieces(temporary, piece.stored.file, [(piece, Values(tensor))])
    writer.commit(temporary, manifest(iteration, pieces, run_id))


def small_value(directory: Path) -> tuple[str, float]:
    stored = TrainingDirectory.open(directory)
    values = {float(value) for name in ("a", "b") for value in stored.read_random(name)}
    assert len(values) == 1
    return stored.path.name, values.pop()


@pytest.mark.parametrize("iteration", [10, 20], ids=["over-the-same-iteration", "next-iteration"])
def test_a_save_killed_at_any_point_leaves_a_complete_checkpoint(iteration: int, tmp_path: Path) -> None:
    outcomes, point = [], 0
    was_killed = True
    while was_killed:
        point += 1
        directory = tmp_path / str(point)
        write_small(directory, 10, 1.0)
        was_killed = run_killed(lambda at=directory: write_small(at, iteration, 2.0), after=point)
        outcomes.append(small_value(directory)[1])
        write_small(directory, iteration, 3.0)  # leftovers do not disturb the next save
        assert small_value(directory) == (directories.iteration_name(iteration), 3.0)
    assert point > 15
    assert outcomes == sorted(outcomes) and set(outcomes) == {1.0, 2.0}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_run_deletes_only_its_own_checkpoints(tmp_path: Path) -> None:
    for iteration, run_id in ((1, "mine"), (2, "other"), (3, "mine"), (4, None), (5, "mine"), (6, "mine")):
        write_small(tmp_path, iteration, run_id=run_id)
    (tmp_path / "iter_0000002" / MANIFEST_FILE).write_text("{")
    assert directories.run_ids(tmp_path) == {
        1: "mine", 2: directories.UNREADABLE, 3: "mine", 4: None, 5: "mine", 6: "mine"}
    assert writer.purge(tmp_path, 5, writer.Retention(1), "mine") == []
    assert list(directories.run_ids(tmp_path)) == [2, 4, 5, 6]


def test_checkpoints_of_the_interval_are_never_deleted() -> None:
    earlier = [10, 15, 20, 25, 30, 35]
    assert writer.Retention(1, 20).doomed(earlier) == [10, 15, 25, 30, 35]
    assert writer.Retention(3, 20).doomed(earlier) == [10, 15, 25]  # 30, 35 and the new one are the last three
    assert writer.Retention(None, 20).doomed(earlier) == writer.Retention(1, 20).doomed(earlier)
    assert writer.Retention(2).doomed(earlier) == [10, 15, 20, 25, 30]
    assert writer.Retention(9, 20).doomed(earlier) == writer.Retention().doomed(earlier) == []


def test_leftovers_of_killed_saves_are_deleted_except_the_only_copy(tmp_path: Path) -> None:
    for iteration in (10, 20):
        write_small(tmp_path, iteration)
    (tmp_path / "iter_0000010").rename(tmp_path / "iter_0000010.old-ab12")  # killed before the new one was in place
    shutil.copytree(tmp_path / "iter_0000020", tmp_path / "iter_0000020.old-cd34")
    shutil.copytree(tmp_path / "iter_0000020", tmp_path / "iter_0000025.dying")  # of an earlier version
    for name in ("iter_0000010.old-cd56", "iter_0000020.dying", "iter_0000020.tmp-ef56", "iter_0000030.tmp-78ab",
                 "best", "my.tmp-78ab"):
        (tmp_path / name).mkdir()
    (tmp_path / f"{directories.LATEST_FILE}.tmp-12ab").touch()
    notes = writer.tidy(tmp_path)
    stay = ["iter_0000010.old-ab12", "iter_0000025.dying"]
    deleted = ["iter_0000010.old-cd56", "iter_0000020.dying", "iter_0000020.old-cd34", "iter_0000020.tmp-ef56",
               "iter_0000030.tmp-78ab", f"{directories.LATEST_FILE}.tmp-12ab"]
    assert {note.split(" ")[0].removeprefix(f"{tmp_path}/"): note.endswith("has been deleted") for note in notes} == {
        **dict.fromkeys(stay, False), **dict.fromkeys(deleted, True)}
    assert names(tmp_path) == sorted(["best", *stay, "iter_0000020", directories.LATEST_FILE, "my.tmp-78ab"])
    assert len(writer.tidy(tmp_path)) == len(stay) and writer.tidy(tmp_path / "none") == []


def test_incomplete_directories_count_as_nothing(tmp_path: Path) -> None:
    """Also those of earlier versions, which saved iter_*.dying when a run failed: a command that begins and continues a
    run begins it."""
    for name in ("iter_0000002.dying", "iter_0000002.old-ab12", "iter_0000003.tmp-cd34", "iter_0000004"):
        (tmp_path / name).mkdir()
    assert holds_nothing(tmp_path) and directories.newest_checkpoint(tmp_path) is None
    write_small(tmp_path, 1, 1.0)
    (tmp_path / "iter_0000001").rename(tmp_path / "iter_0000005.dying")
    (tmp_path / directories.LATEST_FILE).unlink()
    assert holds_nothing(tmp_path) and directories.newest_checkpoint(tmp_path) is None
    write_small(tmp_path, 1, 2.0)
    assert not holds_nothing(tmp_path) and directories.newest_checkpoint(tmp_path) == tmp_path / "iter_0000001"
    folder, notes = directories.find_checkpoint(tmp_path)
    assert folder == tmp_path / "iter_0000001"
    assert [note.split(" ")[0].removeprefix(f"{tmp_path}/") for note in notes] == [
        "iter_0000002.dying", "iter_0000002.old-ab12", "iter_0000003.tmp-cd34", "iter_0000004", "iter_0000005.dying"]
    assert all(" is left over from an interrupted save and is not used; " in note for note in notes)


def test_advice_about_damage_names_the_newest_older_checkpoint(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        write_small(tmp_path, iteration)
    advice = directories.instead_of(tmp_path / "iter_0000030")
    assert f"`echo 20 > {tmp_path}/{directories.LATEST_FILE}`" in advice and f"--load {tmp_path}/iter_0000020" in advice
    assert directories.instead_of(tmp_path / "iter_0000010") == (
        f"use another checkpoint: {tmp_path} has no older one")


def test_without_latest_the_newest_complete_checkpoint_is_used_with_a_note(tmp_path: Path) -> None:
    write_small(tmp_path, 10, 1.0)
    write_small(tmp_path, 20, 2.0)
    (tmp_path / directories.LATEST_FILE).unlink()
    folder, (note,) = directories.find_checkpoint(tmp_path)
    assert folder.name == "iter_0000020" and "newest complete checkpoint is iteration 20" in note
    (tmp_path / directories.LATEST_FILE).write_text("10\n")
    assert directories.find_checkpoint(tmp_path) == (tmp_path / "iter_0000010", ())
    (tmp_path / directories.LATEST_FILE).write_text("ten")
    with pytest.raises(UserError, match="expected the number of an iteration"):
        directories.find_checkpoint(tmp_path)


def test_a_save_that_does_not_fit_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs 1,000,000,000,000,000,000 bytes"):
        writer.begin(tmp_path / "new", 1, 10**18)
    assert list((tmp_path / "new").iterdir()) == []


def test_modes_of_files_and_directories(tmp_path: Path) -> None:
    write_small(tmp_path / "new", 10, 1.0)
    folder = tmp_path / "new" / "iter_0000010"
    allowed = 0o777 & ~current_umask()
    assert folder.stat().st_mode & 0o777 == 0o750 & allowed
    assert all(path.stat().st_mode & 0o777 == 0o640 & allowed for path in folder.iterdir())


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


MODEL = SmallModel(4, vision_ffn=6).model
CUT = [one for one in model_weights(MODEL) if one.tp_dim is not None]


def saved(folder: Path, stored_size: int, kinds: Mapping[str, Mapping[str, Tensor]]) -> TrainingDirectory:
    """A checkpoint of whole tensors, by kind and name, that ``stored_size`` tensor-parallel ranks have saved."""
    parts = [
        (CheckpointTensor.of(values.dtype, (values.numel(),), f"{rank}.safetensors", one.name, kind, rank),
         Values(values))
        for rank in range(stored_size) for one in CUT for kind, whole in kinds.items()
        for values in [shard(one, whole[one.name], stored_size, rank).reshape(-1)]
    ]
    temporary = writer.begin(folder, 1, 0)
    pieces = [piece for rank in range(stored_size) for piece in writer.write_pieces(
        temporary, f"{rank}.safetensors", [one for one in parts if one[0].tp_rank == rank])]
    writer.commit(temporary, CheckpointManifest(1, 0, stored_size, stored_size, 1, MODEL, None, {}, tuple(pieces)))
    return TrainingDirectory.open(folder)


def drawn() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {one.name: torch.rand(one.shape, generator=generator) for one in CUT}


@pytest.mark.parametrize(("stored_size", "tp_size", "times_read"), [(4, 2, 1), (4, 1, 1), (2, 4, 2), (1, 2, 2)])
def test_ranks_read_only_the_shards_that_they_need(
    stored_size: int, tp_size: int, times_read: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more ranks than when saved, several need the same shard; otherwise each shard is read once."""
    whole = drawn()
    stored, read, sizes = saved(tmp_path, stored_size, {"exp_avg": whole}), Files.read, []
    monkeypatch.setattr(Files, "read", lambda *words: (sizes.append(len(words[-1])), read(*words))[1])
    for rank in range(tp_size):
        for one in CUT:
            size = math.prod(local_shape(one, tp_size))
            found = stored.read_state(one, "exp_avg", tp_size, rank, 1, size)
            assert torch.equal(found, shard(one, whole[one.name], tp_size, rank).reshape(-1)[1:]), one.name
    total = sum(piece.stored.num_bytes for piece in stored.manifest.pieces)
    # measured 0.991 from 4 to 1, because shards of only padding are skipped; otherwise exact
    assert sum(sizes) == pytest.approx(times_read * total, rel=0.02)


@pytest.mark.parametrize(("stored_size", "tp_size"), [(1, 1), (4, 2), (4, 1), (2, 4), (1, 2)])
def test_an_fp32_copy_is_joined_from_a_weight_and_its_remainder(
    stored_size: int, tp_size: int, tmp_path: Path
) -> None:
    """Also for ranks that hold only padding, and for ranges without an element."""
    numbers = drawn()
    weights = {name: torch.empty_like(one, dtype=torch.bfloat16) for name, one in numbers.items()}
    remainders = {name: torch.empty_like(one, dtype=torch.int16) for name, one in numbers.items()}
    for name, one in numbers.items():
        split(one.view(-1), weights[name].view(-1), remainders[name].view(-1))
    stored = saved(tmp_path, stored_size, {"weight": weights, "remainder": remainders})
    for one in CUT:
        assert stored.has(one, "master") and not stored.has(one, "exp_avg")
        size = math.prod(local_shape(one, tp_size))
        for rank in range(tp_size):
            expected = shard(one, numbers[one.name], tp_size, rank).reshape(-1)
            for start, stop in ((0, size), (1, size), (size, size)):
                assert torch.equal(stored.read_state(one, "master", tp_size, rank, start, stop), expected[start:stop])
