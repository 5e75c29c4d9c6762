"""The prompt for a question of a benchmark, from its text, options and number of images.

The words are VLMEvalKit's at commit e8e78f0 of August 2026, because scores can only be compared for the same prompts.
It has two sets: its default, with which Qwen2.5-VL is measured there (pull request 786), and one written for Qwen2-VL,
which MindSpeed-MM uses as ``use_custom_prompt``.
"""

import re
from collections.abc import Mapping
from typing import Literal

Form = Literal["options", "marked options", "few words"]
"""A question with options, one with options and ``<image 1>`` in its text, and one answered in a few words."""

_SELECT = "Please select the correct answer from the options above."
_SELECT_CHINESE = "请直接回答选项字母。"
_CHINESE = re.compile("[\u4e00-\u9fff]")
_SINGLE_WORD = "\nAnswer the question using a single word or phrase."
_SHORT_WORDS = "\nPlease try to answer the question with short words or phrases if possible."
_MARK = re.compile("<image ([1-9])>")

QuestionText = tuple[str | int, ...]
"""Texts, and between them the indices of images."""


def prompt(
    form: Form, custom: bool, question: str, hint: str, options: Mapping[str, str], num_images: int
) -> QuestionText:
    """The prompt of a question; with ``custom`` in the words written for Qwen2-VL."""
    images = tuple(range(num_images))
    match form, custom:
        case "few words", _:
            return *images, question + (_SHORT_WORDS if custom else _SINGLE_WORD)
        case _, False:
            text = _listed(question, hint, options) + (f"{_SELECT} \n" if options else "")
            return placed(text, num_images) if form == "marked options" else (*images, text)
        case "options", True:
            text = _listed(question, hint, options)
            ending = _SELECT_CHINESE if _CHINESE.search(text) else _SELECT
            return *images, (text + (ending if options else "")).rstrip()
        case _:
            return *images, (_listed(question, hint, options) + (_SELECT if options else "")).rstrip()


def _listed(question: str, hint: str, options: Mapping[str, str]) -> str:
    lines = [f"Hint: {hint}"] * bool(hint) + [f"Question: {question}"] + ["Options:"] * bool(options)
    return "".join(f"{line}\n" for line in (*lines, *(f"{letter}. {text}" for letter, text in options.items())))


def placed(text: str, num_images: int) -> QuestionText:
    """``text`` with the images in the places of ``<image 1>`` and so on; without such a mark all images come first.

    An image appears as often as it is named; one that is not named is left out.
    """
    assert max_mark(text) <= num_images, "checked when the file was read"
    pieces = _MARK.split(text)
    if len(pieces) == 1:
        return *range(num_images), text
    items = [int(piece) - 1 if number % 2 else piece for number, piece in enumerate(pieces)]
    return tuple(item for item in items if item != "")


def max_mark(text: str) -> int:
    """The highest number of an image that ``text`` names, counted from 1; 0 if it names none."""
    return max(map(int, _MARK.findall(text)), default=0)
