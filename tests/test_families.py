"""docs/architecture.md lists the files that another family of models would touch; no other file knows a family."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mm.families import FAMILIES
from mm.families.family import Family
from tests.files import ROOT
from tests.test_layering import PACKAGES

MOST_FILES = 6
SECTION = re.search(r"^## What another family would touch$(.*?)(?=^## )",
                    (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
LISTED = re.findall(r"^- `([^`]+)`: ", SECTION[1], flags=re.MULTILINE) if SECTION else []
FOLDERS = sorted(set(re.findall(r"`(mm/\w+/qwen2_5_vl(?:/|\.py))`", SECTION[1]))) if SECTION else []
OTHER_PROJECTS = re.compile(r"qwen-vl-utils|Qwen[23]-VL\b")
"""A library, and other models: one for which VLMEvalKit has prompts, and those that messages call unsupported."""
OUR_OWN_NAME = "qwen2_5_vl-3d"
"""The name of this project in ``pyproject.toml``."""


def names_of(family: Family) -> set[str]:
    """Names of the family, its control tokens and its weights; not keys of ``config.json``, which are common words."""
    return {family.config_json.model_type, *strings_in(dataclasses.replace(family, config_json=None))}


def strings_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings_in(tuple(value))  # the keys of live_starts; their values, such as "model.", are common words
    elif isinstance(value, tuple):
        for one in value:
            yield from strings_in(one)
    elif dataclasses.is_dataclass(value):
        yield from strings_in(tuple(getattr(value, field.name) for field in dataclasses.fields(value)))


def code_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every identifier, module and string in a file, without docstrings, which may cite a source."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.lineno, node.value
        elif isinstance(node, ast.Name | ast.Attribute):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, f"{node.module} {' '.join(one.name for one in node.names)}"


def outside() -> list[Path]:
    """The files of the program that are neither in the family's folders nor listed."""
    paths = [path for package in PACKAGES if package != "demo" for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in paths
            if not (name := str(path.relative_to(ROOT))).startswith(tuple(FOLDERS)) and name not in LISTED]


def test_few_files_are_listed_and_they_exist():
    assert 0 < len(LISTED) <= MOST_FILES and len(FOLDERS) == 2
    assert [name for name in LISTED + FOLDERS if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_no_other_file_names_a_family(family: Family):
    names = "|".join(map(re.escape, names_of(family)))
    wanted = re.compile(rf"(?<![\w.])(?:{names})")  # mm.model.layers.norm is a module
    found = [f"{path.relative_to(ROOT)}:{line}: {text!r}" for path in outside() for line, text in code_of(path)
             if text != OUR_OWN_NAME and (wanted.search(text) or "qwen" in OTHER_PROJECTS.sub("", text).lower())]
    assert not found


def test_a_name_in_another_file_would_be_found():
    assert "<|im_end|>" in names_of(FAMILIES[0]) and "visual.merger.ln_q" in names_of(FAMILIES[0])
    assert any("QWEN2_5_VL" in text for _, text in code_of(ROOT / "mm/config/model.py"))
