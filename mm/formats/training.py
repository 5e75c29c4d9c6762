"""Training checkpoints on disk: their names and manifest, how they are written, and which one to load.

``<dir>/latest_checkpointed_iteration.txt`` holds the newest iteration as text (Megatron's file); each checkpoint is a
directory ``<dir>/iter_0000010`` with a ``manifest.json`` that lists every tensor with its file, shape and crc32.  A
directory of that name is complete: it is written under another name (``.tmp-``) and then renamed.

``mm.training.checkpoint`` decides which rank saves what; ``training_reader.py`` reads checkpoints for any layout.
"""

import dataclasses
import math
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError

from mm.config.model import ModelConfig
from mm.config.schema import Count, NaturalNumber
from mm.errors import UserError, collected, refuse
from mm.formats.atomic import MEGATRON_MODES, new_file, put_in_place, sync
from mm.formats.blocks import ON_HOST, Host, Values, write_tensors
from mm.formats.manifest import (
    MANIFEST_FILE,
    manifest_text,
    placed_model,
    read_head,
    read_manifest,
    tensor_from_json,
    tensor_json,
)
from mm.formats.safetensors import safetensors_file
from mm.weights.views import Stored

LATEST_FILE = "latest_checkpointed_iteration.txt"
FORMAT, VERSION = "mm training checkpoint", 1
PROBE_PREFIX = ".mm-probe-"
"""Begins the names of files by which nodes find out whether they share a directory."""
UNREADABLE = ""
"""Stands for the run id if the manifest cannot be read; no run has this id."""

_MAX_DIGITS = 18
"""Of an iteration's number."""
_ITERATION_NAME = re.compile(r"iter_(\d{7,})")
_DYING_NAME = re.compile(r"iter_(\d{7,})\.dying")
_LEFTOVER_NAME = re.compile(r"iter_\d{7,}\.(tmp|old)-\w+")


