"""Optimizer state of a checkpoint read for another TP size: equal values, and only the needed shards are read."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mm.checkpoint import training_files as writer
from mm.checkpoint.pipelined_write import Values
from mm.checkpoint.tensor_io import Files
from mm.checkpoint.training_manifest import CheckpointManifest, CheckpointTensor, TrainingDirectory
from mm.weights.shard import split
from mm.weights.table import local_shape, model_weights, shard
from tests.mm_convert.models import SmallModel

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
