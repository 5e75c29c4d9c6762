"""Creates torch.save files whose tensors are filled in later, so that no model is held in memory.

torch.save itself writes everything except the tensors' data, which it is configured to skip.
"""

import os
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._utils import _rebuild_tensor_v2

from mm.errors import UserError
from mm.formats.torch_file import STORAGES
from mm.weights.plan import TargetFile
from mm.weights.views import Stored

_NUM_RECORDS_BEFORE = 4
"""torch.save's records before the tensors: data.pkl, .format_version, .storage_alignment and byteorder."""
Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape by name."""


@dataclass(frozen=True)
class TorchFile(TargetFile):
    """A torch.save file to write.

    It is byte-identical to torch.save's own, except for one record: ``.data/serialization_id``, a hash that torch
    computes from the checksums, which are not known yet.  Readers treat it as optional.
    """

    @classmethod
    def new(cls, name: str, chunks: Mapping[str, Tensors]) -> "TorchFile":
        """Lay out the tensors of ``chunks``: ``{"model": ...}``, or ``{"model0": ..., "model1": ...}``.

        The result depends only on the arguments, so that another process can complete the file.  Raises UserError for a
        dtype that torch saves differently.
        """
        specs = [(f"{chunk}/{key}", *spec) for chunk, tensors in chunks.items() for key, spec in tensors.items()]
        unknown = [f"{key} ({dtype})" for key, dtype, _ in specs if dtype not in STORAGES.values()]
        if unknown:
            known = ", ".join(map(str, dict.fromkeys(STORAGES.values())))
            raise UserError(f"The torch format cannot hold the dtype of {unknown[0]}; expected one of {known}.")
        # Interned: pickle writes a name shared by two chunks as a reference only if both are the same object.
        content = {sys.intern(chunk): {sys.intern(key): _Absent(*spec) for key, spec in tensors.items()}
                   for chunk, tensors in chunks.items()}
        space = _Space()
        with torch.serialization.skip_data():
            torch.save(content | {"checkpoint_version": 3.0}, cast(Any, space))  # Megatron expects the version
        starts = space.starts[_NUM_RECORDS_BEFORE:]
        stored = (Stored(name, key, dtype, tuple(shape), at)
                  for (key, dtype, shape), at in zip(specs, starts, strict=False))
        return cls(name, tuple(stored), space.num_bytes, tuple((at, bytes(piece)) for at, piece in space.pieces))

    def frame(self, crc32s: Mapping[str, int]) -> list[tuple[int, bytes]]:
        """``pieces`` with the checksums.  torch.load does not verify them, but zipfile and every unzip do."""
        filled = [(number, tensor) for number, tensor in enumerate(self.tensors) if tensor.num_bytes]
        pieces = [(offset, bytearray(piece)) for offset, piece in self.pieces]
        last_offset, last = pieces[-1]
        # The last piece ends with three records of 56, 20 and 22 bytes; the first has the offset of the directory.
        at = struct.unpack_from("<Q", last, len(last) - 50)[0] - last_offset
        for (number, tensor), (_, piece) in zip(filled, pieces[1:], strict=True):
            # In the descriptor after the data, and in the directory 30 bytes before the record's name.
            struct.pack_into("<I", piece, 4, crc32s[tensor.name])
            at = last.index(f"archive/data/{number}".encode(), at)
            struct.pack_into("<I", last, at - 30, crc32s[tensor.name])
        return [(offset, bytes(piece)) for offset, piece in pieces]


class _Space:
    """A file object for torch.save that keeps the written bytes, and records where each record's data begins."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytearray]] = [(0, bytearray())]
        self.starts: list[int] = []
        self.num_bytes = 0

    def write(self, content: bytes | memoryview) -> int:
        self.pieces[-1][1].extend(content)
        self.num_bytes += len(content)
        if content[:2] == b"FB":  # the padding field in a record's header, which aligns its data
            self.starts.append(self.num_bytes)
        return len(content)

    def seek(self, num_bytes: int, whence: int) -> int:
        assert whence == os.SEEK_CUR  # skips a tensor
        self.num_bytes += num_bytes
        self.pieces.append((self.num_bytes, bytearray()))
        return self.num_bytes

    def flush(self) -> None:
        """Do nothing; torch.save requires the method."""


class _Absent:
    """A stand-in that is pickled as a contiguous CPU tensor, but takes no memory.

    torch saves its fake tensors in the same way, but these cost 2.5 seconds and 70 MiB at first use.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._tensor = torch.empty(shape, dtype=dtype, device="meta")

    def __reduce__(self) -> tuple[Callable, tuple]:
        tensor, storage = self._tensor, self._tensor._typed_storage()
        storage._fake_device = cast(Any, "cpu")  # one string object, so pickle writes it once, as for real tensors
        return _rebuild_tensor_v2, (storage, 0, tuple(tensor.shape), tensor.stride(), False, OrderedDict())
