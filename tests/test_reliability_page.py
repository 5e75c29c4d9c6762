"""The tables of docs/reliability-evidence.md are complete, and the tests and benchmarks in them exist."""

import ast
import re
from functools import cache

import pytest

from tests.files import ROOT

PAGE = re.sub(r"<!--.*?-->", "", (ROOT / "docs" / "reliability-evidence.md").read_text(encoding="utf-8"))
SECTIONS = {"Promises": 32, "Bad inputs": 65, "Threats": 18}


def rows(section: str) -> list[list[str]]:
    """Number, subject, what happens, what shows it, what was measured."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")]
            for line in text.splitlines() if re.match(r"\| \d", line)]


@cache
def functions(path: str) -> set[str]:
    """The names of a file's test functions."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_row_is_there_and_names_what_shows_it(section: str) -> None:
    found = rows(section)
    assert [row[0] for row in found] == [str(number + 1) for number in range(SECTIONS[section])]
    for row in found:
        assert len(row) == 5 and all(row), row
        assert "`tests/" in row[3], row


def test_tests_and_benchmarks_exist() -> None:
    named = set(re.findall(r"`(tests/[^`:]+\.py)::(\w+)`", PAGE))
    assert len(named) > 150
    assert {(path, name) for path, name in named if name not in functions(path)} == set()
    modules = set(re.findall(r"python -m (benchmarks[\w.]+)", PAGE))
    assert modules
    for module in modules:
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module
