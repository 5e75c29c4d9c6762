"""``model_optim_rng.pt``, Megatron's and MindSpeed-MM's torch.save file: where its tensors lie, and how to lay one out.

torch's unpickler for untrusted files (``weights_only``) reads it under a fake tensor mode, which gives offsets and no
data.  Unknown classes become inert stand-ins, so no code of a file runs.  torch.save itself writes all but the data.
"""

import os
import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch._utils import _rebuild_tensor_v2
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from mm.errors import UserError, refuse
from mm.weights.views import Stored, TargetFile

_EXTRA_STATE = "_extra_state"
"""Suffix of the names of modules' ``get_extra_state`` values: None, a buffer of FP8 scales, or an empty tensor."""


def read_torch_file(path: Path, name: str) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """The tensors of a file by ``CHUNK/NAME``, and its chunks: ``model``, or ``model0``, ``model1``...

    ``name`` is the file name that the tensors record.  Tensors that share a storage (tied weights) overlap.
    """
    content = _load(path)
    chunks = {key: value for key, value in content.items() if re.fullmatch(r"model\d{0,4}", key)}
    if not chunks:
        raise UserError(f"{path} has the keys {sorted(content)}; expected 'model', or 'model0', 'model1', ...; "
                        f"give the model_optim_rng.pt that Megatron writes.")
    tensors, problems = {}, []
    size_bytes = path.stat().st_size
    for chunk, entries in chunks.items():
        if not isinstance(entries, dict):
            problems.append(f"{path}: {chunk} is a {type(entries).__name__}; expected a dictionary of named tensors.")
            continue
        for key, value in entries.items():
            if key.endswith(_EXTRA_STATE) and not (isinstance(value, torch.Tensor) and value.numel()):
                continue
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                problems.append(f"{path}: {chunk}/{key} is a {type(value).__name__}; expected a dense tensor.")
            elif not value.is_contiguous() or value.is_conj() or value.is_neg():
                problems.append(f"{path}: {chunk}/{key} has the strides {tuple(value.stride())} for the shape "
                                f"{tuple(value.shape)}; save it .contiguous().")
            else:
                start = cast(Any, value.untyped_storage())._checkpoint_offset + value.storage_offset() * value.itemsize
                if start + value.nbytes > size_bytes:
                    problems.append(f"{path}: {chunk}/{key} lies beyond the end of the file, which is damaged.")
                tensors[f"{chunk}/{key}"] = Stored(name, f"{chunk}/{key}", value.dtype, tuple(value.shape), start)
    refuse(problems)
    return tensors, tuple(chunks)


def read_consumed_samples(path: Path) -> int | None:
    """Samples that the training had consumed, from the file's ``args``; None if they do not say."""
    found = getattr(_load(path).get("args"), "consumed_train_samples", None)
    return found if type(found) is int else None


class _StandIn:
    """An object of a class that ``weights_only`` does not know: nothing but its attributes."""

    def __new__(cls, *_: Any) -> "_StandIn":
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        """Accept the arguments of any class."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


def _stand_in(name: str) -> Callable:
    """What a file gets for the global ``name``."""
    match name:
        case "collections.deque":
            return lambda *_: []  # which the unpickler appends to
        case "collections.defaultdict":
            return lambda *_: {}
        case "torch_npu.utils.storage._rebuild_npu_tensor":  # torch_npu makes a tensor row-major before writing it
            return lambda *args: _rebuild_tensor_v2(*args[:6])
    return type(name.rpartition(".")[2], (_StandIn,), {})


def _load(path: Path) -> dict[str, Any]:
    """The file's dictionary; its tensors have no data, but know where it lies."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes 2 s, and few directories hold torch files

    try:
        stand_ins: list[Any] = [(_stand_in(name), name) for name in get_unsafe_globals_in_checkpoint(path)]
        with FakeTensorMode(), safe_globals(stand_ins):
            content = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file can fail in any way
        reason = re.sub(r"(?s).*WeightsUnpickler error: |\n.*", "", str(error).strip())
        raise UserError(f"{path} cannot be read by torch.load(..., weights_only=True): {reason}. If it is truncated, "
                        f"copy or download it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; expected a dictionary with the key 'model'.")
    return content


# Writing

_NUM_RECORDS_BEFORE = 4
"""torch.save's records before the tensors: data.pkl, .format_version, .storage_alignment and byteorder."""
Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape by name."""


@dataclass(frozen=True)
class TorchFile(TargetFile):
    """A torch.save file to write.

    Byte-identical to torch.save's own, except for ``.data/serialization_id``, a hash of the checksums, which are not
    known yet.  Readers treat it as optional.
    """

    @classmethod
    def new(cls, name: str, chunks: Mapping[str, Tensors]) -> "TorchFile":
        """Lay out the tensors of ``chunks``: ``{"model": ...}``, or ``{"model0": ..., "model1": ...}``."""
        specs = [(f"{chunk}/{key}", *spec) for chunk, tensors in chunks.items() for key, spec in tensors.items()]
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
