"""Finds config.json and the safetensors files of a Hugging Face directory, and makes sure that they are whole.

Of the weights only the headers are read.  Knows nothing of what tensors mean, up to the two spellings of their names.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from checkpoint.formats.hf_compare import MODEL_TYPE
from checkpoint.formats.spelling import published_name
from mm.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_LFS_MAGIC = b"version https://git-lfs"
"""First bytes of a Git-LFS pointer: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md"""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HEADER_LIMIT_BYTES = 100_000_000
"""The safetensors library refuses longer headers."""


@dataclass(frozen=True)
class HFTensor:
    """One tensor on disk."""

    name: str
    """As spelled in its file."""
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""

    def read(self, dim: int, ranges: Iterable[range]) -> Tensor:
        """The joined ``ranges`` along ``dim``, in memory of their own; the rest is not read."""
        with safe_open(self.file, framework="pt") as opened:
            stored = opened.get_slice(self.name)
            lead = (slice(None),) * dim
            return torch.cat([stored[(*lead, slice(part.start, part.stop))] for part in ranges], dim=dim)


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a Qwen2.5-VL directory; a ``UserError`` when it is absent, broken or another's."""
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a Hugging Face model directory with its config.json.")
    raw = path.read_bytes()
    _refuse_lfs_pointer(path, raw)
    config = _parsed(path, raw)
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type != MODEL_TYPE:
        raise UserError(
            f"{path} has model_type {model_type!r}; expected {MODEL_TYPE!r}. Give the directory of a Qwen2.5-VL model."
        )
    if "quantization_config" in config:
        raise UserError(
            f"{path} has a quantization_config: quantized weights can be neither trained nor converted; give the "
            f"directory of the unquantized model."
        )
    return config


def dtype_name(config: Mapping[str, Any]) -> str | None:
    """The dtype of the weights that the config states, such as "bfloat16": ``dtype``, or ``torch_dtype`` before v5."""
    return config.get("dtype") or config.get("torch_dtype")


def with_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The config with every statement of the weights' dtype replaced; one is added when there is none."""

    def replaced(section: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: name if key in ("dtype", "torch_dtype") else replaced(value) if isinstance(value, dict) else value
            for key, value in section.items()
        }

    patched = replaced(config)
    return patched if dtype_name(patched) else {**patched, "torch_dtype": name}


def is_model_weights(name: str) -> bool:
    """Whether a file of this name holds, or lists, weights of a model (and not of an adapter)."""
    is_safetensors = name.endswith((".safetensors", ".safetensors.index.json"))
    return is_safetensors and not name.startswith("adapter_")


