"""The tensors of one file, safetensors or torch, from its headers alone."""

from pathlib import Path

from mm.checkpoint_files import DTYPES
from mm.hf_files import read_header
from mm.sharded.torch_zip import read_index
from mm.sharded.views import Stored

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_stored(path: Path, name: str) -> dict[str, Stored]:
    """The tensors of the file at ``path`` by name; ``name`` is what the result calls the file.

    Raises:
        UserError: the file is truncated, damaged, a Git-LFS pointer, or a pickle with code in it.
    """
    if path.suffix == ".pt":
        found = [
            Stored(name, f"{tensor.chunk}/{tensor.name}", tensor.dtype, tensor.shape, tensor.offset_bytes)
            for tensor in read_index(path).tensors
        ]
    else:
        found = [
            Stored(name, tensor.name, tensor.dtype, tensor.shape, tensor.offset)
            for tensor in read_header(path, DTYPES).values()
        ]
    return {stored.name: stored for stored in found}