@dataclass(frozen=True)
class CheckpointTensor:
    """A stored tensor: a weight of one tensor-parallel rank, or a flat range of a state of the same size."""

    name: str
    """Name of the weight, with the global layer number."""
    kind: str
    """"weight", "master" (its fp32 copy), "exp_avg", "exp_avg_sq", or "random" (a random state, not of a weight)."""
    tp_rank: int
    """0 for tensors that are equal on all tensor-parallel ranks and therefore stored once."""
    start: int
    """Index of the first element in the rank's flattened shard, without padding (``local_shape``)."""
    stored: Stored

    @classmethod
    def of(
        cls, dtype: torch.dtype, shape: Sequence[int], file: str, name: str, kind: str, tp_rank: int = 0, start: int = 0
    ) -> "CheckpointTensor":
        """A piece to be written; its checksum is computed then."""
        return cls(name, kind, tp_rank, start, Stored(file, _key(name, kind), dtype, tuple(shape), 0))

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.stored.shape)

    @classmethod
    def from_json(cls, entry: Any, folder: Path) -> "CheckpointTensor":
        """A piece from its entry in the manifest in ``folder``; raises UserError for a damaged entry."""
        stated = tensor_from_json(entry, folder)
        kind, numbers = entry.get("part"), (entry.get("tp_rank"), entry.get("start"))
        if not isinstance(kind, str) or not all(type(one) is int and one >= 0 for one in numbers):
            raise UserError(f"{folder / MANIFEST_FILE} has a damaged entry of {stated.name}: part, tp_rank and start "
                            f"are {str((kind, *numbers))[:200]}; {instead_of(folder)}.")
        return cls(stated.name, kind, *numbers, dataclasses.replace(stated, name=_key(stated.name, kind)))

    def to_json(self) -> dict[str, Any]:
        return {
            **tensor_json(self.stored), "name": self.name, "part": self.kind, "tp_rank": self.tp_rank,
            "start": self.start,
        }  # fmt: skip


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of a checkpoint.  ``facts`` are for people and never read back."""

    iteration: NaturalNumber
    consumed_samples: NaturalNumber
    world_size: Count
    tp_size: Count
    pp_size: Count
    model: ModelConfig
    """The model, on the layout of the run that saved it."""
    optimizer: Mapping[str, Any] | None
    """"step" and "grad_scaler" (or None); None if no optimizer state was saved."""
    facts: Mapping[str, Any]
    pieces: tuple[CheckpointTensor, ...]
    data: Mapping[str, Any] | None = None
    """The samples it was trained on; None if an older version saved it."""
    base: Mapping[str, Any] | None = None
    """For adapters: "path" and "crc32" of their base model, whose frozen weights are not saved here."""
    best: Mapping[str, Any] | None = None
    """The best validation so far; None in checkpoints from versions without it."""
    run_id: str | None = None
    """The same in all checkpoints that one run saves into one directory; None if an older version saved it."""
    schedule: Mapping[str, Any] | None = None
    """The schedule of learning rates and weight decay; None if an older version saved it."""
    given_start: Mapping[str, str | None] | None = None
    """What the command that started the run gave as its start: ``Arguments.given_start``."""
    recent: Mapping[str, Any] | None = None
    """Losses and gradient norms of the latest steps; None if an older version saved it."""
    disks: Sequence[Mapping[str, Any]] | None = None
    """With ``--save-on-each-node``, "host", "ranks" and "files" of each disk; None if all files are on one."""

    @classmethod
    def read(cls, folder: Path) -> "CheckpointManifest":
        """Read the manifest; raises UserError if it is missing, damaged or of another version."""
        content, path = read_manifest(folder, FORMAT, VERSION, instead_of(folder)), folder / MANIFEST_FILE
        refuse(_field_problems(content, path))
        model = placed_model(content["model"], content["tp_size"], folder)
        pieces = tuple(CheckpointTensor.from_json(piece, folder) for piece in content["pieces"])
        outside = next((one.stored.file for one in pieces if Path(one.stored.file).name != one.stored.file), None)
        if outside is not None:
            raise UserError(f"{path} names the file {outside!r}; expected plain file names beside it.")
        return cls(**content | {"model": model, "pieces": pieces})

    def text(self) -> str:
        """The content of the manifest file."""
        content = {"format": FORMAT, "version": VERSION, **vars(self), "model": dataclasses.asdict(self.model)}
        del content["pieces"]  # they come last, a line for each
        return manifest_text(content, "pieces", [piece.to_json() for piece in self.pieces])


def _field_problems(content: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Fields of the manifest at ``path`` that are unknown, missing or of another type."""
    kinds = get_type_hints(CheckpointManifest, include_extras=True) | {"model": Mapping[str, Any], "pieces": list[Any]}
    yield from (f"{path} has {name[:80]!r}, which this version does not know; use the version that wrote it."
                for name in content.keys() - kinds.keys())
    for field in dataclasses.fields(CheckpointManifest):
        if field.name not in content and field.default is dataclasses.MISSING:
            yield f"{path} has no {field.name}; {instead_of(path.parent)}."
        elif field.name in content:
            try:
                TypeAdapter(kinds[field.name]).validate_python(content[field.name], strict=True)
            except ValidationError:
                yield (f"{path}: {field.name} is {str(content[field.name])[:80]!r}, which no run writes; "
                       f"{instead_of(path.parent)}.")


def _key(name: str, kind: str) -> str:
    """The name of a piece in its safetensors file."""
    return name if kind == "weight" else f"{name}:{kind}"


# Writing


