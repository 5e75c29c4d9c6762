"""Where this repository lies, and files as tests read and write them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "qwen2.5vl"


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a table in Markdown; none without rows."""
    lines = [[str(cell) for cell in row] for row in rows]
    head = list(head)
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *lines)] if lines else []


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` so that no reader sees half of it."""
    path.with_suffix(".part").write_text(text, encoding="utf-8")
    path.with_suffix(".part").replace(path)


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Flip one bit of a byte."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)
