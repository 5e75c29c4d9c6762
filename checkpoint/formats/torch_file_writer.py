"""Makes torch.save files whose tensors are copied in, so that no model is ever held in memory.

``create`` lays out a file with every tensor zero; the caller fills the byte ranges; ``finish`` sets the checksums.  Or,
where the caller knows the checksums: ``frame`` gives all that is not tensor data.  The result is what torch 2.13 would
have written, byte for byte, but for one record: ``.data/serialization_id``, a hash that readers treat as optional.

Sources of the layout: ``torch/serialization.py`` (``_save``), ``caffe2/serialize/inline_container.cc`` (``getPadding``)
and its miniz, and the ZIP64 part of PKWARE's APPNOTE 6.3.  Knows nothing of models, layouts or tensor names.
"""

import math
import os
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch

from checkpoint.formats.torch_file import (
    CENTRAL_HEADER,
    DTYPE_OF_STORAGE,
    LOCAL_HEADER,
    LOCAL_SIGNATURE,
    Record,
    TorchFile,
    TorchTensor,
    read_directory,
    read_index,
    row_major,
)
from mm.errors import UserError

Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""dtype and shape by name."""

_MEGATRON_VERSION = {"checkpoint_version": 3.0}
"""What MindSpeed-MM's converter writes beside the model, and Megatron wants to see."""
_ARCHIVE_NAME = "model_optim_rng"
"""The folder inside the zip. torch takes it from the file's name; fixed, so that no offset hangs on the path."""
_ALIGNMENT_BYTES = 64
_CRC_BLOCK_BYTES = 1 << 20
_MAX_16, _MAX_32 = 0xFFFF, 0xFFFFFFFF
_CENTRAL_SIGNATURE, _DESCRIPTOR_SIGNATURE = 0x02014B50, 0x08074B50
_UTF8_FLAG, _DESCRIPTOR_FLAG = 0x800, 0x008
_STORAGE_OF_DTYPE = {dtype: getattr(torch, name.removeprefix("torch.")) for name, dtype in DTYPE_OF_STORAGE.items()}


def plan_file(chunks: Mapping[str, Tensors], extra: Mapping[str, Any] = _MEGATRON_VERSION) -> TorchFile:
    """The file that ``create`` would write: its size, and where each tensor goes. Touches no disk.

    Depends on the arguments alone, so that a file begun by one process can be completed by another.
    """
    return _lay_out(chunks, extra)[0]


def create(path: str | Path, chunks: Mapping[str, Tensors], extra: Mapping[str, Any] = _MEGATRON_VERSION) -> TorchFile:
    """Write a whole file whose tensors are zero (sparse: they take no disk space yet); say where each tensor goes.

    ``chunks``: dtype and shape by name, by chunk key (``{"model": ...}``, or ``{"model0": ..., "model1": ...}``).
    ``extra``: further top-level entries, plain values.  An existing file is replaced.  Call ``finish`` when the
    bytes of all tensors, row-major and little-endian, are in place; fsync is left to the caller.
    """
    layout = plan_file(chunks, extra)
    with open(path, "wb") as file:
        for offset_bytes, content in frame(chunks, extra):
            file.seek(offset_bytes)
            file.write(content)
    return layout


