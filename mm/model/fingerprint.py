"""A fingerprint of the ViT, so that stored features are used only with the ViT that made them."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mm.model.stage import Stage
from mm.parallel.agreement import all_of
from mm.parallel.mesh import Mesh
from mm.weights.shard import MemoryLayout
from mm.weights.table import Weight, unshard
from mm.weights.trained import is_frozen

_WITHOUT_EFFECT = ("pipeline_num_layers", "freeze", "freeze_layers", "rates", "recompute", "offload",
                   "tokens_per_second")
"""Settings of the ViT that do not change its output."""


def vision_fingerprint(stage: Stage, mesh: Mesh) -> str:
    """Hash of the values, dtype and settings of patch embedding and ViT layers.  The same for every layout.

    Collective over all ranks, once the weights are filled.  It takes a second for a ViT of 0.7 billion parameters.
    """
    own = tuple(_digests(stage, mesh))
    digests = sorted(all_of(own, mesh.control_group))
    settings = {name: value for name, value in asdict(stage.model.vision).items() if name not in _WITHOUT_EFFECT}
    facts = [settings, str(stage.config.params_dtype), digests]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _digests(stage: Stage, mesh: Mesh) -> Iterator[tuple[str, str]]:
    """Name and hash of each weight of the ViT that is here, on the first of the ranks that hold it."""
    for weight, parameter in stage.whole_weights(one for one in stage.weights if one.part == "vision"):
        assert is_frozen(weight, stage.model), f"{weight.name} is trained"
        if mesh.copy_rank == 0:
            whole = _whole(weight, parameter, mesh)
            if mesh.tp_rank == 0:
                content: Any = whole.cpu().contiguous().flatten().view(torch.uint8).numpy()
                yield weight.name, hashlib.sha256(content).hexdigest()


def _whole(weight: Weight, parameter: Tensor, mesh: Mesh) -> Tensor:
    """The whole weight, without padding, gathered from the tensor-parallel ranks."""
    own = MemoryLayout.of(weight, mesh.tp_size).unpad_whole(parameter).contiguous()
    num_shards, _ = weight.shards(mesh.tp_size)
    if num_shards == 1:
        return own
    shards = [torch.empty_like(own) for _ in range(num_shards)]
    dist.all_gather(shards, own, group=mesh.groups.tp)
    return unshard(weight, shards)
