"""Locates the tensors in ``model_optim_rng.pt``, the torch.save file of Megatron and MindSpeed-MM.

The file is a zip archive of uncompressed records: ``data.pkl`` (the pickled dictionary, whose tensors refer to storages
by number) and ``data/<number>`` (the bytes of one storage).  Headers and pickle give the byte range of each tensor; no
tensor is read and no code of the pickle is run.

``torch.load(weights_only=True)`` is not used: it calls classes of torch and Python with arguments from the file (30
bytes can make it allocate 8 GB), and rejects some objects that Megatron saves beside the model, such as a deque.
"""

import os
import re
import struct
import zipfile
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import torch

from mm.errors import UserError, refuse, refuse_special
from mm.formats.inert_pickle import CodeInPickle, Opaque, global_name, load
from mm.formats.safetensors import refuse_lfs_pointer
from mm.weights.views import Stored

_MAX_PICKLE_BYTES = 1 << 28
"""A few hundred bytes per tensor are normal; the limit protects against hostile files."""
_LOCAL_HEADER = struct.Struct("<IHHHHHIIIHH")
_LOCAL_SIGNATURE = 0x04034B50

_LEGACY_TORCH_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""``torch.serialization.MAGIC_NUMBER`` pickled: the first bytes of torch.save's files before torch 1.6."""

STORAGES = {
    "torch.BFloat16Storage": torch.bfloat16, "torch.HalfStorage": torch.float16, "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64, "torch.ByteStorage": torch.uint8, "torch.CharStorage": torch.int8,
    "torch.ShortStorage": torch.int16, "torch.IntStorage": torch.int32, "torch.LongStorage": torch.int64,
    "torch.BoolStorage": torch.bool, "torch.storage.UntypedStorage": torch.uint8,
}  # fmt: skip
"""Dtypes of storage classes, by the class names in pickles; all other dtypes use the last one."""
_DTYPE_OF_NAME = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

_REBUILD_V2 = "torch._utils._rebuild_tensor_v2"
_REBUILD_V3 = "torch._utils._rebuild_tensor_v3"
_REBUILD_NPU = "torch_npu.utils.storage._rebuild_npu_tensor"
"""torch_npu moves the tensor to the CPU, which makes it row-major, before writing it."""
_REBUILD_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_REBUILD_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_EXTRA_STATE = "_extra_state"
"""Suffix of the names of modules' ``get_extra_state`` values."""


class _Unusable(Exception):
    """A tensor is not a byte range of the file; the message continues a sentence that starts with the tensor's name."""


def read_torch_file(path: Path, name: str) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """The tensors of a file by ``CHUNK/NAME``, and its chunks: ``model``, or ``model0``, ``model1``...

    ``name`` is the file name that the tensors record.  Tensors are row-major and little-endian; those that share a
    storage (tied weights) have overlapping ranges.  A chunk may have no tensors.  Raises UserError if the file is not a
    complete, plain torch.save file: another format, truncated, code in the pickle, tensors that are not contiguous.
    """
    content, records = _read(path)
    chunks = {key: value for key, value in content.items() if re.fullmatch(r"model\d{0,4}", key)}
    if not chunks:
        raise UserError(
            f"{path} has the keys {sorted(content)}; expected 'model', or 'model0', 'model1', ... as Megatron writes. "
            f"Is it an optimizer file? Give the model_optim_rng.pt beside it."
        )
    tensors, problems = {}, []
    for chunk, entries in chunks.items():
        if not isinstance(entries, dict) or not all(isinstance(key, str) for key in entries):
            problems.append(f"{path}: {chunk} is a {_kind(entries)}; expected a dictionary of named tensors.")
            continue
        for key, value in entries.items():
            try:
                stored = None if _is_no_tensor(key, value) else _locate(name, f"{chunk}/{key}", value, records)
            except _Unusable as why:
                problems.append(f"{path}: {chunk}/{key} {why}")
                continue
            if stored is not None and (stored.num_bytes or not key.endswith(_EXTRA_STATE)):
                tensors[stored.name] = stored
    refuse(problems)
    return tensors, tuple(chunks)


