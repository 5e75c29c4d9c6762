"""Processes and their groups: the only file that touches megatron's parallel_state.

Ranks are laid out as in Megatron: tensor parallel fastest, then context parallel, data parallel and pipeline stages.  A
*replica* is the set of ranks of one data-parallel index; they share every batch.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from tempfile import NamedTemporaryFile
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.distributed_c10d import Store, _world

from mm.config.model import ModelConfig
from mm.device.device import Device
from mm.environment import Launched, launcher_problems
from mm.errors import refuse
from mm.parallel.context import Context

_GRADIENT_GROUP = "PIPELINE_GRADIENT_GROUP"
_TIED_GROUP = "TIED_EMBEDDING_GROUP"
CONTROL_TIMEOUT = timedelta(days=1)
"""Time limit of ``Mesh.control_group``: ranks wait there while one of them writes a whole model."""

# With this, gloo connects two ranks when they first communicate.  Without it every rank of a group connects to every
# other: a group of N reads N^2 (154 + 8 N) bytes of addresses from one store, and each rank has N open files.  The
# collectives that Mesh's groups run connect a rank to log N others, and a group's first rank to all when it gathers.
# All ranks of a group must have the same value, or torch 2.13 crashes; a value that the user has set stays.
os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


@dataclass(frozen=True)
class Mesh:
    """This process's place on the axes, and its groups."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    context: Context
    groups: ProcessGroupCollection
    replica_group: dist.ProcessGroup
    """gloo, all ranks of this replica; its first rank is the data owner.  Used by the data thread alone."""
    owners_group: dist.ProcessGroup | None
    """gloo, the data owners of all replicas; None on other ranks.  Used by the data thread alone."""
    pixel_groups: tuple[dist.ProcessGroup | None, ...]
    """For each rank of the context axis, a gloo group of the data owner and of the ranks there that hold the patch
    embedding, for the data thread; None for a single rank and outside the group; () with whole encoders."""
    feature_groups: tuple[dist.ProcessGroup | None, ...]
    """Like ``pixel_groups``, with the ranks that hold the projector, for stored ViT features; () if none are stored."""
    pixel_ranks: tuple[int, ...]
    """With whole encoders, for each rank of ``context.encoders``, the global rank that holds its patch embedding."""
    feature_ranks: tuple[int, ...]
    """Like ``pixel_ranks``, for the projector; both are () without whole encoders."""
    control_group: dist.ProcessGroup
    """gloo, the whole world; used by the main thread alone."""
    tied_group: dist.ProcessGroup | None
    """The two ranks that hold the word embedding and its copy in the output layer; None elsewhere, and where one rank
    holds both."""
    gradient_group: dist.ProcessGroup
    """A second group of the pipeline's ranks: NCCL and HCCL run the messages of a group in order."""
    replica_owner: int

    @property
    def owns_data(self) -> bool:
        return self.rank == self.replica_owner

    @property
    def cp_rank(self) -> int:
        return self.context.rank

    @property
    def cp_size(self) -> int:
        return self.context.size

    @property
    def num_copies(self) -> int:
        """Ranks that hold the same weights."""
        return self.dp_size * self.cp_size

    @property
    def copy_rank(self) -> int:
        """Index of this rank among those."""
        return self.dp_rank * self.cp_size + self.cp_rank


