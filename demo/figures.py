"""Draws the demo's results: the loss curve, and held-out pictures with the model's answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot is imported
import numpy as np
from matplotlib import pyplot as plt
from PIL import Image

NUM_COLUMNS = 8  # of single pictures
NUM_SHOWN = 40


@dataclass(frozen=True)
class Answer:
    """One held-out picture or video, with the expected answer and the model's answer."""

    frames: Sequence[Image.Image]
    """One frame for a picture."""
    expected: str
    given: str

    @property
    def right(self) -> bool:
        return self.given == self.expected


def draw_loss(records: list[dict], resumed_after: int, layouts: tuple[str, str], path: Path) -> None:
    """The training loss over the iterations; ``records`` are the steps of metrics.jsonl.

    A line marks ``resumed_after``, the iteration after which the second of ``layouts`` took over.
    """
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    iterations = [record["iteration"] for record in records]
    axes.plot(iterations, [record["loss"] for record in records], linewidth=1.2)
    axes.set_yscale("log")
    axes.axvline(resumed_after + 0.5, color="grey", linestyle="--", linewidth=1)
    for name, side in zip(layouts, ("right", "left"), strict=True):
        offset = -6 if side == "right" else 6
        axes.annotate(name, (resumed_after + 0.5, 0.96), (offset, 0), xycoords=("data", "axes fraction"),
                      textcoords="offset points", ha=side, va="top", color="grey")  # fmt: skip
    axes.set(xlabel="iteration", ylabel="loss per answer token", title="Tiny Qwen2.5-VL on scanned digits")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_answers(answers: list[Answer], what: str, path: Path) -> None:
    """A sheet of pictures or video frames with answers; ``what`` goes into its title.

    Wrong answers come first and in red, so that none is hidden.
    """
    num_columns = NUM_COLUMNS // len(answers[0].frames)
    shown = sorted(answers, key=lambda answer: answer.right)[: NUM_SHOWN // len(answers[0].frames)]
    num_rows = -(-len(shown) // num_columns)
    figure, grid = plt.subplots(num_rows, num_columns, figsize=(NUM_COLUMNS * 1.15, num_rows * 1.45 + 0.5),
                                squeeze=False, layout="constrained")  # fmt: skip
    for axes in grid.flat:
        axes.axis("off")
    for axes, answer in zip(grid.flat, shown, strict=False):
        axes.imshow(np.hstack([np.asarray(frame.convert("RGB")) for frame in answer.frames]))
        given = _printable(answer.given)
        title = given if answer.right else f"{given} (is {answer.expected})"
        axes.set_title(title, fontsize=10, color="black" if answer.right else "crimson")
    right = sum(answer.right for answer in answers)
    figure.suptitle(f"Held-out {what} read by the exported checkpoint: {right} of {len(answers)} right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _printable(answer: str) -> str:
    """A short form of an answer with characters of the font only, and no maths: an untrained model writes anything."""
    short = answer if len(answer) <= 8 else answer[:7] + "~"
    return "".join(sign if " " <= sign < "\x7f" else "?" for sign in short).replace("$", r"\$") or "(nothing)"
