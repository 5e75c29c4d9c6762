"""Kills while a background save writes, and what the writing takes from the steps.

The model has a large vocabulary: its checkpoints take long to write, but its steps do not.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.kills import marks
from benchmarks.kills.marks import Mark
from benchmarks.kills.runs import Runs, write_all
from demo.tiny_checkpoint import Sizes, build

VOCABULARY = 24_000


def write_large(folder: Path) -> Path:
    """The inputs of all runs, with a large vocabulary: 3 million weights, and as many in the output layer."""
    write_all(folder)
    records = json.loads((folder / "samples.json").read_text())
    build(folder / "hf", [json.dumps(one) for one in records], seed=0, sizes=Sizes(vocab_size=VOCABULARY))
    for path in folder.glob("model_*.json"):
        model = json.loads(path.read_text())
        model["text_decoder"]["vocab_size"] = VOCABULARY
        path.write_text(json.dumps(model))
    return folder


def step_ratio(runs: Runs) -> dict[str, Any]:
    """Seconds of steps while a rank writes in the background, and of others, in one run that saves every tenth step."""
    launch = runs.launch("ratio", "--async-save", "--save-interval", "10", "--eval-iters", "0")
    ending = launch.end()
    while_writing, others = split_steps(launch.marks.all)
    writing = marks.seconds_of(launch.marks.all, marks.BACKGROUND)
    median, usual = statistics.median(while_writing), statistics.median(others)
    return {
        "steps_while_writing": len(while_writing), "median_seconds_while_writing": round(median, 4),
        "other_steps": len(others), "median_seconds_of_others": round(usual, 4), "ratio": round(median / usual, 2),
        "median_seconds_of_writing": round(statistics.median(writing), 3),
        "problems": [f"the run ended with {ending.status}:\n{ending.said[-3000:]}"] if ending.status else [],
    }  # fmt: skip


def split_steps(found: list[Mark]) -> tuple[list[float], list[float]]:
    """Seconds of steps that begin while a rank writes, and of those during which none does; no rank's first step."""
    while_writing: list[float] = []
    others: list[float] = []
    writing: set[int] = set()
    begun: dict[int, tuple[float, bool]] = {}
    for mark in sorted(found, key=lambda one: one.seconds):
        if mark.phase == marks.BACKGROUND:
            (writing.add if mark.begins else writing.discard)(mark.rank)
            begun = {rank: (began, True) for rank, (began, _) in begun.items()} if not mark.begins else begun
        elif mark.phase == marks.STEP and mark.begins:
            begun[mark.rank] = (mark.seconds, bool(writing))
        elif mark.phase == marks.STEP and mark.rank in begun and mark.number > 1:
            began, is_writing = begun.pop(mark.rank)
            (while_writing if is_writing else others).append(mark.seconds - began)
    return while_writing, others
