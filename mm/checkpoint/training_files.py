"""Writes training checkpoints, and deletes those that are no longer wanted."""

import dataclasses
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mm.checkpoint.directories import (
    LATEST_FILE,
    LEFTOVER_NAME,
    MEGATRON_MODES,
    is_only_copy,
    iteration_name,
    put_in_place,
    run_ids,
    sync,
)
from mm.checkpoint.manifest import MANIFEST_FILE
from mm.checkpoint.pipelined_write import ON_HOST, Host, Values, write_tensors
from mm.checkpoint.safetensors import safetensors_file
from mm.checkpoint.training_manifest import CheckpointManifest, CheckpointTensor
from mm.errors import UserError

TEMPORARY_PREFIX = ".mm-temporary-"
"""Prefix of names in ``--save`` that mean nothing to a later run: probes of disks, and weights for an export."""


def begin(directory: Path, iteration: int, num_bytes: int, token: str | None = None) -> Path:
    """Create the temporary directory that ``commit`` will rename, with ``token`` (default: random) in its name.

    Raises UserError unless ``num_bytes`` are free.
    """
    directory.mkdir(mode=MEGATRON_MODES.directory, parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(directory).free
    if num_bytes > free_bytes:
        raise UserError(f"The checkpoint of iteration {iteration} needs {num_bytes:,} bytes in {directory}, but only "
                        f"{free_bytes:,} are free; make room, or give another --save.")
    temporary = directory / f"{iteration_name(iteration)}.tmp-{token or secrets.token_hex(4)}"
    temporary.mkdir(mode=MEGATRON_MODES.directory)
    return temporary


def write_pieces(
    folder: Path, file: str, pieces: Sequence[tuple[CheckpointTensor, Values]], host: Host = ON_HOST
) -> list[CheckpointTensor]:
    """Write one safetensors file, flush it to disk, and return its pieces with their checksums."""
    by_name = {piece.stored.name: (piece, values) for piece, values in pieces}
    described = [(name, piece.stored.dtype, piece.stored.shape) for name, (piece, _) in by_name.items()]
    planned = safetensors_file(file, described)
    with new_file(folder / file) as opened:
        opened.write(planned.pieces[0][1])
        crc32s = write_tensors(opened, [(stored.name, by_name[stored.name][1]) for stored in planned.tensors], host)
    return [dataclasses.replace(by_name[stored.name][0], stored=dataclasses.replace(stored, crc32=crc32s[stored.name]))
            for stored in planned.tensors]


def commit(temporary: Path, manifest: CheckpointManifest) -> Path:
    """Make a written checkpoint the newest."""
    with new_file(temporary / MANIFEST_FILE) as opened:
        opened.write(manifest.text().encode())
    sync(temporary)
    sync(temporary.parent)
    return publish(temporary)


def publish(temporary: Path) -> Path:
    """Rename a complete checkpoint, then ``latest``.  Replaces one of the same iteration."""
    directory, final = temporary.parent, temporary.with_name(temporary.name.partition(".")[0])
    old = final.with_name(f"{final.name}.old-{secrets.token_hex(4)}")
    put_in_place(temporary, final, old)
    latest = directory / f"{LATEST_FILE}.tmp-{secrets.token_hex(4)}"
    with new_file(latest) as opened:
        opened.write(f"{int(final.name.removeprefix('iter_'))}\n".encode())
    latest.replace(directory / LATEST_FILE)
    sync(directory)
    try:
        if old.exists():
            shutil.rmtree(old)
    except OSError as error:  # the new checkpoint is complete anyway
        warnings.warn(f"the checkpoint that {final} replaces could not be deleted: {error}", stacklevel=2)
    return final


@dataclass(frozen=True)
class Retention:
    """Which complete checkpoints of a run stay when a newer one is saved."""

    last: int | None = None
    """Number of newest checkpoints to keep; None: all, or one if there is an interval."""
    interval: int | None = None
    """Checkpoints whose iteration is a multiple of this stay too."""

    def doomed(self, earlier: Sequence[int]) -> list[int]:
        """The iterations to delete among ``earlier``, ascending ones before the newest."""
        if self.last is None and self.interval is None:
            return []
        old = earlier[: max(0, len(earlier) - (self.last or 1) + 1)]
        return [iteration for iteration in old if self.interval is None or iteration % self.interval]


ALL_KEPT = Retention()


def purge(directory: Path, newest: int, retention: Retention, run_id: str | None) -> list[str]:
    """Delete a run's checkpoints before ``newest`` that ``retention`` does not keep; return problems as messages.

    Later checkpoints, and those of other runs, are kept.  If one cannot be deleted, the others still are.
    """
    problems = []
    earlier = [iteration for iteration, found in run_ids(directory).items() if iteration < newest and found == run_id]
    for doomed in [directory / iteration_name(iteration) for iteration in retention.doomed(earlier)]:
        # Renamed first, so that an iter_* directory is never half deleted.
        renamed = doomed.with_name(f"{doomed.name}.tmp-{secrets.token_hex(4)}")
        try:
            doomed.rename(renamed)
            shutil.rmtree(renamed)
        except OSError as error:
            problems.append(f"the old checkpoint {doomed} could not be deleted: {error}")
    return problems


def tidy(directory: Path) -> list[str]:
    """Delete leftovers of interrupted saves in ``directory``, which no run may be writing; return notes.

    A complete checkpoint without a complete one of its iteration stays.
    """
    notes = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        is_leftover = LEFTOVER_NAME.fullmatch(path.name) is not None
        if not (is_leftover or path.name.startswith((f"{LATEST_FILE}.tmp-", TEMPORARY_PREFIX))):
            continue
        if is_leftover and is_only_copy(path):
            notes.append(f"{path} is left over from an interrupted save, and stays, because no other checkpoint of its "
                         f"iteration is complete; --load {path} reads it")
            continue
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            notes.append(f"{path} was left over from an interrupted save and has been deleted")
        except OSError as error:
            notes.append(f"{path} is left over from an interrupted save and cannot be deleted: {error}")
    return notes


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that must not exist yet, and flush it to disk in the end; failures raise UserError with its name."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MEGATRON_MODES.file), "wb") as opened:
            yield opened
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}), so this checkpoint is abandoned; earlier ones "
                        f"are unchanged. Make room, or give another --save.") from error
