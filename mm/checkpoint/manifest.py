"""``manifest.json``: a list of tensors with checksums, and metadata of a directory.

Conversions and training checkpoints both write one.  A checksum of the manifest itself reveals damage and edits.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from mm.checkpoint.safetensors import DTYPE_NAMES, DTYPES
from mm.config.parse import shown
from mm.errors import MAX_PROBLEMS, UserError
from mm.files import json_object
from mm.weights.views import Stored

Built = TypeVar("Built")

MANIFEST_FILE = "manifest.json"


def manifest_text(content: Mapping[str, Any], key: str, tensors: Sequence[Mapping[str, Any]]) -> str:
    """Readable JSON: ``content``, and under ``key`` one line for each of ``tensors``."""
    whole = {**content, key: tensors}
    text = json.dumps({"crc32": _crc32(whole), **content, key: []}, indent=1)
    lines = ",\n  ".join(json.dumps(tensor) for tensor in tensors)
    return f"{text.removesuffix('[]' + chr(10) + '}')}[\n  {lines}\n ]\n}}\n"


def read_manifest(folder: Path, format: str, version: int, advice: str) -> dict[str, Any]:
    """Read and verify the manifest in ``folder``, without format and version; ``advice`` ends the error messages."""
    path = folder / MANIFEST_FILE
    try:
        content = json_object(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); {advice}.") from error
    if content.pop("crc32", None) != _crc32(content):
        raise UserError(f"{path} is damaged (its crc32 differs); {advice}.")
    found = content.pop("format", None), content.pop("version", None)
    if found != (format, version):
        raise UserError(f"{path} is {found[0]!r} version {found[1]!r}; expected {format!r} version {version}.")
    return content


def read_head(folder: Path, key: str) -> dict[str, Any]:
    """The manifest in ``folder`` up to the list ``key``, most of a large file; so its checksum is not verified."""
    path, head = folder / MANIFEST_FILE, []
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if line.startswith(f' "{key}": ['):
                    break
                head.append(line)
            else:
                raise ValueError(f"it has no {key}")
        return json_object("".join(head).rstrip().removesuffix(",") + "}")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}).") from error


def tensor_json(stored: Stored) -> dict[str, Any]:
    """A tensor's entry in a manifest."""
    return {"file": stored.file, "name": stored.name, "dtype": DTYPE_NAMES[stored.dtype], "shape": stored.shape,
            "crc32": stored.crc32}


def stated_tensor(entry: Mapping[str, Any], name: str | None = None) -> Stored:
    """The tensor of an entry, which has ``name`` (default: the stated one) in its file, at an offset not stated."""
    return Stored(entry["file"], name or entry["name"], DTYPES[entry["dtype"]], tuple(entry["shape"]), 0,
                  entry["crc32"])


def validated(
    kind: type[Built], content: object, folder: Path, key: str = "",
    cure: str = "use the version that wrote it, or another checkpoint",
) -> Built:  # fmt: skip
    """``content`` as ``kind``: the value of ``key`` in the manifest in ``folder``, or all of it.

    Raises UserError with the path of each key whose value does not fit, and ``cure``.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise UserError(
            f"{folder / MANIFEST_FILE}: {'.'.join(map(str, (key, *one['loc'])[not key:]))} is "
            f"{shown(one['input'])} ({one['msg']}); {cure}." for one in error.errors()[:MAX_PROBLEMS]) from error


def _crc32(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
