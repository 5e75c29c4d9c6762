"""The files of the datasets in a data JSON: looks up and checks the entries of ``dataset`` and ``val_dataset``.

An entry is a file, or a name in a registry: LLaMA-Factory's ``dataset_info.json``, whose entries may also have Qwen's
keys (``annotation_path``, ``data_path``).  ``%50`` after an entry takes half of its samples; ``%250`` takes all of them
twice, and half of them once more.  The content of the files is not read here.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from mm.config.data import Attributes, DataConfig
from mm.config.schema import expected, fields_of, shown
from mm.config.strict_json import read_json
from mm.errors import UserError, collected, nearest, refuse

REGISTRY_FILE = "dataset_info.json"
_RATE = re.compile(r"(?P<name>.+)%(?P<rate>[0-9]+(?:\.[0-9]+)?)")
_KEYS = ("file_name", "annotation_path", "media_dir", "data_path", "formatting", "columns", "tags", "num_samples")
_UNUSED = {"ranking": False, "split": "train", **dict.fromkeys(
    ("subset", "folder", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"))}
"""Keys of LLaMA-Factory that have no effect with these values, and are refused with others."""
_COLUMNS = ("messages", "images", "videos", "system", "prompt", "query", "response", "history")
_TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag")
_TOOL_TAGS = ("observation_tag", "function_tag")
"""Tags of tool turns, which have no effect: a sample with a tool turn is refused."""


@dataclass(frozen=True)
class DatasetFile:
    """One file of samples, and how it is read."""

    entry: str
    """The entry in the data JSON, without the rate."""
    path: str
    attr: Attributes
    media_root: str
    """Relative paths of media start here."""
    rate_percent: float = 100.0
    """Percentage of its samples to use; above 100 they repeat."""
    num_samples: int | None = None
    """Use this many samples instead of all, before the rate applies."""

    @property
    def is_whole(self) -> bool:
        """Whether every sample is used once."""
        return self.rate_percent == 100 and self.num_samples is None


def training_files(data: DataConfig) -> list[DatasetFile]:
    """The files of ``dataset``.  Raises UserError for an entry that is neither a file nor a name of the registry."""
    return _dataset_files(data, data.dataset, "dataset")


def validation_files(data: DataConfig) -> list[DatasetFile]:
    """The same for ``val_dataset``; empty without one."""
    return _dataset_files(data, data.val_dataset or (), "val_dataset")


def _dataset_files(data: DataConfig, entries: Sequence[str], key: str) -> list[DatasetFile]:
    problems: list[str] = []
    found: list[DatasetFile] = []
    registry: dict[str, Any] | None = None
    for entry in entries:
        match = None if os.path.isfile(entry) else _RATE.fullmatch(entry)
        name, rate = (match["name"], float(match["rate"])) if match else (entry, 100.0)
        with collected(problems):
            if os.path.isfile(name):
                found.append(DatasetFile(name, name, data.attr, data.dataset_dir, rate))
                continue
            registry = _registry(data) if registry is None else registry
            if name not in registry and os.path.isdir(name):
                raise UserError(f"{key} is {name!r}, which is a directory; name the JSON, JSON Lines or Parquet file "
                                f"in it that lists the samples, or several, separated by commas")
            if name not in registry:
                where = (f"and no name in {_registry_path(data)}{nearest(name, registry)}" if registry
                         else f"and there is no {_registry_path(data)} with dataset names")
                inside = os.path.join(data.dataset_dir, name)
                hint = f" (did you mean {inside!r}?)" if os.path.isfile(inside) else ""
                raise UserError(f"{key} is {name!r}, which is not a file{hint}, {where}")
            found.append(_registered(data, name, registry[name], rate))
    refuse(problems)
    return found


def _registry_path(data: DataConfig) -> Path:
    return Path(data.dataset_info) if data.dataset_info else Path(data.dataset_dir) / REGISTRY_FILE


def _registry(data: DataConfig) -> dict[str, Any]:
    """The registry's entries by name; none if no registry is given and ``dataset_dir`` has none."""
    path = _registry_path(data)
    if data.dataset_info is None and not os.path.isfile(path):
        return {}
    root = read_json(path).root
    if not isinstance(root, dict):
        raise UserError(f"{path}: is not an object; expected names of datasets, each with an object like "
                        '{"file_name": "train.json"}')
    return cast(dict[str, Any], root)


def _registered(data: DataConfig, name: str, value: Any, rate: float) -> DatasetFile:
    """One entry of the registry.  Its paths are relative to the registry's folder, and null counts as absent."""
    path = _registry_path(data)
    where, folder = f"{path}: {name}", path.parent
    if not isinstance(value, dict):
        raise UserError(f'{where} is {shown(value)}; expected an object like {{"file_name": "train.json"}}')
    entry: dict[str, Any] = {key: one for key, one in cast(dict[str, Any], value).items() if one is not None}
    problems = [f"{where}.{key} is not a known key{nearest(key, _KEYS)}" for key in entry
                if key not in _KEYS and key not in _UNUSED]
    problems += [f"{where}.{key} is {shown(entry[key])}, which is not supported; remove it, and name a local file as "
                 f"file_name" for key, legal in _UNUSED.items() if entry.get(key, legal) != legal]
    file = entry.get("file_name", entry.get("annotation_path"))
    media = entry.get("media_dir", entry.get("data_path"))
    if file is None:
        problems.append(f"{where} has no file_name; give a path relative to {folder}")
    elif not os.path.isfile(folder / str(file)):
        problems.append(f"{where} has the file {str(folder / str(file))!r}, which does not exist")
    if media is not None and not os.path.isdir(folder / str(media)):
        problems.append(f"{where} has the media folder {str(folder / str(media))!r}, which is not a directory")
    attr, num_samples = _attributes(entry, where, problems), entry.get("num_samples")
    if num_samples is not None and (type(num_samples) is not int or num_samples < 1):
        problems.append(f"{where}.num_samples is {shown(num_samples)}; expected an integer of at least 1 or null")
    refuse(problems)
    root = data.dataset_dir if media is None else str(folder / str(media))
    return DatasetFile(name, str(folder / str(file)), attr, root, rate, num_samples)


def _attributes(entry: dict[str, Any], where: str, problems: list[str]) -> Attributes:
    """Columns and tags of the entry, with LLaMA-Factory's defaults; ``attr`` of the data JSON has no effect on them."""
    values: dict[str, Any] = {"formatting": entry["formatting"]} if "formatting" in entry else {}
    for group, known, ignored in (("columns", _COLUMNS, ()), ("tags", _TAGS, _TOOL_TAGS)):
        given: Any = entry.get(group, {})
        if not isinstance(given, dict):
            problems.append(f"{where}.{group} is {shown(given)}; expected an object")
            continue
        for key, value in cast(dict[str, Any], given).items():
            if key not in known:
                problems += [f"{where}.{group}.{key} is not read here{nearest(key, known)}"] * (
                    value is not None and key not in ignored)
            elif value is not None or key == "system_tag" or fields_of(Attributes)[key].default is None:
                values[key] = value
    try:
        return TypeAdapter(Attributes).validate_python(values)
    except ValidationError as error:
        wrong = dict.fromkeys(str(one["loc"][0]) for one in error.errors())
        problems += [f"{where}: {key} is {shown(values[key])}; expected {expected(fields_of(Attributes)[key])}"
                     for key in wrong]
        return Attributes()
