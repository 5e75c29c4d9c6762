"""Files in which each rank of ``mm-doctor`` records the tasks it begins, so that the parent knows where it stopped."""

import re
from collections.abc import Mapping
from pathlib import Path

from mm.files import whole_lines

FOUND = "found.jsonl"
"""The findings, which rank 0 writes."""


def begun_file(folder: Path, rank: int) -> Path:
    return folder / f"begun.{rank}"


def begun(folder: Path) -> dict[int, list[str]]:
    """The tasks that each rank of this machine has begun, in order."""
    files = {int(found[1]): path for path in folder.iterdir() if (found := re.fullmatch(r"begun\.(\d+)", path.name))}
    return {rank: [line.decode().strip() for line in whole_lines(path.read_bytes())]
            for rank, path in sorted(files.items())}


def behind_text(by_rank: Mapping[int, list[str]]) -> str:
    """Which ranks are behind the others, and where each is."""
    if not by_rank:
        return "no rank has begun"
    furthest = max(map(len, by_rank.values()))
    behind = {rank: some for rank, some in by_rank.items() if len(some) < furthest}
    most = (max(by_rank.values(), key=len) or ["nothing"])[-1]
    if not behind:
        return f"all are at: {most}"
    return ", ".join(f"rank {rank} is still at: {some[-1] if some else 'nothing'}" for rank, some in behind.items()) + (
        f"; the others at: {most}")
