"""Which ranks see the same directory under ``--save``: all of them, or only those of one node.

The first rank of each node writes a probe, a file of an unguessable name, and all ranks look for it.
"""

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from typing_extensions import Self

from mm.errors import AgreedError, writing
from mm.files import wait_until_visible
from mm.formats.training_writer import PROBE_PREFIX
from mm.launched import Launched
from mm.parallel.agreement import by_rank, on_first, together
from mm.parallel.mesh import Mesh
from mm.parallel.ranks import ranks_text
from mm.training.claim import Claim
from mm.training.saves import BEST

WAIT_SECONDS = 10.0
"""How long ranks look for the probe of rank 0's node.  A shared disk answers the first look at a new name from its
server, but a cache of missing names or of the directory may be some seconds old."""
_SHOWN = 4
"""Most disks in a message."""

Result = TypeVar("Result")


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
        """Whether this rank is the first of its disk, which handles directories there."""
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

    def describe(self, disks: Sequence[int]) -> str:
        """Name some disks by their hosts and ranks."""
        shown = [f"{', '.join(dict.fromkeys(self.hosts[rank] for rank in self.ranks_on(disk)))} ({ranks_text(ranks)})"
                 for disk in disks[:_SHOWN] if (ranks := self.ranks_on(disk))]
        return "; ".join([*shown, *([f"{len(disks) - _SHOWN} more"] if len(disks) > _SHOWN else [])])


def on_each_disk(mesh: Mesh, disks: Disks, action: Callable[[], Result]) -> Result:
    """Run ``action`` on the first rank of each disk and give its result to the ranks there.

    An error on one is raised on all.
    """
    if not disks.are_several:
        return on_first(mesh, action)
    done = by_rank(mesh, together(mesh, lambda: action() if disks.is_first else None))
    return done[disks.own]  # pyright: ignore[reportReturnType]  (of a first rank)


def find_disks(save: str | None, is_local: bool, mesh: Mesh) -> Disks:
    """The disks of the directory ``--save``, which is created; every rank calls it.

    ``is_local``: whether there may be several (``--save-on-each-node``); otherwise several raise AgreedError.
    """
    if save is None:
        return Disks.one(mesh)
    disks, created = _disks_of(Path(save), "--save", mesh)
    best = Path(save) / BEST
    if any(by_rank(mesh, best.is_symlink() or best.is_mount())):  # otherwise it is on the disk of --save
        of_best, _ = _disks_of(best, "--save-best", mesh)
        if of_best != disks:
            raise AgreedError(f"{best} is not shared by the same ranks as --save {save}: by {_named(of_best)}, but "
                              f"--save by {_named(disks)}; remove the link or the mount at {best}")
    if disks.are_several and not is_local:
        _remove(created)
        raise AgreedError(
            f"--save {save} is not one directory: these machines see different disks under this path: {_named(disks)} "
            f"(a file that rank 0's machine wrote there was not seen by all within {WAIT_SECONDS:g} s). Give a "
            f"directory that all machines share, or add --save-on-each-node, which saves on each disk what its own "
            f"ranks need to resume")
    return disks


def find_disks_once(folder: Path, flag: str, mesh: Mesh) -> Disks:
    """The disks of a directory that ``flag`` gave; a missing one is created only meanwhile.  Every rank calls it."""
    disks, created = _disks_of(folder, flag, mesh)
    _remove(created)
    return disks


def claim_others(save: str | None, claim: Claim, mesh: Mesh, disks: Disks, say: Callable[[str], None]) -> None:
    """Lock ``--save`` on the disks other than rank 0's, which is locked already; every rank calls it."""
    if save is not None and disks.are_several:
        flag = f"{disks.hosts[mesh.rank]}: --save"
        together(mesh, lambda: claim.add({flag: save}, say) if disks.is_first and mesh.rank else None)


def _remove(created: Sequence[Path]) -> None:
    for folder in created:
        with suppress(OSError):  # something else is there by now
            folder.rmdir()


def _named(disks: Disks) -> str:
    return disks.describe(sorted(set(disks.of_ranks)))


def _disks_of(folder: Path, flag: str, mesh: Mesh) -> tuple[Disks, list[Path]]:
    """The disks of a directory, and the directories that this rank has created for it, the innermost first."""
    if mesh.world_size == 1:
        return Disks.one(mesh), []
    created, host = list[Path](), socket.gethostname()
    probe = folder / f"{PROBE_PREFIX}{secrets.token_hex(16)}" if Launched.here().local_rank == 0 else None

    def write() -> None:
        if probe is not None:
            with writing(probe, f"{host}: {flag}"):
                created.extend(one for one in (folder, *folder.parents) if not one.exists())
                folder.mkdir(parents=True, exist_ok=True)
                probe.touch(exist_ok=False)

    try:
        together(mesh, write)
        names = by_rank(mesh, None if probe is None else probe.name)
        by_name = {name: rank for rank, name in enumerate(names) if name is not None}
        hosts = tuple(by_rank(mesh, host))
        if all(by_rank(mesh, wait_until_visible(folder / str(names[0]), WAIT_SECONDS))):
            return Disks(mesh.rank, (0,) * mesh.world_size, hosts), created
        seen = [by_name[name] for name in _names(folder) if name in by_name]
        return Disks(mesh.rank, _grouped(by_rank(mesh, seen)), hosts), created
    finally:
        if probe is not None:
            probe.unlink(missing_ok=True)


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def _grouped(seen: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The first rank on each rank's disk; ``seen``: by rank, the ranks whose probes it sees, which share its disk."""
    firsts = list(range(len(seen)))
    for rank, others in enumerate(seen):
        joined = {firsts[rank], *(firsts[other] for other in others)}
        firsts = [min(joined) if first in joined else first for first in firsts]
    return tuple(firsts)
