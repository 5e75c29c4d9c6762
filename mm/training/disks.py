"""The disks under ``--save``: one that all ranks see, or one for each node (``--save-on-each-node``).

On each disk, its first rank creates, commits and deletes directories.
"""

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from typing_extensions import Self

from mm.config.flags import Arguments
from mm.environment import Launched
from mm.errors import AgreedError, UserError, writing
from mm.files import wait_until_visible
from mm.formats.checkpoints import stated
from mm.formats.training_writer import TEMPORARY_PREFIX
from mm.parallel.agreement import by_rank, together
from mm.parallel.heartbeat import ranks_text
from mm.parallel.mesh import Mesh

WAIT_SECONDS = 10.0
"""How long ranks look for rank 0's probe.  A shared disk answers the first look at a new name from its server, but a
cache of missing names or of the directory may be some seconds old."""


@dataclass(frozen=True)
class Disks:
    """The disks of ``--save``, each numbered by the first rank that sees it."""

    rank: int
    of_ranks: tuple[int, ...]
    """The disk of each rank."""
    hosts: tuple[str, ...]
    """The host of each rank."""

    @classmethod
    def one(cls, mesh: Mesh) -> Self:
        """One disk for all ranks."""
        return cls(mesh.rank, (0,) * mesh.world_size, ("",) * mesh.world_size)

    @property
    def own(self) -> int:
        """This rank's disk."""
        return self.of_ranks[self.rank]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its disk."""
        return self.rank == self.own

    @property
    def are_several(self) -> bool:
        return any(self.of_ranks)

    def ranks_on(self, disk: int) -> list[int]:
        return [rank for rank, one in enumerate(self.of_ranks) if one == disk]

    def is_writer(self, mesh: Mesh) -> bool:
        """Whether this rank is the first on its disk among the ranks that hold the same weights."""
        in_stage = mesh.tp_size * mesh.cp_size * mesh.dp_size
        return self.rank == next(rank for rank in self.ranks_on(self.own) if (
            rank % mesh.tp_size, rank // in_stage) == (mesh.tp_rank, mesh.pp_rank))

    def named(self, ranks: Sequence[int]) -> str:
        """Ranks with their hosts."""
        return f"{', '.join(dict.fromkeys(self.hosts[rank] for rank in ranks))} ({ranks_text(ranks)})"

    def check_same(self, checkpoint: Path, mesh: Mesh) -> None:
        """Raise AgreedError unless all disks hold ``checkpoint``, which rank 0 has chosen."""
        crc32s, paths = zip(*by_rank(mesh, (_crc32(checkpoint), checkpoint.resolve())), strict=True)
        if lacking := [rank for rank, one in enumerate(crc32s) if one is None or one != crc32s[0]]:
            raise AgreedError(
                f"{checkpoint}, from which {self.named([0])} continues, is missing or another one on "
                f"{self.named(lacking)}: start the nodes in the order of the run that saved it (--node_rank), or copy "
                f"it there from each of its nodes: `rsync -a NODE:{paths[0]}/ {paths[0]}/`")


def find_disks(args: Arguments, mesh: Mesh) -> Disks:
    """The disks of ``--save``, which is created, or without it of the export; every rank calls it.

    The first rank of each node writes a probe, a file of an unguessable name, and all ranks look for it.  Raises
    AgreedError for several disks without ``--save-on-each-node``, and if only some of the nodes share one.
    """
    given = {"--save": args.save, "--export-hf": args.export_hf, "--export-merged-hf": args.export_merged_hf}
    flag, path = next(((flag, path) for flag, path in given.items() if path is not None), ("", None))
    if path is None or mesh.world_size == 1:
        return Disks.one(mesh)
    folder = Path(path) if args.save is not None else Path(path).parent
    node = mesh.rank - Launched.here().local_rank
    probe = folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(16)}"

    def write() -> None:
        if node == mesh.rank:
            with writing(probe, f"{socket.gethostname()}: {flag}"):
                folder.mkdir(parents=True, exist_ok=True)
                probe.touch(exist_ok=False)

    try:
        together(mesh, write)
        nodes, hosts, probes = zip(*by_rank(mesh, (node, socket.gethostname(), probe.name)), strict=True)
        disks = Disks(mesh.rank, nodes, hosts)
        wait_until_visible(folder / probes[0], WAIT_SECONDS)
        seen = by_rank(mesh, [first for first in sorted(set(nodes)) if (folder / probes[first]).exists()])
    finally:
        if node == mesh.rank:
            probe.unlink(missing_ok=True)
    dist.barrier(mesh.control_group)  # else rank 0 may report another's probe as left over
    unseen = [rank for rank, found in enumerate(seen) if 0 not in found]
    if not unseen:
        return Disks.one(mesh)
    if args.save_on_each_node and seen == [[own] for own in nodes]:
        return disks
    cure = "give one that all machines share"
    if args.save_on_each_node:
        cure = f"some of the nodes share one, so {cure}, or one on each node's own disk"
    elif args.save is not None:
        cure += (", or add --save-on-each-node, which saves on each node's own disk what its ranks need to resume")
    raise AgreedError(f"{flag} {path}: {folder} is not one directory: {disks.named(unseen)} did not see within "
                      f"{WAIT_SECONDS:g} s a file that {disks.named([0])} wrote there; {cure}")


def _crc32(path: Path) -> int | None:
    try:
        return stated(path).get("crc32")
    except UserError:
        return None
