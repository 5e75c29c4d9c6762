"""New torch.save files whose tensors are copied in, so that no model is ever held in memory.

torch's own zip writer lays them out; only the pickle is written here, because torch can pickle no tensor that is not
there (its fake tensors cost 2.5 seconds and 70 MiB at their first use).
"""

import math
import os
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, cast

import torch
from torch._utils import _rebuild_tensor_v2

from checkpoint.formats.torch_file import STORAGES, row_major
from mm.errors import UserError
from mm.weights.plan import TargetFile
from mm.weights.views import Stored

Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""dtype and shape by name."""


@dataclass(frozen=True)
class TorchFile(TargetFile):
    """A file to write.

    It is what torch.save would have written, byte for byte, but for one record: ``.data/serialization_id``, a hash
    that torch makes of the checksums, which are not known yet.  Readers treat it as optional.
    """

    @classmethod
    def new(cls, name: str, chunks: Mapping[str, Tensors]) -> "TorchFile":
        """Lay out the tensors of ``chunks``: ``{"model": ...}``, or ``{"model0": ..., "model1": ...}``.

        Depends on the arguments alone, so that a file begun by one process can be completed by another.

        Raises:
            UserError: a dtype that torch saves in another way.
        """
        specs = [(f"{chunk}/{key}", *spec) for chunk, tensors in chunks.items() for key, spec in tensors.items()]
        unknown = [f"{key} ({dtype})" for key, dtype, _ in specs if dtype not in STORAGES]
        if unknown:
            known = ", ".join(map(str, STORAGES))
            raise UserError(f"The torch format cannot hold the dtype of {unknown[0]}; expected one of {known}.")
        space = _Space()
        # The records in the order of torch.save; torch's alignment is 64 bytes.
        writer = cast(Any, torch._C).PyTorchFileWriter(space, True, 64)  # its stub lacks most of it
        for record, content in (("data.pkl", _pickled(chunks)), (".format_version", b"1"),
                                (".storage_alignment", b"64"), ("byteorder", b"little")):
            writer.write_record(record, content, len(content))
        stored = []
        for number, (key, dtype, shape) in enumerate(specs):
            num_bytes = math.prod(shape) * dtype.itemsize
            writer.write_record_metadata(f"data/{number}", num_bytes)
            stored.append(Stored(name, key, dtype, tuple(shape), space.left_out[-1] if num_bytes else space.num_bytes))
        writer.write_end_of_file()
        return cls(name, tuple(stored), space.num_bytes, tuple((at, bytes(part)) for at, part in space.parts))

    def frame(self, crc32s: Mapping[str, int]) -> list[tuple[int, bytes]]:
        """``parts`` with the checksums, which torch.load does not compare, but zipfile and every unzip do."""
        filled = [(number, tensor) for number, tensor in enumerate(self.tensors) if tensor.num_bytes]
        parts = [(offset, bytearray(part)) for offset, part in self.parts]
        last_offset, last = parts[-1]
        # The last part ends with three records of 56, 20 and 22 bytes; the first says where the directory begins.
        at = struct.unpack_from("<Q", last, len(last) - 50)[0] - last_offset
        for (number, tensor), (_, part) in zip(filled, parts[1:], strict=True):
            # In the descriptor behind the data, and in the directory 30 bytes before the record's name.
            struct.pack_into("<I", part, 4, crc32s[tensor.name])
            at = last.index(f"archive/data/{number}".encode(), at)
            struct.pack_into("<I", last, at - 30, crc32s[tensor.name])
        return [(offset, bytes(part)) for offset, part in parts]


class _Space:
    """A file for torch's writer that keeps what is written and notes where tensors are left out."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytearray]] = [(0, bytearray())]
        self.left_out: list[int] = []
        self.num_bytes = 0

    def write(self, content: bytes) -> int:
        self.parts[-1][1].extend(content)
        self.num_bytes += len(content)
        return len(content)

    def seek(self, num_bytes: int, whence: int) -> int:
        assert whence == os.SEEK_CUR
        self.left_out.append(self.num_bytes)
        self.num_bytes += num_bytes
        self.parts.append((self.num_bytes, bytearray()))
        return self.num_bytes


class _Storage(tuple):
    """Pickled as a reference to the record that will hold the bytes."""


class _Tensor:
    """Pickled as torch.save pickles a contiguous tensor, without there being one."""

    def __init__(self, number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        # A new tuple: pickle writes one that other tensors share as a reference, which would move every offset.
        self._shape = tuple(list(shape))
        self._storage = _Storage(("storage", STORAGES[dtype], str(number), "cpu", math.prod(shape)))

    def __reduce__(self) -> tuple[Callable, tuple]:
        args = (self._storage, 0, self._shape, row_major(self._shape), False, OrderedDict())
        return _rebuild_tensor_v2, args


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return tuple(obj) if isinstance(obj, _Storage) else None


def _pickled(chunks: Mapping[str, Tensors]) -> bytes:
    """data.pkl, in protocol 2 as torch.save writes it, with the version that Megatron wants to see."""
    content: dict[str, Any] = {}
    number = 0
    for chunk, tensors in chunks.items():
        content[sys.intern(chunk)] = placed = {}
        for name, (dtype, shape) in tensors.items():
            placed[sys.intern(name)] = _Tensor(number, dtype, shape)
            number += 1
    buffer = BytesIO()
    _Pickler(buffer, protocol=2).dump(content | {"checkpoint_version": 3.0})
    return buffer.getvalue()