def read_consumed_samples(path: Path) -> int | None:
    """Samples that the training had consumed, from the file's ``args``; None if they do not say."""
    state = getattr(_read(path)[0].get("args"), "state", None)
    found = state.get("consumed_train_samples") if isinstance(state, dict) else None
    return found if type(found) is int else None


def _read(path: Path) -> tuple[dict[str, Any], Mapping[str, range]]:
    """The pickled dictionary, with placeholders for objects, and the byte ranges of the records."""
    _refuse_other_formats(path)
    with path.open("rb") as file:
        try:
            archive = zipfile.ZipFile(file)
        except Exception as error:  # zipfile raises many kinds on damaged files
            raise UserError(
                f"{path} starts like a file of torch.save but its zip directory cannot be read ({error}); it is "
                f"probably truncated. Copy or download it again."
            ) from error
        records, pickled = _read_directory(path, file, archive)
        content = _read_pickle(path, archive, pickled)
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{path} holds a {_kind(content)}; expected a dictionary with the key 'model' or 'model0'.")
    return content, records


def _refuse_other_formats(path: Path) -> None:
    """Raise UserError unless the first bytes are those of a zip archive."""
    refuse_special(path)
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; expected a model_optim_rng.pt.") from error
    if start.startswith(b"PK\x03\x04"):
        return
    refuse_lfs_pointer(path, start)
    if start.startswith(_LEGACY_TORCH_MAGIC):
        raise UserError(
            f"{path} is in torch's format from before version 1.6; load it with torch.load(..., weights_only=True) and "
            f"save it again with torch.save, which writes the zip format."
        )
    what = f"starts with {start[:8]!r}" if start else "is empty"
    raise UserError(f"{path} {what}; expected a file of torch.save, which starts with b'PK\\x03\\x04'.")


def _read_directory(
    path: Path, file: BinaryIO, archive: zipfile.ZipFile
) -> tuple[dict[str, range], zipfile.ZipInfo]:
    """The byte range of each record, by name without the archive's folder, and the record of the pickle."""
    infos, data_end = archive.infolist(), archive.start_dir
    pickled = next((info for info in infos if re.fullmatch(r"[^/]*/data\.pkl", info.filename)), None)
    if pickled is None:
        raise UserError(f"{path} is a zip archive without <name>/data.pkl; expected a file of torch.save.")
    folder, records = pickled.filename.removesuffix("data.pkl"), {}
    for info in infos:
        name, offset = info.filename.removeprefix(folder), _data_offset(path, file, info, data_end)
        if info.compress_type or info.flag_bits & 1:
            raise UserError(f"{path}: the record {name} is compressed or encrypted; torch.save writes neither.")
        if name in records or offset + info.file_size > data_end:
            raise UserError(f"{path}: the record {name} occurs twice or ends beyond the data; the file is damaged.")
        records[name] = range(offset, offset + info.file_size)
    order = records.get("byteorder")  # absent before torch 2.1
    if order is not None and (found := os.pread(file.fileno(), len(order[:16]), order.start)) != b"little":
        raise UserError(f"{path} has the byte order {found!r}; expected b'little'. Save it again on another machine.")
    return records, pickled


def _data_offset(path: Path, file: BinaryIO, info: zipfile.ZipInfo, data_end: int) -> int:
    """Where a record's data begins.  Only the record itself has the length of its header."""
    is_inside = 0 <= info.header_offset < data_end
    header = os.pread(file.fileno(), _LOCAL_HEADER.size, info.header_offset) if is_inside else b""
    if len(header) < _LOCAL_HEADER.size or _LOCAL_HEADER.unpack(header)[0] != _LOCAL_SIGNATURE:
        raise UserError(f"{path}: the zip directory has a wrong offset for {info.filename}; the file is damaged.")
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)[-2:]
    return info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes


