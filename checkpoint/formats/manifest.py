"""``manifest.json`` at the top of a converted directory: its layout, where it came from, and a checksum per tensor.

Knows nothing of how the files are written or read.
"""

import dataclasses
import json
import types
import typing
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.formats.layout import Layout
from checkpoint.formats.slots import Format, Kind
from checkpoint.formats.structure import Structure
from checkpoint.formats.training import MANIFEST_FILE
from mm.config.model import ModelConfig
from mm.errors import UserError

FORMAT, VERSION = "mm weights", 2
TOOL = "mm-convert 0.1.0"
_CONVERT_AGAIN = "convert the source again"


@dataclass(frozen=True)
class Entry:
    """One stored tensor."""

    file: str
    """Relative to the directory of the manifest."""
    name: str
    """As ``mm.weights.views.Stored`` has it."""
    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]
    crc32: int
    """Of its bytes."""


@dataclass(frozen=True)
class Manifest:
    """What a converted directory holds."""

    tool: str
    model: ModelConfig
    """With the pipeline lists of the directory."""
    tp_size: int
    kind: Kind
    source: Mapping[str, Any]
    """"kind" and "fingerprint" of what was converted; for people and for telling two sources apart."""
    tensors: tuple[Entry, ...]

    @property
    def layout(self) -> Layout:
        return Layout.of(self.model, self.tp_size)


def manifest_text(manifest: Manifest) -> str:
    """JSON to be looked at: one line for every tensor."""
    content = _content(manifest)
    entries = ",\n  ".join(json.dumps(entry) for entry in content["tensors"])
    text = json.dumps({"crc32": _crc32(content), **content, "tensors": []}, indent=1)
    return f"{text.removesuffix('[]' + chr(10) + '}')}[\n  {entries}\n ]\n}}\n"


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of ``directory``; None when it has none.

    Raises:
        UserError: it is damaged or of another format or version.
    """
    path = directory / MANIFEST_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}); {_CONVERT_AGAIN}.") from error
    crc32 = content.pop("crc32", None) if isinstance(content, dict) else None
    if crc32 is None or crc32 != _crc32(content):
        raise UserError(f"{path} is damaged (its crc32 differs); {_CONVERT_AGAIN}.")
    kind = content.get("format"), content.get("version")
    if kind != (FORMAT, VERSION):
        raise UserError(f"{path} is {kind[0]!r} version {kind[1]!r}; expected {FORMAT!r} version {VERSION}.")
    layout, model = content["layout"], content["model"]
    for tower, key in (("vision", "vit_pp_layers"), ("language", "llm_pp_layers")):
        model[tower]["pipeline_num_layers"] = layout[key]
    entries = tuple(Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in content["tensors"])
    kept = Kind(Format(content["save_format"]), Structure(content["structure"]), content["vit_only"])
    return Manifest(content["tool"], model_from_json(model), layout["tp_size"], kept, content["source"], entries)


def _content(manifest: Manifest) -> dict[str, Any]:
    model = dataclasses.asdict(manifest.model)
    layout = {
        "vit_pp_layers": model["vision"].pop("pipeline_num_layers"),
        "llm_pp_layers": model["language"].pop("pipeline_num_layers"),
        "tp_size": manifest.tp_size,
    }
    return {
        "format": FORMAT, "version": VERSION, "tool": manifest.tool, "source": dict(manifest.source),
        "save_format": manifest.kind.format.value, "structure": manifest.kind.structure.value,
        "vit_only": manifest.kind.vit_only, "layout": layout, "model": model,
        "tensors": [dataclasses.asdict(entry) for entry in manifest.tensors],
    }  # fmt: skip


def _crc32(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def model_from_json(content: Mapping[str, Any]) -> ModelConfig:
    """A ``ModelConfig`` from its ``asdict`` in JSON."""
    return _built(ModelConfig, content)


def _built(kind: Any, value: Any) -> Any:
    """A dataclass of ``kind`` from its ``asdict`` in JSON, where tuples have become lists."""
    if isinstance(kind, types.UnionType):
        return value
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{key: _built(hints[key], item) for key, item in value.items()})
    return tuple(_built(None, item) for item in value) if isinstance(value, list | tuple) else value
