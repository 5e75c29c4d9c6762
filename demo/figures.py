"""Draws what the demo has to show: the loss curve, and held-out pictures with the model's answers."""

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
    """One held-out picture or video, what is on it and what the model says."""

    frames: Sequence[Image.Image]
    """A picture has one."""
    expected: str
    said: str

    @property
    def right(self) -> bool:
        return self.said == self.expected


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
    """A sheet of pictures, or of the frames of videos, with answers; ``what`` they are goes into its title.

    The wrong ones come first and in red, so that none is hidden.
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
        said = _printable(answer.said)
        title = said if answer.right else f"{said} (is {answer.expected})"
        axes.set_title(title, fontsize=10, color="black" if answer.right else "crimson")
    right = sum(answer.right for answer in answers)
    figure.suptitle(f"Held-out {what} read by the exported checkpoint: {right} of {len(answers)} right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _printable(said: str) -> str:
    """An untrained model says anything: keep to what the font has, in little room, without starting a formula."""
    short = said if len(said) <= 8 else said[:7] + "~"
    return "".join(sign if " " <= sign < "\x7f" else "?" for sign in short).replace("$", r"\$") or "(nothing)"
