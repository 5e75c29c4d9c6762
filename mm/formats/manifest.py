"""``manifest.json``: a list of tensors with checksums, and metadata of a directory.

Conversions and training checkpoints both write one.  A checksum of the manifest itself reveals damage and edits.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Lt
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mm.config.model import ModelConfig
from mm.config.schema import STRICT, NaturalNumber, shown
from mm.errors import MAX_PROBLEMS, UserError, naming, refuse_special
from mm.files import json_object
from mm.formats.layout import Layout, check_layout
from mm.formats.safetensors import DTYPE_NAMES, DTYPES
from mm.weights.views import Stored

Built = TypeVar("Built")

MANIFEST_FILE = "manifest.json"

Natural = Annotated[NaturalNumber, Lt(2**63)]
Crc32 = Annotated[NaturalNumber, Lt(2**32)]


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


@dataclass(frozen=True, config=STRICT)
class TensorEntry:
    """A tensor's entry in a manifest."""

    file: str
    name: str
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
    shape: tuple[Natural, ...]
    crc32: Crc32

    def stored(self, name: str) -> Stored:
        """The tensor, which has this name in the file.  Its offset is 0: only the file itself has the offset."""
        return Stored(self.file, name, DTYPES[self.dtype], self.shape, 0, self.crc32)


def tensor_json(stored: Stored) -> dict[str, Any]:
    """The form of a ``TensorEntry`` in JSON."""
    return {
        "file": stored.file, "name": stored.name, "dtype": DTYPE_NAMES[stored.dtype], "shape": stored.shape,
        "crc32": stored.crc32,
    }  # fmt: skip


def validated(
    kind: type[Built], content: object, folder: Path, key: str = "",
    cure: str = "use the version that wrote it, or another checkpoint",
) -> Built:  # fmt: skip
    """``content`` as ``kind``: the value of ``key`` in the manifest in ``folder``, or all of it.

    Raises UserError with the path of each key whose value does not fit: a manifest may be damaged, from another
    version, or made to do harm.  ``cure`` ends the messages.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise UserError(f"{folder / MANIFEST_FILE}: {found}; {cure}." for found in _problems(error, key)) from error


def _problems(error: ValidationError, key: str) -> Iterator[str]:
    for one in error.errors()[:MAX_PROBLEMS]:
        place = ".".join(map(str, ((key,) if key else ()) + one["loc"])) or "it"
        match one["type"]:
            case "missing" | "missing_argument":
                yield f"{place} is missing"
            case "extra_forbidden" | "unexpected_keyword_argument":
                yield f"{place} is not known to this version"
            case _:
                yield f"{place} is {shown(one['input'])} ({one['msg']})"


def check_placed(model: ModelConfig, tp_size: int, folder: Path) -> None:
    """Raise UserError if the model in the manifest in ``folder`` cannot have the layout that it states."""
    with naming(str(folder)):
        check_layout(Layout.of(model, tp_size), model, MANIFEST_FILE)


def _crc32(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
