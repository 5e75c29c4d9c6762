"""The weights that a stage starts from: random ones, or those of a directory of any kind and layout.

Every rank calls these functions together; a mistake on one raises the same UserError on all.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from checkpoint.formats.source import Source
from mm.model.stage import Stage
from mm.parallel.agreement import on_first, together
from mm.parallel.mesh import Mesh
from mm.progress import Progress
from mm.weights.memory import MemoryLayout
from mm.weights.table import Weight, shard, stored_name


def initialize(stage: Stage, weights: Sequence[Weight], mesh: Mesh, seed: int, std: float) -> None:
    """Random ``weights``: norms 1, biases 0, everything else normal with standard deviation ``std``.

    Of adapters B is 0 and A uniform, as PEFT draws it (``kaiming_uniform_`` with a = sqrt(5)).  Each whole tensor has a
    generator seeded by ``seed`` and its name, and is cut afterwards: every layout starts from the same model.
    """
    for weight in weights:
        if weight.name.endswith("norm.weight"):
            whole = torch.ones(weight.shape)
        elif weight.name.endswith((".bias", ".lora_B.weight")):
            whole = torch.zeros(weight.shape)
        else:
            digest = hashlib.sha256(f"{seed} {stored_name(weight)}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            whole = torch.empty(weight.shape)
            if weight.is_adapter:
                bound = 1.0 / math.sqrt(math.prod(weight.shape[1:]))
                whole.uniform_(-bound, bound, generator=generator)
            else:
                whole.normal_(std=std, generator=generator)
        set_weight(stage, weight, shard(weight, whole, mesh.tp_size, mesh.tp_rank), mesh)


def fill(stage: Stage, weights: Sequence[Weight], source: Source, mesh: Mesh) -> None:
    """Set ``weights`` of this rank's ``stage``; each rank reads only what it holds, and what has a checksum in whole.

    Raises UserError when a tensor is damaged, two copies of a weight differ, or padding is not zero.
    """
    if not source.has_checksums:
        on_first(mesh, source.check)

    def read() -> None:
        progress = Progress("loading weights", len(weights), "tensors", is_shown=mesh.rank == 0)
        for weight in progress.each(weights):
            dtype = stage.get_parameter(weight.name).dtype
            set_weight(stage, weight, source.read(weight, mesh.tp_size, mesh.tp_rank, dtype), mesh)

    together(mesh, read)


def set_weight(stage: Stage, weight: Weight, values: Tensor, mesh: Mesh) -> None:
    """Copy a rank's shard, as files hold it, into its parameter."""
    with torch.no_grad():
        stage.get_parameter(weight.name).copy_(MemoryLayout.of(weight, mesh.tp_size).pad_whole(values))