def start(
    device: Device, model: ModelConfig, tp_size: int, timeout_minutes: float = 10.0, cp_size: int = 1,
    is_ring: bool = False, keeps_features: bool = False, store: Store | None = None,
) -> Mesh:
    """Join the process group that the launcher describes in the environment, and build every group.

    Without a launcher this process is the only rank and opens no port.  ``keeps_features``: a frozen ViT's features are
    stored, and sent instead of pixels.  ``store``: as ``Watchdog.meet`` returns it; None takes the launcher's.
    """
    timeout = timedelta(minutes=timeout_minutes)
    if not dist.is_initialized() and "RANK" in os.environ:
        refuse(launcher_problems(os.environ, meets=True))
        here = Launched.here()
        rank, world_size = (-1, -1) if store is None else (here.rank, here.num_ranks or 1)
        dist.init_process_group(device.platform.backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    elif not dist.is_initialized():
        alone = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  (torch documents it)
        dist.init_process_group(device.platform.backend, store=alone, rank=0, world_size=1, timeout=timeout)
    return build_mesh(model, tp_size, timeout, cp_size, is_ring, keeps_features, device.platform.max_message_ctas)


def for_prompts(mesh: Mesh, has_patch_embedding: bool, timeout_minutes: float) -> Mesh:
    """A copy of ``mesh`` for answers during training.  Its data groups are new: the data thread uses those of ``mesh``.

    Collective over all ranks.  ``has_patch_embedding``: whether this rank has it.
    """
    timeout = timedelta(minutes=timeout_minutes)
    places: list[tuple[int, bool]] = [(0, False)] * mesh.world_size
    dist.all_gather_object(places, (mesh.replica_owner, has_patch_embedding), group=mesh.control_group)
    owners = sorted({owner for owner, _ in places})
    replicas = [[rank for rank, (own, _) in enumerate(places) if own == owner] for owner in owners]
    pixels = [[rank for rank in ranks if rank == owner or places[rank][1]]
              for owner, ranks in zip(owners, replicas, strict=True)]
    replica_group = _my_group(replicas, timeout, "gloo")
    assert replica_group is not None, "of every rank"
    return replace(mesh, replica_group=replica_group, pixel_groups=_groups_of_several([pixels], timeout))


def build_mesh(
    model: ModelConfig, tp_size: int, timeout: timedelta, cp_size: int = 1, is_ring: bool = False,
    keeps_features: bool = False, max_message_ctas: int | None = None,
) -> Mesh:
    """Build the groups inside an initialised process group; tests call it once per layout.

    ``max_message_ctas``: see ``Platform``.
    """
    placement = model.placement()
    pp_size = placement.num_stages
    limits = {} if max_message_ctas is None else {"pp": {"max_ctas": max_message_ctas}}
    _make_groups_of_megatron(tp_size, pp_size, cp_size, timeout, limits)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dp_size = world_size // (tp_size * cp_size * pp_size)

    def at(pp: int, dp: int, cp: int, tp: int) -> int:
        return tp + tp_size * (cp + cp_size * (dp + dp_size * pp))

    tps, cps, dps, pps = range(tp_size), range(cp_size), range(dp_size), range(pp_size)
    dp_rank, pp_rank = rank // (tp_size * cp_size) % dp_size, rank // (tp_size * cp_size * dp_size)
    embedding, head = placement.embedding_slot.stage, placement.head_slot.stage
    owners = [at(0, dp, 0, 0) for dp in dps]
    with_media = [[[at(stage, dp, cp, tp) for cp in cps for tp in tps] for dp in dps]
                  for stage in (placement.patch_embedding_stage, placement.projector_stage)]
    tied_ranks = [[at(embedding, dp, cp, tp), at(head, dp, cp, tp)] for dp in dps for cp in cps for tp in tps]
    replicas = [[at(pp, dp, cp, tp) for pp in pps for cp in cps for tp in tps] for dp in dps]
    replica_group = _my_group(replicas, timeout, "gloo")
    owners_group = _my_group([owners], timeout, "gloo")
    pixel_groups, feature_groups = ((), ()) if model.encodes_whole else (
        _media_groups(owners, with_media, tp_size, keeps_features, timeout))
    control_group = _my_group([list(range(world_size))], CONTROL_TIMEOUT, "gloo")
    tied_group = _my_group(tied_ranks, timeout, name=_TIED_GROUP) if model.language.tied and embedding != head else None
    groups = ProcessGroupCollection.use_mpu_process_groups()
    pipelines = [[at(pp, dp, cp, tp) for pp in pps] for dp in dps for cp in cps for tp in tps]
    options = parallel_state.get_nccl_options("pp", limits)
    gradient_group = groups.pp if pp_size == 1 else (
        _my_group(pipelines, timeout, name=_GRADIENT_GROUP, options=options))
    assert replica_group is not None and control_group is not None and gradient_group is not None, "of every rank"
    return Mesh(
        rank=rank, world_size=world_size, tp_rank=rank % tp_size, tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size,
        dp_rank=dp_rank, dp_size=dp_size, context=Context(groups.cp, _encoders(model, groups), is_ring), groups=groups,
        replica_group=replica_group, owners_group=owners_group, pixel_groups=pixel_groups,
        feature_groups=feature_groups, pixel_ranks=tuple(with_media[0][dp_rank]) if model.encodes_whole else (),
        feature_ranks=tuple(with_media[1][dp_rank]) if model.encodes_whole else (), control_group=control_group,
        tied_group=tied_group, gradient_group=gradient_group, replica_owner=owners[dp_rank])


def _encoders(model: ModelConfig, groups: ProcessGroupCollection) -> dist.ProcessGroup:
    """``Context.encoders``.  If one axis has a single rank, it is the other axis's group, which saves buffers."""
    if not model.encodes_whole or groups.tp.size() == 1:
        return groups.cp
    return groups.tp if groups.cp.size() == 1 else groups.tp_cp


def _make_groups_of_megatron(
    tp_size: int, pp_size: int, cp_size: int, timeout: timedelta, limits: dict[str, dict[str, int]]
) -> None:
    with _file_of(limits) as limits_path:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=pp_size, context_parallel_size=cp_size,
            nccl_communicator_config_path=limits_path, create_gloo_process_groups=False,
            distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)))


