"""The disks under ``--save``: one that all ranks see, or one for each node (``--save-on-each-node``).

On each disk, its first rank creates, commits and deletes directories.
"""

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self

from mm.checkpoint.directories import stated
from mm.checkpoint.training_files import TEMPORARY_PREFIX
from mm.config.args import Arguments
from mm.environment import Launched
from mm.errors import AgreedError, writing
from mm.files import wait_until_visible
from mm.parallel.agreement import attempt, by_rank, on_first
from mm.parallel.health.heartbeat import ranks_text
from mm.parallel.mesh import Mesh

WAIT_SECONDS = 10.0
"""How long ranks look for rank 0's probe: a network file system may show a new file some seconds late."""


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
        crc32s = by_rank(mesh, attempt(mesh, lambda: stated(checkpoint).get("crc32"))[0])
        if others := [rank for rank, crc32 in enumerate(crc32s) if crc32 is None or crc32 != crc32s[0]]:
            raise AgreedError(
                f"{checkpoint}, from which {self.named([0])} continues, is missing or another one on "
                f"{self.named(others)}: start the nodes in the order of the run that saved it (--node_rank), or copy "
                f"it there from each of its nodes")


def find_disks(args: Arguments, mesh: Mesh) -> Disks:
    """The disks of ``--save``, or without it of the export; rank 0 writes a probe there, for which all ranks look.
    Raises AgreedError for several disks without ``--save-on-each-node``."""
    given = {"--save": args.save, "--export-hf": args.export_hf, "--export-merged-hf": args.export_merged_hf}
    flag, path = next(((flag, path) for flag, path in given.items() if path is not None), ("", None))
    if path is None or mesh.world_size == 1:
        return Disks.one(mesh)
    folder = Path(path) if args.save is not None else Path(path).parent

    def write() -> str:
        probe = folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(16)}"
        with writing(probe, flag):
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch(exist_ok=False)
        return probe.name

    probe = folder / on_first(mesh, write)
    disk = 0 if wait_until_visible(probe, WAIT_SECONDS) else mesh.rank - Launched.here().local_rank
    of_ranks, hosts = zip(*by_rank(mesh, (disk, socket.gethostname())), strict=True)
    if mesh.rank == 0:
        probe.unlink(missing_ok=True)
    disks = Disks(mesh.rank, of_ranks, hosts)
    if disks.are_several and not args.save_on_each_node:
        unseen = [rank for rank, one in enumerate(of_ranks) if one]
        raise AgreedError(
            f"{flag} {path}: {folder} is not one directory: {disks.named(unseen)} did not see a file that "
            f"{disks.named([0])} wrote there; give one that all machines share"
            + (", or add --save-on-each-node" if args.save is not None else ""))
    return disks
