"""``manifest.json``: a list of tensors with checksums, and whatever else a directory states about itself.

Conversions and training checkpoints both keep one.  A checksum of the whole shows damage and edits.
"""

import dataclasses
import json
import types
import typing
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mm.config.model import ModelConfig
from mm.errors import UserError

MANIFEST_FILE = "manifest.json"


def manifest_text(content: Mapping[str, Any], key: str, tensors: Sequence[Mapping[str, Any]]) -> str:
    """JSON to be looked at: ``content``, and under ``key`` one line for each of ``tensors``."""
    whole = {**content, key: tensors}
    text = json.dumps({"crc32": _crc32(whole), **content, key: []}, indent=1)
    lines = ",\n  ".join(json.dumps(tensor) for tensor in tensors)
    return f"{text.removesuffix('[]' + chr(10) + '}')}[\n  {lines}\n ]\n}}\n"


def read_manifest(folder: Path, format: str, version: int, mend: str) -> dict[str, Any]:
    """What the manifest in ``folder`` states, without its format and version; ``mend`` ends the messages.

    Raises:
        UserError: it is missing, damaged, or of another format or version.
    """
    path = folder / MANIFEST_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); {mend}.") from error
    crc32 = content.pop("crc32", None) if isinstance(content, dict) else None
    if crc32 is None or crc32 != _crc32(content):
        raise UserError(f"{path} is damaged (its crc32 differs); {mend}.")
    found = content.pop("format"), content.pop("version")
    if found != (format, version):
        raise UserError(f"{path} is {found[0]!r} version {found[1]!r}; expected {format!r} version {version}.")
    return content


def model_from_json(content: Mapping[str, Any]) -> ModelConfig:
    """A ``ModelConfig`` from its ``asdict`` in JSON.

    Raises:
        UserError: it has other fields than ours.
    """
    try:
        return _built(ModelConfig, content)
    except TypeError as error:
        raise UserError(f"{MANIFEST_FILE} describes a model of another version ({error}); use the version that wrote "
                        f"it.") from error


def _crc32(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _built(kind: Any, value: Any) -> Any:
    """A dataclass of ``kind`` from its ``asdict`` in JSON, where tuples have become lists."""
    if isinstance(kind, types.UnionType):
        return value
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{key: _built(hints.get(key), item) for key, item in value.items()})
    return tuple(_built(None, item) for item in value) if isinstance(value, list | tuple) else value
