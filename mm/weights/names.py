"""The two spellings of a weight's name in Hugging Face, and the patterns for names in flags and the model JSON."""

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase, translate
from functools import cache
from typing import TypeVar

from mm.families import FAMILIES

Value = TypeVar("Value")

ALL_LINEAR = "all-linear"
"""PEFT's word for every linear layer of a model but the output layer."""

LIVE_STARTS = {live: published for family in FAMILIES for live, published in family.weights.live_starts.items()}
"""``WeightNames.live_starts`` of all families, because a weights file does not state its family."""


def published_name(name: str) -> str:
    """The published form of a Hugging Face name in either spelling; an unknown name is returned unchanged."""
    for live, published in LIVE_STARTS.items():
        if name.startswith(live):
            return published + name.removeprefix(live)
    return name


def live_name(name: str) -> str:
    """The name in transformers' live module of a published name; an unknown name is returned unchanged."""
    for live, published in LIVE_STARTS.items():
        if name.startswith(published):
            return live + name.removeprefix(published)
    return name


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` occurs anywhere in ``name``, ignoring case: MindSpeed-MM's rule for its keywords.

    Beyond it, ``*``, ``?`` and ``[0-9]`` mean what they mean in a shell.
    """
    return fnmatchcase(name.lower(), f"*{pattern.lower()}*")


def is_target(pattern: str, names: Iterable[str]) -> bool:
    """Whether ``pattern`` names the layer with these ``names``: PEFT's rule for a list of target modules.

    A pattern is a whole name, or the words at its end: ``q_proj``, ``layers.3.mlp.up_proj``.  Beyond PEFT, ``*``, ``?``
    and ``[0-9]`` mean what they mean in a shell, and a word such as ``0-15`` matches any number in that range.
    """
    return pattern == ALL_LINEAR or any(_expression(pattern).fullmatch(name) for name in names)


def chosen(by_pattern: Iterable[tuple[str, Value]], names: Collection[str], default: Value) -> Value:
    """The value of the first pattern that names the layer with these ``names``; ``default`` if there is none."""
    return next((value for pattern, value in by_pattern if is_target(pattern, names)), default)


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    words: list[str] = []
    for word in pattern.split("."):
        span = re.fullmatch(r"(\d{1,3})-(\d{1,3})", word)  # more digits than layers have would be a huge expression
        if span is None:
            words.append(translate(word).removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z"))
        else:
            words.append(f"(?:{'|'.join(map(str, range(int(span[1]), int(span[2]) + 1)))})")
    return re.compile(rf"(?:.*\.)?{re.escape('.').join(words)}", re.DOTALL)
