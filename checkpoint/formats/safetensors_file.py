"""Safetensors files to write, as byte ranges.

Format: 8 bytes little-endian header length, JSON header, data (https://huggingface.co/docs/safetensors).
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint.formats.files import DTYPE_NAMES, read_stored
from mm.weights.views import Stored

Description = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape."""


@dataclass(frozen=True)
class SafetensorsFile:
    """A file to write: a ``mm.weights.plan.TargetFile``."""

    name: str
    header: bytes
    """With its length in front."""
    tensors: tuple[Stored, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)

    def frame(self, crc32s: Mapping[str, int]) -> Iterable[tuple[int, bytes]]:
        return ((0, self.header),)

    @classmethod
    def new(cls, name: str, tensors: Iterable[Description]) -> "SafetensorsFile":
        """Lay ``tensors`` out one after the other, wider dtypes first, which keeps every tensor aligned."""
        ordered = sorted(tensors, key=lambda tensor: -tensor[1].itemsize)
        header, ends = {"__metadata__": {"format": "pt"}}, [0]
        for tensor_name, dtype, shape in ordered:
            ends.append(ends[-1] + math.prod(shape) * dtype.itemsize)
            header[tensor_name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": ends[-2:]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        stored = [Stored(name, *tensor, start + end) for tensor, end in zip(ordered, ends, strict=False)]
        return cls(name, len(text).to_bytes(8, "little") + text, tuple(stored))

    @classmethod
    def like(cls, path: Path) -> "SafetensorsFile":
        """A file with the very header of the one at ``path``."""
        stored = read_stored(path, path.name)
        with path.open("rb") as file:
            header_bytes = 8 + int.from_bytes(file.read(8), "little")
            file.seek(0)
            return cls(path.name, file.read(header_bytes), tuple(stored.values()))
