"""The Chinese pages say what the English ones say, as far as a comparison of their parts can tell.

Section by section, both have the same headings, code, commands, tables, links and figures.  Pages for daily work exist
in both languages, the others only in English.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from posixpath import normpath

import pytest

from tests.files import ROOT

ENGLISH, CHINESE = ROOT / "docs", ROOT / "docs" / "zh"
PAGES = [ROOT / "README.md", *sorted(ENGLISH / page.name for page in CHINESE.glob("*.md") if page.name != "README.md")]
_CODE, _LINK = re.compile(r"`([^`]+)`"), re.compile(r"\]\(([^)\s]+)\)")
_TOUCHING = re.compile("[a-zA-Z0-9%`][\u4e00-\u9fff]|[\u4e00-\u9fff][a-zA-Z0-9`]")
"""Chinese beside Latin letters, digits or code, without a space."""
_FIGURE = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


@dataclass
class Section:
    """What lies between two headings."""

    level: int
    lines: list[str]

    def __post_init__(self) -> None:
        fence = False
        self.code: list[str] = []
        self.text: list[str] = []
        for line in self.lines:
            fence ^= line.startswith("```")
            (self.code if fence or line.startswith("```") else self.text).append(line)

    @property
    def prose(self) -> str:
        return "\n".join(self.text)

    @property
    def spans(self) -> Counter[str]:
        return Counter(" ".join(span.split()) for span in _CODE.findall(self.prose))

    @property
    def tables(self) -> list[int]:
        """The number of cells of each row."""
        return [len(re.findall(r"(?<!\\)\|", line)) for line in self.text if line.startswith("|")]

    @property
    def figures(self) -> Counter[str]:
        plain = _CODE.sub("", re.sub(r"\]\([^)]*\)", "]", self.prose))
        return Counter(one.rstrip(",") for one in _FIGURE.findall(plain))

    def links(self, page: Path) -> list[str]:
        """Files of the repository, without anchors; a translated page counts as its original."""
        found = [one if "://" in one else normpath((page.parent / one.partition("#")[0]).relative_to(ROOT))
                 for one in _LINK.findall(self.prose) if not one.startswith("#")]
        return sorted(one.replace("docs/zh/README.md", "README.md").replace("docs/zh/", "docs/") for one in found)


def sections(page: Path) -> list[Section]:
    fence, found = False, [(0, list[str]())]
    for line in page.read_text(encoding="utf-8").splitlines():
        fence ^= line.startswith("```")
        heading = None if fence else re.match(r"#+ ", line)
        if heading:
            found.append((len(heading[0]) - 1, []))
        found[-1][1].append(line)
    return [Section(level, lines) for level, lines in found]


def translation(page: Path) -> Path:
    return CHINESE / page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_both_have_the_same_parts(page: Path) -> None:
    ours, theirs = sections(page), sections(translation(page))
    assert [one.level for one in ours] == [one.level for one in theirs]
    for own, other in zip(ours, theirs, strict=True):
        where = own.lines[:1], other.lines[:1]
        assert own.code == other.code, where
        assert own.spans == other.spans, (where, own.spans - other.spans, other.spans - own.spans)
        assert own.tables == other.tables, where
        assert not own.figures - other.figures, (where, own.figures - other.figures)
        assert own.links(page) == other.links(translation(page)), where
        assert any("\u4e00" <= letter <= "\u9fff" for letter in other.prose) or not own.prose.strip(), where


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_space_separates_chinese_from_other_letters(page: Path) -> None:
    prose = "\n".join(re.sub(r"\]\([^)]*\)", "]", section.prose) for section in sections(translation(page)))
    assert not [prose[one.start() - 9 : one.end() + 9] for one in _TOUCHING.finditer(prose)]
