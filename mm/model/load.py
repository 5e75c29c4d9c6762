"""The weights that a stage starts from: random ones, or those of a directory of any kind and layout.

Every rank calls these functions together; a mistake on one raises the same UserError on all.
"""

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mm.checkpoint.source import Source
from mm.console import Progress, ongoing
from mm.model.stage import Stage
from mm.parallel.agreement import on_first, together
from mm.parallel.mesh import Mesh
from mm.weights.fuse import shard
from mm.weights.shard import MemoryLayout, readers
from mm.weights.table import Weight, stored_name


def initialize(stage: Stage, weights: Sequence[Weight], mesh: Mesh, seed: int, std: float) -> None:
    """Random ``weights``: norms 1, biases 0, everything else normal with standard deviation ``std``.

    In adapters, B is 0 and A is uniform, as in PEFT (``kaiming_uniform_`` with a = sqrt(5)).  Each whole tensor has a
    generator seeded by ``seed`` and its name, and is sharded afterwards, so every layout starts from the same model.
    """
    shown = Progress("drawing random weights", len(weights), "tensors", is_shown=mesh.rank == 0)
    for weight in shown.each(weights):
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
    """Set ``weights`` of this rank's ``stage`` to those of ``source``.

    A rank reads only what it holds, except that a tensor with a checksum is read whole.  Raises UserError if a tensor
    is damaged, two copies of a weight differ, or padding is not zero.
    """
    if not source.has_checksums:
        with ongoing(f"checking {source.path}", mesh.rank == 0):
            on_first(mesh, source.check)

    def read(weight: Weight) -> Tensor:
        return source.read(weight, mesh.tp_size, mesh.tp_rank, stage.get_parameter(weight.name).dtype)

    read_once(stage, weights, read, mesh)


def read_once(stage: Stage, weights: Sequence[Weight], read: Callable[[Weight], Tensor], mesh: Mesh) -> None:
    """Set ``weights`` of this rank's ``stage``, reading each once for all replicas.

    ``read`` gives this rank's tensor-parallel shard of a weight, as files hold it.  Each of the ranks that hold the
    same weights reads an even share of the bytes, and broadcasts it once all have read theirs.  If one cannot read a
    file, all raise the same UserError.
    """
    group = mesh.groups.dp_cp
    parameters = [stage.get_parameter(weight.name) for weight in weights]
    chosen = readers([one.numel() * one.element_size() for one in parameters], group.size())
    share = [weight for weight, reader in zip(weights, chosen, strict=True) if reader == group.rank()]

    held: dict[str, Tensor] = {}

    def read_share() -> None:
        progress = Progress("loading weights", len(share), "tensors", is_shown=mesh.rank == 0)
        for weight in progress.each(share):
            if stage.shards_weights:
                held[weight.name] = _whole(stage, weight)
                held[weight.name].copy_(_in_memory(weight, read(weight), mesh))
            else:
                set_weight(stage, weight, read(weight), mesh)

    together(mesh, read_share)
    whole_of = list(zip(weights, parameters, chosen, strict=True))
    shown = Progress("sending weights to the other replicas", len(weights), "tensors", is_shown=mesh.rank == 0)
    for weight, parameter, reader in shown.each(whole_of):
        sender = dist.get_global_rank(group, reader)
        if stage.shards_weights:
            whole = held.pop(weight.name) if weight.name in held else _whole(stage, weight)
            dist.broadcast(whole, sender, group)
            stage.set_values(weight.name, whole)
        elif group.size() > 1:
            dist.broadcast(parameter.detach(), sender, group)


def set_weight(stage: Stage, weight: Weight, values: Tensor, mesh: Mesh) -> None:
    """Copy ``values``, a rank's shard as files hold it, into the parameter."""
    stage.set_values(weight.name, _in_memory(weight, values, mesh))


def _whole(stage: Stage, weight: Weight) -> Tensor:
    parameter = stage.get_parameter(weight.name)
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def _in_memory(weight: Weight, values: Tensor, mesh: Mesh) -> Tensor:
    return MemoryLayout.of(weight, mesh.tp_size).pad_whole(values)
