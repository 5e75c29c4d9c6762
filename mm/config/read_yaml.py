"""Strict reading of a YAML file, like that of a JSON file."""

from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode

from mm.config.read import Document, read_text
from mm.errors import UserError, refuse


def read_yaml(path: str | Path) -> Document:
    """Read a YAML file; raises UserError for wrong syntax and for duplicate keys, with ``file:line`` where it is known.

    Tags are refused too, and keys of the outermost object that are not text: JSON has neither.
    """
    text = read_text(path, "a YAML file")
    reader: Any = YAML(typ="safe", pure=True)  # its types are incomplete
    try:
        root, node = reader.load(StringIO(text)), reader.compose(StringIO(text))
    except MarkedYAMLError as error:
        found: Any = error
        mark = found.problem_mark or found.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise UserError(f"{path}{line}: {found.problem or found.context}") from error
    except RecursionError as error:
        raise UserError(f"{path}: too many levels of nesting") from error
    except (YAMLError, ValueError, TypeError) as error:  # for a character, a value or a key
        raise UserError(f"{path}: is not valid YAML: {str(error).splitlines()[0]}") from error
    if isinstance(root, dict):
        refuse(_key_problems(path, cast("dict[object, object]", root)))
    lines = dict(_keys(node)) if isinstance(node, MappingNode) else {}
    return Document(str(path), root, lines)


def _key_problems(path: str | Path, root: Mapping[object, object]) -> Iterator[str]:
    """A problem for each key of the outermost object that JSON does not have."""
    for key in root:
        if not isinstance(key, str):
            yield f"{path}: the key {key!r} is not text; put it in quotes, or remove it"


def _keys(node: Any) -> Iterator[tuple[tuple[str | int, ...], list[int]]]:
    """The keys of the outermost object, each with its line."""
    for key, _ in node.value:
        yield (key.value,), [key.start_mark.line + 1]
