"""Safetensors files as byte ranges: reads and writes headers, and maps dtype names.

Format: 8 bytes little-endian header length, JSON header, data (https://huggingface.co/docs/safetensors).
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mm.errors import UserError
from mm.files import json_object
from mm.weights.views import Stored, TargetFile

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I16": torch.int16,
    "I64": torch.int64, "U8": torch.uint8,
}  # fmt: skip
"""All dtypes that this project writes."""
FLOAT_DTYPES = {name: dtype for name, dtype in DTYPES.items() if dtype.is_floating_point}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_LFS_MAGIC = b"version https://git-lfs"
"""First bytes of a Git-LFS pointer: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md"""
_HEADER_LIMIT_BYTES = 100_000_000
"""The safetensors library rejects longer headers."""


def refuse_lfs_pointer(path: Path, start: bytes) -> None:
    """Raise UserError if a file that begins with ``start`` is a Git-LFS pointer."""
    if start.startswith(_LFS_MAGIC):
        raise UserError(f"{path} is a Git-LFS pointer, not the file itself; run 'git lfs pull' in {path.parent}.")


def read_header(
    path: Path, file: str | None = None, dtypes: Mapping[str, torch.dtype] = DTYPES
) -> dict[str, Stored]:
    """The tensors of one file by name, in file order; ``file`` is the file name they record (default: its own)."""
    header, header_bytes = _read_json(path)
    size_bytes = path.stat().st_size
    header.pop("__metadata__", None)
    end = 8 + header_bytes
    try:
        found = {name: _stored(path, file or path.name, name, entry, end, dtypes) for name, entry in header.items()}
        for one in sorted(found.values(), key=lambda one: (one.offset, one.num_bytes)):
            if one.offset != end:  # the format allows neither holes nor overlaps
                raise ValueError(f"{one.name} does not begin where the tensor before it ends")
            end += one.num_bytes
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{path} has a damaged safetensors header ({error}); download it again.") from error
    if size_bytes != end:
        raise UserError(f"{path} has {size_bytes} bytes, but its header describes {end}; download it again.")
    return found


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata in a file's header; raises UserError if the file is truncated or damaged."""
    return _read_json(path)[0].get("__metadata__") or {}


def _read_json(path: Path) -> tuple[dict[str, Any], int]:
    """The parsed header of a file, and its length in bytes."""
    size_bytes = path.stat().st_size
    with path.open("rb") as opened:
        start = opened.read(len(_LFS_MAGIC))
        refuse_lfs_pointer(path, start)
        header_bytes = int.from_bytes(start[:8], "little")
        if size_bytes < 8 or header_bytes > min(size_bytes - 8, _HEADER_LIMIT_BYTES):
            raise UserError(f"{path} ({size_bytes} bytes) is truncated or not a safetensors file; download it again.")
        opened.seek(8)
        try:
            header = json_object(opened.read(header_bytes))
        except ValueError as error:
            raise UserError(f"{path} has a damaged safetensors header ({error}); download it again.") from error
    return header, header_bytes


def _stored(
    path: Path, file: str, name: str, entry: Mapping[str, Any], data_start: int, dtypes: Mapping[str, torch.dtype]
) -> Stored:
    if entry["dtype"] not in dtypes:
        raise UserError(f"{path}: {name} has dtype {entry['dtype']}; expected one of {', '.join(dtypes)}. Quantized "
                        f"weights are not supported: give the unquantized model.")
    start, stop = entry["data_offsets"]
    stored = Stored(file, name, dtypes[entry["dtype"]], tuple(entry["shape"]), data_start + start)
    if stop - start != stored.num_bytes:
        raise UserError(f"{path}: {name} has {stop - start} bytes, which does not match {list(stored.shape)} of "
                        f"{entry['dtype']}; download it again.")
    return stored


Description = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape."""


def safetensors_file(
    name: str, tensors: Iterable[Description], metadata: Mapping[str, str] | None = None
) -> TargetFile:
    """A file to write: ``tensors`` one after the other, wider dtypes first, so that every tensor is aligned."""
    ordered = sorted(tensors, key=lambda tensor: -tensor[1].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    ends = [0]
    for tensor_name, dtype, shape in ordered:
        ends.append(ends[-1] + math.prod(shape) * dtype.itemsize)
        header[tensor_name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": ends[-2:]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    stored = tuple(Stored(name, *tensor, start + end) for tensor, end in zip(ordered, ends, strict=False))
    return TargetFile(name, stored, start + ends[-1], ((0, len(text).to_bytes(8, "little") + text),))


def safetensors_file_like(path: Path) -> TargetFile:
    """A file to write with a header byte-identical to that of ``path``."""
    stored = tuple(read_header(path).values())
    with path.open("rb") as file:
        length = file.read(8)
        return TargetFile(path.name, stored, path.stat().st_size,
                          ((0, length + file.read(int.from_bytes(length, "little"))),))
