"""Optimizer state of a checkpoint read for another TP size: equal values, and only the needed shards are read."""

import math
from pathlib import Path

import pytest
import torch

from mm.formats import training_writer as writer
from mm.formats.blocks import Values
from mm.formats.files import Files
from mm.formats.training import CheckpointManifest, CheckpointTensor
from mm.formats.training_reader import TrainingDirectory
from mm.weights.table import local_shape, model_weights, shard
from tests.checkpoint.models import SmallModel


@pytest.mark.parametrize(("stored_size", "tp_size", "times_read"), [(4, 2, 1), (4, 1, 1), (2, 4, 2), (1, 2, 2)])
def test_ranks_read_only_the_shards_that_they_need(
    stored_size: int, tp_size: int, times_read: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more ranks than when saved, several need the same shard; otherwise each shard is read once."""
    model, generator = SmallModel(4, vision_ffn=6).model, torch.Generator().manual_seed(0)
    whole = {one.name: torch.rand(one.shape, generator=generator) for one in model_weights(model)}
    cut = [one for one in model_weights(model) if one.tp_dim is not None]
    parts = [
        (CheckpointTensor.of(values.dtype, (values.numel(),), f"{rank}.safetensors", one.name, "exp_avg", rank),
         Values(values))
        for rank in range(stored_size) for one in cut
        for values in [shard(one, whole[one.name], stored_size, rank).reshape(-1)]
    ]
    temporary = writer.begin(tmp_path, 1, 0)
    pieces = [piece for rank in range(stored_size) for piece in writer.write_pieces(
        temporary, f"{rank}.safetensors", [one for one in parts if one[0].tp_rank == rank])]
    writer.commit(temporary, CheckpointManifest(1, 0, stored_size, stored_size, 1, model, None, {}, tuple(pieces)))
    stored, read, sizes = TrainingDirectory.open(tmp_path), Files.read, []
    monkeypatch.setattr(Files, "read", lambda *words: (sizes.append(len(words[-1])), read(*words))[1])
    for rank in range(tp_size):
        for one in cut:
            size = math.prod(local_shape(one, tp_size))
            found = stored.read_state(one, "exp_avg", tp_size, rank, 1, size)
            assert torch.equal(found, shard(one, whole[one.name], tp_size, rank).reshape(-1)[1:]), one.name
    total = sum(piece.stored.num_bytes for piece in pieces)
    # measured 0.991 from 4 to 1, because shards of only padding are skipped; otherwise exact
    assert sum(sizes) == pytest.approx(times_read * total, rel=0.02)
