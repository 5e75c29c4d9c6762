"""Training checkpoints on disk: names, manifest, safetensors files, atomic replacement, and which one to load.

``<dir>/latest_checkpointed_iteration.txt`` holds the newest iteration as text (Megatron's file); each checkpoint is a
directory ``<dir>/iter_0000010`` with a ``manifest.json`` that lists every tensor with its place, shape and crc32.  A
directory of that name is complete: it is written under a name of its own (``.tmp-``) and renamed.

Knows nothing of processes, devices or what the tensors mean: ``mm.training.checkpoint`` decides who saves what,
``checkpoint.formats.training_reader`` reads it for any layout.
"""

import dataclasses
import json
import math
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mm.errors import UserError

LATEST_FILE = "latest_checkpointed_iteration.txt"
MANIFEST_FILE = "manifest.json"
FORMAT, VERSION = "mm training checkpoint", 1
USE_ANOTHER = "use another checkpoint"
"""How most messages about damage end."""

_ITERATION_NAME = re.compile(r"iter_(\d{7,})")
_LEFTOVER_NAME = re.compile(r"iter_\d{7,}\.(tmp|old)-\w+")
_DIRECTORY_MODE, _FILE_MODE = 0o750, 0o640
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "U8": torch.uint8,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """One stored tensor: a weight of one tensor-parallel rank, or a flat range of something of the same size."""

    name: str
    """Of the weight, with the global layer number."""
    part: str
    """"weight", "master" (its fp32 copy), "exp_avg", "exp_avg_sq", or "random" (a random state, no weight)."""
    tp_rank: int
    """0 for what all tensor-parallel ranks hold alike: it is stored once."""
    start: int
    """Position of the first element in the flattened tensor of that rank."""
    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it."""
    file: str
    crc32: int = 0
    """Of the bytes."""

    @classmethod
    def of(cls, tensor: Tensor, file: str, name: str, part: str, tp_rank: int = 0, start: int = 0) -> "Piece":
        """The piece that ``tensor`` will be; its checksum is found while it is written."""
        return cls(name, part, tp_rank, start, tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype], file)

    @property
    def key(self) -> str:
        """Its name in the safetensors file."""
        return self.name if self.part == "weight" else f"{self.name}:{self.part}"

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.  ``facts`` are for people; nothing is read back from them."""

    iteration: int
    consumed_samples: int
    world_size: int
    tp_size: int
    pp_size: int
    model: Mapping[str, Any]
    """``ModelConfig`` as JSON."""
    optimizer: Mapping[str, Any] | None
    """"step" and "grad_scaler" (or None); None when no optimizer state was saved."""
    facts: Mapping[str, Any]
    pieces: tuple[Piece, ...]

    @property
    def layout(self) -> tuple[int, int, int]:
        """Random states fit only a run of the same one."""
        return self.world_size, self.tp_size, self.pp_size


# Writing


def begin(directory: Path, iteration: int, num_bytes: int) -> Path:
    """Make the temporary directory that ``commit`` will rename.

    Raises:
        UserError: less than ``num_bytes`` are free.
        OSError: the directory cannot be made.
    """
    directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(directory).free
    if num_bytes > free_bytes:
        raise UserError(
            f"The checkpoint of iteration {iteration} needs {num_bytes:,} bytes in {directory}, but only "
            f"{free_bytes:,} are free; make room, give another --save, or use --keep-last-checkpoints."
        )
    temporary = directory / f"{iteration_name(iteration)}.tmp-{secrets.token_hex(4)}"
    temporary.mkdir(mode=_DIRECTORY_MODE)
    return temporary


def write_pieces(folder: Path, file: str, pieces: Sequence[tuple[Piece, Tensor]]) -> list[Piece]:
    """Write one safetensors file through to the disk and return its pieces with their checksums.

    Only one tensor at a time is copied to the host.

    Raises:
        UserError: the file cannot be written.
    """
    ordered = sorted(pieces, key=lambda pair: -DTYPES[pair[0].dtype].itemsize)  # keeps every tensor aligned
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for piece, _ in ordered:
        offsets = [end, end + piece.num_bytes]
        header[piece.key] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    finished = []
    with _new_file(folder / file) as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for piece, tensor in ordered:
            data = tensor_bytes(tensor)
            opened.write(data)
            finished.append(dataclasses.replace(piece, crc32=zlib.crc32(data)))
    return finished