def find_shards(directory: Path, files: list[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """The parsed index (None for a single file) and the names of the shard files, all of which exist."""
    has_index, has_single = INDEX_FILE in files, SINGLE_FILE in files
    if has_index and has_single:
        raise UserError(f"{directory} holds both {INDEX_FILE} and {SINGLE_FILE}; remove the one that is out of date.")
    if has_single:
        return None, [SINGLE_FILE]
    if not has_index:
        raise UserError(_no_weights(directory, files))
    index = _read_index(directory / INDEX_FILE)
    shards = list(dict.fromkeys(index["weight_map"].values()))
    outside = [name for name in shards if Path(name).name != name]
    if outside:
        raise UserError(f"{directory / INDEX_FILE} names {outside[0]!r}; expected plain file names beside it.")
    missing = [name for name in shards if name not in files]
    if missing:
        raise UserError(
            f"{directory} lacks {len(missing)} of the {len(shards)} shards that {INDEX_FILE} lists: "
            f"{', '.join(missing)}. The download was probably interrupted; finish it."
        )
    return index, shards


def _no_weights(directory: Path, files: list[str]) -> str:
    pickled = [name for name in files if name.endswith(".bin")]
    shards = [name for name in files if is_model_weights(name)]
    if shards:
        return (
            f"{directory} holds {', '.join(shards)} but no {INDEX_FILE}; the download was probably interrupted. "
            f"Finish it, or rename a single complete file to {SINGLE_FILE}."
        )
    if pickled:
        return (
            f"{directory} holds its weights only as {pickled[0]}, a pickle, which is not read because it can run "
            f"code; convert it with transformers: from_pretrained, then save_pretrained, which writes "
            f"{SINGLE_FILE}."
        )
    return f"{directory} holds no weights; expected {SINGLE_FILE} or {INDEX_FILE} with its shards."


def _read_index(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    _refuse_lfs_pointer(path, raw)
    index = _parsed(path, raw)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path} has no 'weight_map' from tensor names to shard files; download it again.")
    return index


def read_tensors(directory: Path, index: Mapping[str, Any] | None, shards: list[str]) -> dict[str, HFTensor]:
    """All tensors of the shards by published name, in the order of the files; index and headers must agree."""
    tensors: dict[str, HFTensor] = {}
    for shard in shards:
        found = read_header(directory / shard)
        if index is not None:
            listed = {name for name, file in index["weight_map"].items() if file == shard}
            _match_index(directory, shard, listed, found.keys())
        for tensor in found.values():
            twin = tensors.setdefault(published_name(tensor.name), tensor)
            if twin is not tensor:
                raise UserError(
                    f"{tensor.file} holds {tensor.name} and {twin.file} holds {twin.name}: the same weight twice. "
                    f"Remove one of them."
                )
    return tensors


def _match_index(directory: Path, shard: str, listed: Iterable[str], found: Iterable[str]) -> None:
    absent, extra = sorted(set(listed) - set(found)), sorted(set(found) - set(listed))
    problems = []
    if absent:
        problems.append(
            f"{directory / INDEX_FILE} says that {shard} holds {_some(absent)}, which it does not; download both again."
        )
    if extra:
        problems.append(
            f"{directory / shard} holds {_some(extra)}, not listed for it in {INDEX_FILE}; download both again."
        )
    if problems:
        raise UserError(problems)


def _some(names: list[str], shown: int = 5) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def read_header(path: Path, dtypes: Mapping[str, torch.dtype] = _DTYPES) -> dict[str, HFTensor]:
    """The tensors of one safetensors file, which may have ``dtypes``.

    Format: 8 bytes little-endian header length, JSON header, data.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS_MAGIC))
        _refuse_lfs_pointer(path, start)
        header_bytes = int.from_bytes(start[:8], "little")
        if size_bytes < 8 or header_bytes > min(size_bytes - 8, _HEADER_LIMIT_BYTES):
            raise UserError(f"{path} ({size_bytes} bytes) is truncated or not a safetensors file; download it again.")
        file.seek(8)
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError as error:
            raise UserError(f"{path} has a damaged safetensors header ({error}); download it again.") from error
    if not isinstance(header, dict):
        raise UserError(f"{path} has a damaged safetensors header (not a table of tensors); download it again.")
    header.pop("__metadata__", None)
    end = 8 + header_bytes + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size_bytes != end:
        raise UserError(f"{path} has {size_bytes} bytes, but its header describes {end}; download it again.")
    return {name: _described(path, name, entry, 8 + header_bytes, dtypes) for name, entry in header.items()}


def _described(
    path: Path, name: str, entry: Mapping[str, Any], data_start: int, dtypes: Mapping[str, torch.dtype]
) -> HFTensor:
    if entry["dtype"] not in dtypes:
        raise UserError(
            f"{path}: {name} has dtype {entry['dtype']}; expected one of {', '.join(dtypes)}. Quantized "
            f"weights are not supported: give the unquantized model."
        )
    tensor = HFTensor(
        name, path, dtypes[entry["dtype"]], tuple(entry["shape"]), data_start + entry["data_offsets"][0]
    )
    num_bytes = entry["data_offsets"][1] - entry["data_offsets"][0]
    if num_bytes != math.prod(tensor.shape) * tensor.dtype.itemsize:
        raise UserError(
            f"{path}: {name} has {num_bytes} bytes, which is not {list(tensor.shape)} of {entry['dtype']}; download "
            f"it again."
        )
    return tensor


def _parsed(path: Path, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); download it again.") from error


def _refuse_lfs_pointer(path: Path, start: bytes) -> None:
    if start.startswith(_LFS_MAGIC):
        raise UserError(f"{path} is a Git-LFS pointer, not the file itself; run 'git lfs pull' in {path.parent}.")
