"""Links of all pages, the files for contributors, the package's metadata, and the hosted run's commands."""

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from mm.environment import VERSION
from tests.files import ROOT

PAGES = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
         *sorted((ROOT / "docs").rglob("*.md"))]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
BODY = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def read(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert links or page.name == "lora.md"
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def messages_in(node: ast.AST) -> Iterator[str]:
    """Texts that are neither docstrings nor descriptions of flags."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str) and not isinstance(node, ast.Expr):
            yield child.value
        if not (isinstance(child, ast.keyword) and child.arg == "description"):
            yield from messages_in(child)


def test_every_message_of_the_troubleshooting_page_exists() -> None:
    """In its first column, code is a part of a message, and its values are left out."""
    rows = re.findall(r"^\| (.+?) \| .+ \| .+ \|$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    messages = {fragment for row in rows for fragment in re.findall(r"`([^`]+)`", row)}
    texts = [text for path in [*ROOT.glob("mm/**/*.py"), *ROOT.glob("checkpoint/**/*.py")]
             for text in messages_in(ast.parse(path.read_text(encoding="utf-8")))]
    assert len(rows) >= 40 and len(messages) >= 25
    assert [one for one in sorted(messages) if not any(one in text for text in texts)] == []


def test_versions_agree() -> None:
    (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest.rstrip(",") == VERSION == read(ROOT / "CITATION.cff")["version"]


def test_a_hosted_run_tests_what_ci_does() -> None:
    (job,) = read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == re.findall(r"^make \w+$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def test_the_package_says_what_it_is() -> None:
    described = distribution("qwen2_5_vl-3d").metadata
    assert described["Summary"] and described["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in described.get_all("Classifier", [])
    assert (ROOT / "mm" / "py.typed").exists() and (ROOT / "checkpoint" / "py.typed").exists()


def test_every_command_is_a_console_script() -> None:
    """tests/test_wheel.py runs them."""
    scripts = {one.name: one for one in distribution("qwen2_5_vl-3d").entry_points if one.group == "console_scripts"}
    assert set(scripts) == {"mm-convert", "mm-data", "mm-doctor", "mm-evaluate", "mm-generate", "mm-page", "mm-plan",
                            "mm-train"}
    assert all(Path(sys.executable).with_name(name).exists() for name in scripts)


@pytest.mark.parametrize("template", [one for one in TEMPLATES if one.stem != "config"], ids=lambda one: one.stem)
def test_issue_forms_have_what_a_form_needs(template: Path) -> None:
    form = read(template)
    fields = form["body"]
    assert form["name"] and form["description"] and {one["type"] for one in fields} <= BODY
    assert len({one["id"] for one in fields}) == len(fields)
    assert all(one["attributes"]["label"] for one in fields)
    assert any(one.get("validations", {}).get("required") for one in fields)