def commit(temporary: Path, manifest: Manifest) -> Path:
    """Make a written checkpoint the newest one: manifest, rename, then ``latest``.  An older twin is replaced."""
    _write_text(temporary / MANIFEST_FILE, _dump(manifest))
    _sync_directory(temporary)
    directory, final = temporary.parent, temporary.with_name(iteration_name(manifest.iteration))
    old = final.with_name(f"{final.name}.old-{secrets.token_hex(4)}")
    replaces = final.exists()
    if replaces:
        final.rename(old)
    try:
        temporary.rename(final)
    except OSError:
        if replaces:
            old.rename(final)
        raise
    _sync_directory(directory)
    latest = directory / f"{LATEST_FILE}.tmp-{secrets.token_hex(4)}"
    _write_text(latest, f"{manifest.iteration}\n")
    latest.replace(directory / LATEST_FILE)
    _sync_directory(directory)
    if replaces:
        shutil.rmtree(old)
    return final


def purge(directory: Path, newest: int, keep_last: int) -> None:
    """Delete the checkpoints before ``newest`` except the last ``keep_last - 1``; later ones are not touched.

    Raises:
        OSError: one cannot be deleted.
    """
    earlier = [iteration for iteration in complete_iterations(directory) if iteration < newest]
    for iteration in earlier[: max(0, len(earlier) - keep_last + 1)]:
        doomed = directory / iteration_name(iteration)
        renamed = doomed.with_name(f"{doomed.name}.tmp-{secrets.token_hex(4)}")  # never half a directory of that name
        doomed.rename(renamed)
        shutil.rmtree(renamed)


def remove(directory: str | Path) -> None:
    """Delete every checkpoint in ``directory``, and the directory itself when nothing else is in it."""
    directory = Path(directory)
    (directory / LATEST_FILE).unlink(missing_ok=True)
    for path in directory.iterdir():
        if _ITERATION_NAME.fullmatch(path.name) or _LEFTOVER_NAME.fullmatch(path.name):
            shutil.rmtree(path)
    if not any(directory.iterdir()):
        directory.rmdir()


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which is on the disk when the block is left; failing is a UserError that names it."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE), "wb") as opened:
            yield opened
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}), so this checkpoint is given up; earlier ones are as they "
            f"were. Make room, or give another --save that every machine can write."
        ) from error