def frame(
    chunks: Mapping[str, Tensors],
    extra: Mapping[str, Any] = _MEGATRON_VERSION,
    crc32s: Mapping[tuple[str, str], int] | None = None,
) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of everything in the file that is not tensor data, in the order of the file.

    ``crc32s``: those of the tensors by (chunk, name), as ``zlib.crc32`` counts; with all of them, as with none of them
    and ``finish`` later, the file is complete.
    """
    _, entries = _lay_out(chunks, extra, crc32s)
    for entry in entries:
        yield entry.header_offset_bytes, entry.local_header() + (entry.content or b"")
        if entry.size_bytes:
            yield entry.data_offset_bytes + entry.size_bytes, entry.descriptor()
    yield entries[-1].end_bytes, _directory(entries)


def finish(path: str | Path, crc32s: Mapping[tuple[str, str], int] | None = None) -> dict[tuple[str, str], int]:
    """Set the CRC-32 of every tensor's record in a file of ``create``; return them by (chunk, name).

    ``crc32s``: those the caller knows already, as ``zlib.crc32`` counts; the others are read from the file in blocks.
    torch.load does not compare checksums, but zipfile and every unzip do, and would call the file corrupt.
    """
    path, known = Path(path), crc32s or {}
    tensors = read_index(path).tensors
    found = {}
    with open(path, "r+b") as file:
        records, _ = read_directory(path, file)
        for number, tensor in enumerate(tensors):
            record = records[f"data/{number}"]
            if (record.offset_bytes, record.size_bytes) != (tensor.offset_bytes, tensor.size_bytes):
                raise ValueError(f"{path} is not a file of create(): {tensor.name} is not the whole of data/{number}")
            key = tensor.chunk, tensor.name
            found[key] = known[key] if key in known else _crc32(file, record)
            _set_crc32(file, record, found[key])
    return found


def _crc32(file: BinaryIO, record: Record) -> int:
    crc, block = 0, memoryview(bytearray(min(_CRC_BLOCK_BYTES, record.size_bytes)))
    position, end = record.offset_bytes, record.offset_bytes + record.size_bytes
    while position < end:
        num_bytes = os.preadv(file.fileno(), [block[: end - position]], position)
        if not num_bytes:
            raise EOFError(f"{file.name} ended at byte {position}, while its checksums were computed")
        crc = zlib.crc32(block[:num_bytes], crc)
        position += num_bytes
    return crc


def _set_crc32(file: BinaryIO, record: Record, crc: int) -> None:
    """In the central directory and behind the data; the header before the data says 0 and points behind it."""
    packed = struct.pack("<I", crc)
    os.pwrite(file.fileno(), packed, record.crc_offset_bytes)
    if record.size_bytes:
        os.pwrite(file.fileno(), packed, record.offset_bytes + record.size_bytes + 4)


@dataclass(frozen=True)
class _Entry:
    """One record of the zip: header, content at an aligned offset, and a descriptor unless the content is empty."""

    name: str
    header_offset_bytes: int
    size_bytes: int
    crc32: int
    content: bytes | None = None
    """None: the bytes of a tensor, which are copied in."""

    @property
    def data_offset_bytes(self) -> int:
        return self.header_offset_bytes + len(self.local_header())

    @property
    def end_bytes(self) -> int:
        return self.data_offset_bytes + self.size_bytes + len(self.descriptor())

    def local_header(self) -> bytes:
        """With the padding that aligns the data, in an extra field that torch calls FB."""
        name, wide = self.name.encode(), self._wide_field()
        start = self.header_offset_bytes + LOCAL_HEADER.size + len(name) + len(wide) + 4
        padding = -start % _ALIGNMENT_BYTES
        extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        fixed = LOCAL_HEADER.pack(LOCAL_SIGNATURE, 0, self._flags, 0, 0, 0, 0, 0, 0, len(name), len(extra))
        return fixed + name + extra

    def descriptor(self) -> bytes:
        if not self.size_bytes:
            return b""
        sizes = "QQ" if self._wide_field() else "II"
        return struct.pack("<II" + sizes, _DESCRIPTOR_SIGNATURE, self.crc32, self.size_bytes, self.size_bytes)

    def central_header(self) -> bytes:
        name, wide, size = self.name.encode(), self._wide_field(), min(self.size_bytes, _MAX_32)
        offset = min(self.header_offset_bytes, _MAX_32)
        fixed = CENTRAL_HEADER.pack(
            _CENTRAL_SIGNATURE, 0, 0, self._flags, 0, 0, 0, self.crc32, size, size,
            len(name), len(wide), 0, 0, 0, 0, offset,
        )  # fmt: skip
        return fixed + name + wide

    @property
    def _flags(self) -> int:
        return _UTF8_FLAG | (_DESCRIPTOR_FLAG if self.size_bytes else 0)

    def _wide_field(self) -> bytes:
        """The ZIP64 extra field: the numbers that do not fit in 32 bits."""
        wide = [self.size_bytes] * 2 if self.size_bytes >= _MAX_32 else []
        wide += [self.header_offset_bytes] if self.header_offset_bytes >= _MAX_32 else []
        return struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""


def _lay_out(
    chunks: Mapping[str, Tensors], extra: Mapping[str, Any], crc32s: Mapping[tuple[str, str], int] | None = None
) -> tuple[TorchFile, list[_Entry]]:
    """The file as its reader will see it, and its records in order; an unknown CRC-32 is 0."""
    specs = [(chunk, name, *spec) for chunk, tensors in chunks.items() for name, spec in tensors.items()]
    unknown = [f"{chunk}/{name} ({dtype})" for chunk, name, dtype, _ in specs if dtype not in _STORAGE_OF_DTYPE]
    if unknown:
        known = ", ".join(str(dtype) for dtype in _STORAGE_OF_DTYPE)
        raise UserError(f"The torch format cannot hold the dtype of {unknown[0]}; expected one of {known}.")
    entries: list[_Entry] = []

    def add(name: str, size_bytes: int, crc32: int, content: bytes | None = None) -> _Entry:
        start = entries[-1].end_bytes if entries else 0
        entries.append(_Entry(f"{_ARCHIVE_NAME}/{name}", start, size_bytes, crc32, content))
        return entries[-1]

    def add_content(name: str, content: bytes) -> None:
        add(name, len(content), zlib.crc32(content), content)

    add_content("data.pkl", _pickled(chunks, extra))
    add_content(".format_version", b"1")
    add_content(".storage_alignment", b"%d" % _ALIGNMENT_BYTES)
    add_content("byteorder", b"little")
    tensors = []
    for number, (chunk, name, dtype, shape) in enumerate(specs):
        crc32 = (crc32s or {}).get((chunk, name), 0)
        entry = add(f"data/{number}", math.prod(shape) * dtype.itemsize, crc32)
        tensors.append(TorchTensor(chunk, name, dtype, tuple(shape), entry.data_offset_bytes, entry.size_bytes))
    add_content("version", b"3\n")
    size_bytes = entries[-1].end_bytes + len(_directory(entries))
    return TorchFile(size_bytes, tuple(chunks), tuple(tensors), dict(extra)), entries


def _directory(entries: list[_Entry]) -> bytes:
    """The central directory and its three end records, of which torch always writes the ZIP64 ones too."""
    start, count = entries[-1].end_bytes, len(entries)
    headers = b"".join(entry.central_header() for entry in entries)
    made_by, needed = 0x031E, 45
    wide = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, made_by, needed, 0, 0, count, count, len(headers), start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(headers), 1)
    few = min(count, _MAX_16)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, few, few, len(headers), min(start, _MAX_32), 0)
    return headers + wide + locator + end


class _NewStorage:
    """Pickled as a reference to the record that will hold the bytes."""

    def __init__(self, number: int, dtype: torch.dtype, num_elements: int) -> None:
        self.reference = ("storage", _STORAGE_OF_DTYPE[dtype], str(number), "cpu", num_elements)


class _NewTensor:
    """Pickled as torch.save pickles a contiguous tensor, without there being one."""

    def __init__(self, number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        # A new tuple: the pickle of one that other tensors share would be another, and so would every offset.
        self._shape = tuple(list(shape))
        self._storage = _NewStorage(number, dtype, math.prod(shape))

    def __reduce__(self) -> tuple[Callable, tuple]:
        args = (self._storage, 0, self._shape, row_major(self._shape), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, args


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.reference if isinstance(obj, _NewStorage) else None


def _pickled(chunks: Mapping[str, Tensors], extra: Mapping[str, Any]) -> bytes:
    """data.pkl, in protocol 2 as torch.save writes it."""
    content: dict[str, Any] = {}
    number = 0
    for chunk, tensors in chunks.items():
        content[sys.intern(chunk)] = placed = {}
        for name, (dtype, shape) in tensors.items():
            placed[sys.intern(name)] = _NewTensor(number, dtype, shape)
            number += 1
    buffer = BytesIO()
    _Pickler(buffer, protocol=2).dump(content | dict(extra))
    return buffer.getvalue()
