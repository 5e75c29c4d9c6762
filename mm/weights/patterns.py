"""Patterns of names of weights, as flags and the model JSON have them: how they are read, and what they nearly were."""

from collections.abc import Collection
from fnmatch import fnmatchcase

from mm.errors import nearest
from mm.weights.table import Weight


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` stands anywhere in ``name``: MindSpeed-MM's rule for its keywords, without regard to case.

    Beyond it, ``*``, ``?`` and ``[0-9]`` mean what they mean in a shell.
    """
    return fnmatchcase(name.lower(), f"*{pattern.lower()}*")


def nearest_names(pattern: str, weights: Collection[Weight]) -> str:
    """For a message: the nearest words of our names, those that Hugging Face's name stands for, or how ours begin."""
    foreign = [weight.name for weight in weights if any(matches(pattern, name) for name in weight.hf_names)]
    if foreign:
        return f"; in Hugging Face's names it stands for {foreign[0]}{' and others' if len(foreign) > 1 else ''}"
    words = {word for weight in weights for word in weight.name.split(".") if not word.isdecimal()}
    starts = dict.fromkeys(".".join(weight.name.split(".")[:2]) for weight in weights)
    return nearest(pattern, sorted(words)) or f"; names begin with {', '.join(starts)}"