def _read_pickle(path: Path, archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> Any:
    """The content of data.pkl, with placeholders for everything but plain values; zipfile verifies its checksum."""
    if record.file_size > _MAX_PICKLE_BYTES:
        raise UserError(f"{path}: data.pkl has {record.file_size} bytes; expected at most {_MAX_PICKLE_BYTES}.")
    try:
        return load(archive.read(record))
    except CodeInPickle as error:
        raise UserError(
            f"{path}: its pickle refers to {error}, which no checkpoint needs and which can run code. Nothing was "
            f"executed. Do not load this file with other tools; get the checkpoint again from a source you trust."
        ) from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise UserError(f"{path}: data.pkl is damaged ({type(error).__name__}: {error}); copy the file "
                        f"again.") from error


def _is_no_tensor(name: str, value: Any) -> bool:
    """Whether this is the extra state of a module with weights: None, or a buffer of FP8 scales."""
    return name.endswith(_EXTRA_STATE) and (value is None or global_name(value) in ("_io.BytesIO", "io.BytesIO"))


def _locate(file: str, name: str, value: Any, records: Mapping[str, range]) -> Stored:
    """The byte range of one tensor, from the arguments of torch's rebuild function."""
    function, args = _rebuild_call(value)
    _require(len(args) >= (7 if function == _REBUILD_V3 else 6), f"is a {_kind(value)}; expected a tensor.")
    storage, start, shape, stride = args[:4]
    sizes_ok = all(isinstance(sizes, tuple) and all(map(_is_size, sizes)) for sizes in (shape, stride))
    _require(sizes_ok and _is_size(start) and len(shape) == len(stride), "has no valid shape; the file is damaged.")
    dtype, record = _storage(storage, records)
    metadata = args[{_REBUILD_V2: 6, _REBUILD_V3: 7}.get(function, len(args)) :]
    _require(not any(metadata), f"is a conjugate or negative view ({metadata[:1]}); save it after .contiguous().")
    if function == _REBUILD_V3:
        dtype = _DTYPE_OF_NAME.get(global_name(args[6]))
        if dtype is None:
            raise _Unusable(f"has the unknown dtype {_kind(args[6])}.")
    # Strides of a contiguous tensor; as in torch, an empty dimension counts as size 1.
    expected = tuple(accumulate((max(size, 1) for size in shape[:0:-1]), int.__mul__, initial=1))[::-1][: len(shape)]
    contiguous = 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, stride, expected, strict=True))
    _require(contiguous, f"has the strides {stride} for the shape {shape}; expected {expected}: save it .contiguous().")
    start_bytes = start * dtype.itemsize
    stored = Stored(file, name, dtype, shape, record.start + start_bytes)
    _require(
        stored.offset + stored.num_bytes <= record.stop,
        f"needs {stored.num_bytes} bytes from {start_bytes} of a storage with {len(record)}; the file is damaged.",
    )
    return stored


def _rebuild_call(value: Any) -> tuple[str, tuple]:
    """The function that rebuilds a tensor, and its arguments; parameters and subclasses are unwrapped."""
    while isinstance(value, Opaque):
        function, args = value.global_name, value.args
        if function in (_REBUILD_V2, _REBUILD_V3, _REBUILD_NPU):
            return function, args
        if function in _REBUILD_PARAMETER and args:
            value = args[0]
        elif function == _REBUILD_FROM_TYPE and len(args) > 2 and _is_class(args[0]) and isinstance(args[2], tuple):
            value = args[0](*args[2])
        else:
            break
    return "", ()


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Opaque)


def _storage(described: Any, records: Mapping[str, range]) -> tuple[torch.dtype, range]:
    """dtype and record of a storage."""
    _require(isinstance(described, tuple) and len(described) == 5, "has no storage.")
    _, kind, key, _, num_elements = described
    dtype, record = STORAGES.get(global_name(kind)), records.get(f"data/{key}")
    if dtype is None:
        raise _Unusable(f"has a storage of the unknown kind {_kind(kind)}.")
    if record is None:
        raise _Unusable(f"lies in the record data/{key}, which the file lacks; it is damaged.")
    _require(
        type(num_elements) is int and num_elements * dtype.itemsize == len(record),
        f"lies in the record data/{key} of {len(record)} bytes; expected {num_elements} x {dtype.itemsize}.",
    )
    return dtype, record


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise _Unusable(why)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _kind(value: Any) -> str:
    return global_name(value) or type(value).__name__