def begin(directory: Path, iteration: int, num_bytes: int) -> Path:
    """Create the temporary directory that ``commit`` will rename; raises UserError unless ``num_bytes`` are free."""
    directory.mkdir(mode=MEGATRON_MODES.directory, parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(directory).free
    if num_bytes > free_bytes:
        raise UserError(
            f"The checkpoint of iteration {iteration} needs {num_bytes:,} bytes in {directory}, but only "
            f"{free_bytes:,} are free; make room, give another --save, or use --keep-last-checkpoints."
        )
    temporary = directory / f"{iteration_name(iteration)}.tmp-{secrets.token_hex(4)}"
    temporary.mkdir(mode=MEGATRON_MODES.directory)
    return temporary


def write_pieces(
    folder: Path, file: str, pieces: Sequence[tuple[CheckpointTensor, Values]], host: Host = ON_HOST
) -> list[CheckpointTensor]:
    """Write one safetensors file, flush it to disk, and return its pieces with their checksums.

    A block is copied to the host while others are checksummed and written.  Raises UserError if the file cannot be
    written.
    """
    by_name = {piece.stored.name: (piece, values) for piece, values in pieces}
    planned = safetensors_file(
        file, [(name, piece.stored.dtype, piece.stored.shape) for name, (piece, _) in by_name.items()])
    with _new_file(folder / file) as opened:
        opened.write(planned.pieces[0][1])
        crc32s = write_tensors(opened, [(stored.name, by_name[stored.name][1]) for stored in planned.tensors], host)
    return [dataclasses.replace(by_name[stored.name][0], stored=dataclasses.replace(stored, crc32=crc32s[stored.name]))
            for stored in planned.tensors]


def commit(temporary: Path, manifest: CheckpointManifest) -> Path:
    """Make a written checkpoint the newest."""
    prepare(temporary, manifest.text())
    return publish(temporary)


def commit_dying(temporary: Path, manifest: CheckpointManifest) -> Path:
    """Complete a checkpoint that the surviving ranks of a dying run have written, under a name of its own.

    ``latest`` still names the newest checkpoint that all ranks have saved.
    """
    prepare(temporary, manifest.text())
    final, old = _renamed(temporary, f"{iteration_name(manifest.iteration)}.dying")
    sync(final.parent)
    _delete_replaced(old, final)
    return final


def prepare(temporary: Path, manifest_text: str) -> None:
    """Complete a written checkpoint, so that only ``publish`` remains to be done."""
    with _new_file(temporary / MANIFEST_FILE) as opened:
        opened.write(manifest_text.encode())
    sync(temporary)


def publish(temporary: Path) -> Path:
    """Make a prepared checkpoint the newest: rename it, then ``latest``.  Replaces one of the same iteration."""
    final, old = _renamed(temporary, temporary.name.partition(".")[0])
    directory = final.parent
    latest = directory / f"{LATEST_FILE}.tmp-{secrets.token_hex(4)}"
    with _new_file(latest) as opened:
        opened.write(f"{int(final.name.removeprefix('iter_'))}\n".encode())
    latest.replace(directory / LATEST_FILE)
    sync(directory)
    _delete_replaced(old, final)
    return final


def _renamed(temporary: Path, name: str) -> tuple[Path, Path]:
    """Rename a prepared checkpoint; return it, and where one that it replaces is now."""
    final = temporary.with_name(name)
    old = final.with_name(f"{name.partition('.')[0]}.old-{secrets.token_hex(4)}")
    put_in_place(temporary, final, old)
    return final, old


def _delete_replaced(old: Path, final: Path) -> None:
    try:
        if old.exists():
            shutil.rmtree(old)
    except OSError as error:  # the new checkpoint is complete anyway
        warnings.warn(f"the checkpoint that {final} replaces could not be deleted: {error}", stacklevel=3)


@dataclass(frozen=True)
class Retention:
    """Which complete checkpoints of a run stay when a newer one is saved."""

    last: int | None = None
    """How many of the newest; None: all, or one if there is an interval."""
    interval: int | None = None
    """Those of iterations that are its multiples stay too."""

    def doomed(self, earlier: Sequence[int]) -> list[int]:
        """The iterations to delete among ``earlier``, ascending ones before the newest."""
        if self.last is None and self.interval is None:
            return []
        old = earlier[: max(0, len(earlier) - (self.last or 1) + 1)]
        return [iteration for iteration in old if self.interval is None or iteration % self.interval]


ALL_KEPT = Retention()


def purge(directory: Path, newest: int, retention: Retention, run_id: str | None) -> list[str]:
    """Delete a run's checkpoints before ``newest`` that ``retention`` does not keep; return problems as messages.

    Later checkpoints, and those of other runs, are kept.  Dying checkpoints up to ``newest`` are no longer needed.  If
    one cannot be deleted, the others still are.
    """
    problems = []
    earlier = [iteration for iteration, found in run_ids(directory).items() if iteration < newest and found == run_id]
    outdated = [path for iteration, path in _dying(directory) if iteration <= newest and run_id_of(path) == run_id]
    for doomed in [*(directory / iteration_name(iteration) for iteration in retention.doomed(earlier)), *outdated]:
        # so iter_* is never half deleted
        renamed = doomed.with_name(f"{doomed.name.partition('.')[0]}.tmp-{secrets.token_hex(4)}")
        try:
            doomed.rename(renamed)
            shutil.rmtree(renamed)
        except OSError as error:
            problems.append(f"the old checkpoint {doomed} could not be deleted: {error}")
    return problems


def tidy(directory: Path) -> list[str]:
    """Delete leftovers of interrupted saves and deletions in ``directory``, which no run may be writing.

    A checkpoint that was moved aside is kept if its replacement does not exist.  Returns notes on what was deleted.
    """
    notes = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        match = _LEFTOVER_NAME.fullmatch(path.name)
        is_only_one = match and match[1] == "old" and not (
            path.with_name(path.name.partition(".")[0]) / MANIFEST_FILE).is_file()
        if is_only_one or not (match or path.name.startswith((f"{LATEST_FILE}.tmp-", PROBE_PREFIX))):
            continue
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            notes.append(f"{path} was left over from an interrupted save and has been deleted")
        except OSError as error:
            notes.append(f"{path} is left over from an interrupted save and cannot be deleted: {error}")
    return notes


def remove(directory: str | Path) -> None:
    """Delete every checkpoint in ``directory``, and the directory itself if it is then empty."""
    directory = Path(directory)
    (directory / LATEST_FILE).unlink(missing_ok=True)
    for path in directory.iterdir():
        if _ITERATION_NAME.fullmatch(path.name) or _LEFTOVER_NAME.fullmatch(path.name):
            shutil.rmtree(path)
    if not any(directory.iterdir()):
        directory.rmdir()


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, which is flushed to disk when the block ends; failures raise UserError with its name."""
    try:
        with new_file(path, MEGATRON_MODES.file) as opened:
            yield opened
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}), so this checkpoint is abandoned; earlier ones are "
            f"unchanged. Make room, or give another --save that every machine can write."
        ) from error


# Finding


def named_iteration(text: str) -> int | None:
    """The iteration that a text names as a number; None for other text."""
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


def iteration_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def is_complete(directory: Path, iteration: int) -> bool:
    """Whether there is a complete checkpoint of this iteration."""
    return (directory / iteration_name(iteration) / MANIFEST_FILE).is_file()


def complete_iterations(directory: Path) -> list[int]:
    """Iterations of complete checkpoints, ascending."""
    matches = [_ITERATION_NAME.fullmatch(path.parent.name) for path in directory.glob(f"iter_*/{MANIFEST_FILE}")]
    return sorted(int(match[1]) for match in matches if match)


def _dying(directory: Path) -> list[tuple[int, Path]]:
    """Iterations and paths of dying checkpoints, ascending."""
    found = [(_DYING_NAME.fullmatch(path.parent.name), path.parent)
             for path in directory.glob(f"iter_*/{MANIFEST_FILE}")]
    return sorted((int(match[1]), path) for match, path in found if match)


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint, also a dying one that training can continue from; None if there is none."""
    complete = complete_iterations(directory)
    if not complete:
        return _dying_after(directory, -1, None)[0]
    newest = directory / iteration_name(complete[-1])
    return _dying_after(directory, complete[-1], newest)[0] or newest


def _dying_after(directory: Path, iteration: int, newest: Path | None) -> tuple[Path | None, list[str]]:
    """The dying checkpoint after ``iteration`` that training continues from, and notes for the user.

    It must have optimizer state, and belong to the run of the ``newest`` regular one, unless there is none.
    """
    notes = list[str]()
    for _, path in reversed([one for one in _dying(directory) if one[0] > iteration]):
        try:
            content = stated(path)
        except UserError as error:
            notes.append(f"{path}, which the surviving ranks of a failed run saved, is not used: {error}")
            continue
        if newest is not None and content.get("run_id") != run_id_of(newest):
            continue
        since = "before the first regular checkpoint" if newest is None else f"after {newest}"
        if content.get("optimizer") is not None:
            return path, [*notes, f"training continues from {path}, which the surviving ranks of the failed run saved "
                                  f"{since}; move it away to continue without it"]
        notes.append(f"{path} holds weights that the surviving ranks of the failed run saved {since}; the optimizer "
                     f"state was lost, so it is used only with --load {path} --no-load-optim")
    return None, notes


def run_ids(directory: Path) -> dict[int, str | None]:
    """``CheckpointManifest.run_id`` of each complete checkpoint, or ``UNREADABLE``, by ascending iteration."""
    return {iteration: run_id_of(directory / iteration_name(iteration)) for iteration in complete_iterations(directory)}


def run_id_of(folder: Path) -> str | None:
    """``CheckpointManifest.run_id`` of one checkpoint, or ``UNREADABLE``."""
    try:
        return stated(folder).get("run_id")
    except UserError:
        return UNREADABLE


def identities(directory: Path) -> dict[int, int]:
    """The checksum of the manifest of each complete checkpoint, by ascending iteration.

    It is the same on all disks of one save.
    """
    found = {}
    for iteration in complete_iterations(directory):
        with collected([]):  # a damaged one is like none
            found[iteration] = stated(directory / iteration_name(iteration))["crc32"]
    return found


def prepared(directory: Path) -> dict[Path, int]:
    """Checkpoints that were prepared but not published, with the checksums of their manifests."""
    found = {}
    for path in sorted(directory.glob(f"iter_*.tmp-*/{MANIFEST_FILE}")):
        with collected([]):  # killed while it was written
            CheckpointManifest.read(path.parent)
            found[path.parent] = stated(path.parent)["crc32"]
    return found


def stated(folder: Path) -> Mapping[str, Any]:
    """The manifest of a checkpoint without its pieces, as JSON; raises UserError if it cannot be read."""
    return read_head(folder, "pieces")


def instead_of(folder: Path) -> str:
    """What to do if the checkpoint in ``folder`` is damaged, which ends the messages that say so.

    The run does not go back to an older one by itself: it would train the steps since then again, and replace what may
    still be worth a look.
    """
    if _DYING_NAME.fullmatch(folder.name):
        return "move it away, then the run continues from the newest checkpoint before it"
    match, older = _ITERATION_NAME.fullmatch(folder.name), list[int]()
    if match:
        older = [iteration for iteration in complete_iterations(folder.parent) if iteration < int(match[1])]
    if not older:
        return f"use another checkpoint: {folder.parent} has no older one"
    replaced, latest = folder.with_name(iteration_name(older[-1])), folder.with_name(LATEST_FILE)
    return (f"use another checkpoint: the newest before it is {replaced}. To continue from it, run `echo {older[-1]} > "
            f"{latest}` and start again, or give --load {replaced}")


def find_checkpoint(directory: str | Path) -> tuple[Path, tuple[str, ...]]:
    """The checkpoint to load, and notes for the user on leftovers of an interrupted save.

    ``directory`` is one checkpoint, or the directory of all of them, in which ``latest_checkpointed_iteration.txt``
    names one.  Raises UserError if there is none.
    """
    directory = Path(directory)
    if (directory / MANIFEST_FILE).is_file():
        return directory, ()
    complete, latest, notes = complete_iterations(directory), directory / LATEST_FILE, []
    if latest.is_file():
        text = latest.read_text(encoding="utf-8", errors="replace").strip()
        if (iteration := named_iteration(text)) is None:
            raise UserError(f"{latest} holds {text[:40]!r}; expected the number of an iteration, for example 100, "
                            f"or 'release' beside release/mp_rank_*.")
    elif complete:
        iteration = complete[-1]
        notes.append(f"{directory} has no {LATEST_FILE}; the newest complete checkpoint is iteration {iteration}")
    else:
        chosen, notes = _dying_after(directory, -1, None)
        if chosen is None:
            more = "".join(f" {note}." for note in notes)
            raise UserError(f"{directory} holds no complete training checkpoint (no iter_*/{MANIFEST_FILE}).{more}")
        return chosen, tuple(notes)
    chosen = directory / iteration_name(iteration)
    # If a save that replaces a checkpoint is killed between its two renames, the complete old one is left aside.
    asides = [path.parent for path in sorted(directory.glob(f"{chosen.name}.old-*/{MANIFEST_FILE}"))]
    if not (chosen / MANIFEST_FILE).is_file():
        if not asides:
            raise UserError(
                f"{chosen} has no {MANIFEST_FILE}, so it is not a complete checkpoint; complete ones in {directory}: "
                f"{', '.join(map(str, complete)) or 'none'}. To use one, write its number into {LATEST_FILE} there."
            )
        chosen = asides[-1]
        notes.append(f"{chosen} is used, because the save that should have replaced it was interrupted")
    notes += [
        f"{path} is left over from an interrupted save and is not used; delete it"
        for path in sorted(directory.iterdir())
        if _LEFTOVER_NAME.fullmatch(path.name) and path != chosen
    ]
    if not complete or iteration >= complete[-1]:  # an earlier one was chosen on purpose
        dying, more = _dying_after(directory, iteration, chosen)
        return dying or chosen, (*notes, *more)
    return chosen, tuple(notes)