@contextmanager
def _file_of(limits: dict[str, dict[str, int]]) -> Iterator[str | None]:
    """Write ``limits`` to a file, as JSON, which is YAML: megatron takes NCCL settings from a YAML file only."""
    if not limits:
        yield None
        return
    with NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        json.dump(limits, file)
        file.flush()
        yield file.name


def _media_groups(
    owners: list[int], with_media: list[list[list[int]]], tp_size: int, keeps_features: bool, timeout: timedelta
) -> tuple[tuple[dist.ProcessGroup | None, ...], ...]:
    """``Mesh.pixel_groups`` and ``feature_groups``.  ``with_media``: for pixels and for features, the ranks of each
    replica that need them, ordered by rank of the context axis."""
    pixels, features = (
        [[sorted({owner, *ranks[first : first + tp_size]}) for owner, ranks in zip(owners, of_replicas, strict=True)]
         for first in range(0, len(of_replicas[0]), tp_size)] for of_replicas in with_media)
    pixel_groups = _groups_of_several(pixels, timeout)
    if not keeps_features:
        return pixel_groups, ()
    return pixel_groups, pixel_groups if features == pixels else _groups_of_several(features, timeout)


def _groups_of_several(ranks: list[list[list[int]]], timeout: timedelta) -> tuple[dist.ProcessGroup | None, ...]:
    """For each list, this rank's group; None if it has none or a single rank."""
    return tuple(_my_group(lists, timeout, "gloo") if len(lists[0]) > 1 else None for lists in ranks)


def _my_group(
    ranks: list[list[int]], timeout: timedelta, backend: str | None = None, name: str | None = None,
    options: Any = None,
) -> dist.ProcessGroup | None:
    """Create a group of each list of ``ranks`` (every rank must, in the same order); return this rank's, if any."""
    mine, _ = dist.new_subgroups_by_enumeration(ranks, timeout, backend, options, name)
    assert not isinstance(mine, int), "torch gives a number to the ranks outside of a group only"
    return mine


def stop_mesh() -> None:
    """Destroy the groups of ``build_mesh``, with their threads and sockets, on every rank; keep the process group."""
    parallel_state.destroy_model_parallel()
    dist.barrier()  # no rank closes a connection that another one still reads
    made = [group for group in _world.pg_names if group is not dist.group.WORLD]
    for group in sorted(made, key=_world.pg_names.__getitem__):
        dist.destroy_process_group(group)


def stop() -> None:
    """Leave the process group, and destroy all groups."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
