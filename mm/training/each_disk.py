"""Keeps several disks consistent, each of which holds its own ranks' part of a checkpoint (``--save-on-each-node``).

A save is committed when it appears on rank 0's disk; by then it is prepared on all others, where only a rename remains.
If the run is killed in between, the next one renames there.  So all disks hold what rank 0's disk holds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mm.errors import AgreedError, UserError
from mm.formats import checkpoints
from mm.formats import training_writer as writer
from mm.formats.checkpoints import LATEST_FILE
from mm.formats.training import CheckpointTensor
from mm.parallel.agreement import all_of, by_rank, on_first, together
from mm.parallel.mesh import Mesh
from mm.training.disks import Disks


def catch_up(directories: Sequence[Path], mesh: Mesh, disks: Disks) -> tuple[str, ...]:
    """On the other disks, complete saves that are complete on rank 0's; returns notes, the same on every rank."""
    complete = on_first(mesh, lambda: [checkpoints.identities(directory) for directory in directories])

    def rename() -> tuple[str, ...]:
        notes = []
        for directory, on_first_disk in zip(directories, complete, strict=True) if disks.is_first else ():
            for temporary, crc32 in writer.prepared(directory).items():
                if crc32 in on_first_disk.values() and crc32 not in checkpoints.identities(directory).values():
                    final = writer.publish(temporary)
                    notes.append(f"{_host(disks)}the save of {final} was interrupted after all disks had it, and has "
                                 f"been completed")
        return tuple(notes)

    return all_of(together(mesh, rename), mesh.control_group)


def check_held(path: Path, mesh: Mesh, disks: Disks) -> None:
    """Raise AgreedError unless the checkpoint at ``path``, which rank 0 has chosen, is on every disk."""
    held = by_rank(mesh, (_crc32(path), checkpoints.identities(path.parent)) if disks.is_first else None)
    by_disk = {disk: one for disk, one in enumerate(held) if one is not None}
    lacking = [disk for disk, (crc32, _) in by_disk.items() if crc32 is None or crc32 != by_disk[0][0]]
    if lacking:
        common = set.intersection(*(set(identities.items()) for _, identities in by_disk.values()))
        newest = max((iteration for iteration, _ in common), default=None)
        cure = (f"the newest that all disks hold is iteration {newest}: to continue from it, write {newest} into "
                f"{path.parent / LATEST_FILE} on {disks.hosts[0]}") if newest is not None else (
            "no iteration is on all disks: start the nodes that saved it, copy their files back, or gather the files "
            "of all nodes in a directory that all see, and give that as --load with a new --save")
        raise AgreedError(f"{path}, from which {disks.hosts[0]} (rank 0) continues, is missing or different on "
                          f"{disks.describe(lacking)}; {cure}")


def unique_pieces(gathered: Sequence[Sequence[CheckpointTensor]]) -> tuple[CheckpointTensor, ...]:
    """The tensors of all ranks, of which some are written on several disks; raises UserError if two of them differ."""
    found: dict[tuple[str, str], CheckpointTensor] = {}
    for piece in (piece for pieces in gathered for piece in pieces):
        first = found.setdefault((piece.stored.file, piece.stored.name), piece)
        if first != piece:
            raise UserError(
                f"replicas hold different values of {piece.name} ({piece.kind}), so the disks would hold different "
                f"{piece.stored.file}; nothing is saved. Resume from the last checkpoint, with "
                f"--check-weights-interval 1 to find the rank and the step")
    return tuple(found.values())


def stated_disks(gathered: Sequence[Sequence[CheckpointTensor]], disks: Disks) -> list[dict[str, Any]] | None:
    """What the manifest says of the disks; None if there is only one."""
    if not disks.are_several:
        return None
    return [{"host": disks.hosts[disk], "ranks": disks.ranks_on(disk), "files": sorted(
        {piece.stored.file for rank in disks.ranks_on(disk) for piece in gathered[rank]})}
        for disk in sorted(set(disks.of_ranks))]


def _crc32(path: Path) -> int | None:
    try:
        return checkpoints.stated(path)["crc32"]
    except UserError:
        return None


def _host(disks: Disks) -> str:
    return f"{disks.hosts[disks.rank]} (rank {disks.rank}): "