def _write_text(path: Path, text: str) -> None:
    with _new_file(path) as opened:
        opened.write(text.encode())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """What is written to the file and what the crc32 is of."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _dump(manifest: Manifest) -> str:
    """JSON to be looked at: one line for every piece."""
    content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
    text = json.dumps({"crc32": _json_crc32(content), **content, "pieces": []}, indent=1)
    pieces = ",\n  ".join(json.dumps(dataclasses.asdict(piece)) for piece in manifest.pieces)
    return f"{text.removesuffix('[]' + chr(10) + '}')}[\n  {pieces}\n ]\n}}\n"


def _json_crc32(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def read_manifest(folder: Path) -> Manifest:
    """Raises UserError when it is missing, damaged or of another version."""
    path = folder / MANIFEST_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); {USE_ANOTHER}.") from error
    crc32 = content.pop("crc32", None) if isinstance(content, dict) else None
    if crc32 is None or crc32 != _json_crc32(content):
        raise UserError(f"{path} is damaged (its crc32 differs); {USE_ANOTHER}.")
    kind = content.pop("format"), content.pop("version")
    if kind != (FORMAT, VERSION):
        raise UserError(f"{path} is {kind[0]!r} version {kind[1]!r}; expected {FORMAT!r} version {VERSION}.")
    pieces = tuple(Piece(**{**piece, "shape": tuple(piece["shape"])}) for piece in content.pop("pieces"))
    outside = next((piece.file for piece in pieces if Path(piece.file).name != piece.file), None)
    if outside is not None:
        raise UserError(f"{path} names the file {outside!r}; expected plain file names beside it.")
    return Manifest(**content, pieces=pieces)


# Finding


def iteration_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def complete_iterations(directory: Path) -> list[int]:
    """Iterations of the complete checkpoints, ascending."""
    matches = [_ITERATION_NAME.fullmatch(path.parent.name) for path in directory.glob(f"iter_*/{MANIFEST_FILE}")]
    return sorted(int(match[1]) for match in matches if match)


def find_checkpoint(directory: str | Path, iteration: int | None = None) -> tuple[Path, tuple[str, ...]]:
    """The checkpoint to load, and notes for the user: what was left behind by an interrupted save.

    ``directory`` is the directory of all checkpoints or one of them.  Without ``iteration`` it is the one that
    ``latest_checkpointed_iteration.txt`` names.

    Raises:
        UserError: there is no such checkpoint.
    """
    directory = Path(directory)
    if (directory / MANIFEST_FILE).is_file():
        return directory, ()
    complete, notes = complete_iterations(directory), []
    if iteration is None:
        iteration = _latest(directory)
    if iteration is None:
        if not complete:
            raise UserError(f"{directory} holds no complete training checkpoint (no iter_*/{MANIFEST_FILE}).")
        iteration = complete[-1]
        notes.append(f"{directory} has no {LATEST_FILE}; the newest complete checkpoint is iteration {iteration}")
    chosen = directory / iteration_name(iteration)
    # a save over an existing checkpoint that was killed between its two renames leaves the complete old one aside
    asides = [path.parent for path in sorted(directory.glob(f"{chosen.name}.old-*/{MANIFEST_FILE}"))]
    if not (chosen / MANIFEST_FILE).is_file():
        if not asides:
            raise UserError(
                f"{chosen} has no {MANIFEST_FILE}, so it is not a complete checkpoint; complete ones in {directory}: "
                f"{', '.join(map(str, complete)) or 'none'}. Write one of these numbers into {LATEST_FILE} there to "
                f"use it."
            )
        chosen = asides[-1]
        notes.append(f"{chosen} is used: the save that was to replace it was interrupted")
    notes += [
        f"{path} is left over from an interrupted save and is not used; delete it"
        for path in sorted(directory.iterdir())
        if _LEFTOVER_NAME.fullmatch(path.name) and path != chosen
    ]
    return chosen, tuple(notes)


def find_load_kind(path: str | Path, flag: str = "--load") -> str:
    """What ``path`` holds: "training" (checkpoints of ours), "mm" (MindSpeed-MM's layout) or "hf" (Hugging Face).

    ``flag`` gives it.  Only names are looked at.

    Raises:
        UserError: none of these; the message says what was found.
    """
    path = Path(path)
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{flag} {path} {found}; expected a Hugging Face directory or a directory of checkpoints.")
    if any(path.glob("mp_rank_*")):
        raise UserError(f"{flag} {path} holds the ranks of one checkpoint; give the directory above, {path.parent}.")
    if any(path.glob("*/mp_rank_*")):
        return "mm"
    if (path / MANIFEST_FILE).is_file() or any(path.glob(f"iter_*/{MANIFEST_FILE}")):
        return "training"
    if (path / "config.json").is_file():
        return "hf"
    names = sorted(entry.name for entry in path.iterdir())
    if any(name.startswith("adapter_") for name in names):
        raise UserError(f"{flag} {path} holds a LoRA adapter, not a model; give the directory of its base model.")
    if (path / LATEST_FILE).is_file() or any(_LEFTOVER_NAME.fullmatch(name) for name in names):
        find_checkpoint(path)  # says what is wrong with it
    raise UserError(
        f"{flag} {path} is neither a Hugging Face directory (no config.json) nor a directory of checkpoints (no "
        f"{LATEST_FILE}); it holds {', '.join(names[:5]) or 'nothing'}."
    )


def _latest(directory: Path) -> int | None:
    path = directory / LATEST_FILE
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if not text.isdecimal():
        raise UserError(f"{path} holds {text[:40]!r}; expected the number of an iteration, for example 100, "
                        f"or 'release' beside release/mp_rank_*.")
    return int(text)
