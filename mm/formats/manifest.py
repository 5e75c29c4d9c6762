"""``manifest.json``: a list of tensors with checksums, and metadata of a directory.

Conversions and training checkpoints both write one.  A checksum of the manifest itself reveals damage and edits.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from mm.config.model import ModelConfig
from mm.config.patterns import long_patterns
from mm.errors import UserError, naming, refuse, refuse_special
from mm.files import json_object
from mm.formats.layout import Layout, check_layout
from mm.formats.safetensors import DTYPE_NAMES, DTYPES
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
    """Read the manifest in ``folder``, without its format and version; ``advice`` ends the error messages.

    Raises UserError if it is missing, damaged, or of another format or version.
    """
    path = folder / MANIFEST_FILE
    refuse_special(path)
    try:
        content = json_object(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); {advice}.") from error
    crc32 = content.pop("crc32", None)
    if crc32 is None or crc32 != _crc32(content):
        raise UserError(f"{path} is damaged (its crc32 differs); {advice}.")
    found = content.pop("format", None), content.pop("version", None)
    if found != (format, version):
        raise UserError(f"{path} is {found[0]!r} version {found[1]!r}; expected {format!r} version {version}.")
    return content


def read_head(folder: Path, key: str) -> dict[str, Any]:
    """Read the manifest in ``folder`` up to the list ``key``, which is most of a large file.

    The checksum covers the whole file, so it is not verified.  Raises UserError if the file cannot be read.
    """
    path, head = folder / MANIFEST_FILE, []
    refuse_special(path)
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
    return {
        "file": stored.file, "name": stored.name, "dtype": DTYPE_NAMES[stored.dtype], "shape": stored.shape,
        "crc32": stored.crc32,
    }  # fmt: skip


def tensor_from_json(entry: Any, folder: Path) -> Stored:
    """A tensor from its entry in the manifest in ``folder``.  Its offset is 0: only the file itself has the offset.

    Raises UserError for an entry that ``tensor_json`` does not write.
    """
    with suppress(KeyError, TypeError):
        numbers = [*entry["shape"], entry["crc32"]]
        are_whole = isinstance(entry["shape"], list) and all(type(one) is int and one >= 0 for one in numbers)
        if are_whole and isinstance(entry["file"], str) and isinstance(entry["name"], str):
            return Stored(
                entry["file"], entry["name"], DTYPES[entry["dtype"]], tuple(entry["shape"]), 0, entry["crc32"])
    raise UserError(f"{folder / MANIFEST_FILE} has a damaged entry of a tensor: {str(entry)[:200]}; expected file, "
                    f"name, dtype, shape and crc32.")


def built_from_json(kind: type[Built], content: object, what: str) -> Built:
    """``what``, a part of a manifest, as the dataclass ``kind``, whose ``asdict`` it is.

    Raises UserError for unknown names and wrong types: a manifest may be from another version, or made to do harm.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise UserError(f"{MANIFEST_FILE} has {what} of another version ({_first(error)}); use the version that wrote "
                        f"it, or another checkpoint.") from error


def _first(error: ValidationError) -> str:
    """The first problem, on one line."""
    found = error.errors()[0]
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"


def placed_model(content: object, tp_size: object, folder: Path) -> ModelConfig:
    """The model in the manifest in ``folder``, from its ``asdict`` in JSON, on a layout with this tensor-parallel size.

    Raises UserError for unknown fields, invalid values, and a layout that the model cannot have.
    """
    with naming(str(folder)):
        model = built_from_json(ModelConfig, content, "a model")
        refuse(long_patterns(model, MANIFEST_FILE))
        if type(tp_size) is not int:
            raise UserError(f"{MANIFEST_FILE}: tp_size is {str(tp_size)[:80]}; expected an integer.")
        check_layout(Layout.of(model, tp_size), model, MANIFEST_FILE)
    return model


def _crc32(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
