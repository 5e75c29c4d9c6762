"""The tensors of one file, safetensors or torch, from its headers alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpoint.formats.hf_files import read_header
from checkpoint.formats.torch_file import read_torch_file
from checkpoint.formats.training import DTYPES
from mm.weights.views import Stored

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredFile:
    """What one file holds."""

    chunk_keys: tuple[str, ...]
    """``model``, or ``model0``, ``model1``... with virtual chunks; also those without tensors."""
    tensors: Mapping[str, Stored]
    """By name."""


def read_file(path: Path, name: str) -> StoredFile:
    """What the file at ``path`` holds; ``name`` is what the result calls it.

    Raises:
        UserError: the file is truncated, damaged, a Git-LFS pointer, or a pickle with code in it.
    """
    if path.suffix == ".pt":
        return StoredFile(*read_torch_file(path, name))
    tensors = read_header(path, DTYPES).values()
    found = [Stored(name, tensor.name, tensor.dtype, tensor.shape, tensor.offset) for tensor in tensors]
    return StoredFile((path.stem,), {stored.name: stored for stored in found})


def read_stored(path: Path, name: str) -> Mapping[str, Stored]:
    """The tensors of ``read_file``."""
    return read_file(path, name).tensors
