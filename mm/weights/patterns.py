"""Suggestions for misspelt patterns of weight names, for messages."""

from collections.abc import Collection

from mm.errors import nearest
from mm.weights.names import matches
from mm.weights.table import Weight


def nearest_names(pattern: str, weights: Collection[Weight]) -> str:
    """For a message: the nearest words of our names, those that Hugging Face's name stands for, or how ours begin."""
    foreign = [weight.name for weight in weights if any(matches(pattern, name) for name in weight.hf_names)]
    if foreign:
        return f"; in Hugging Face's names it matches {foreign[0]}{' and others' if len(foreign) > 1 else ''}"
    words = {word for weight in weights for word in weight.name.split(".") if not word.isdecimal()}
    starts = dict.fromkeys(".".join(weight.name.split(".")[:2]) for weight in weights)
    return nearest(pattern, sorted(words)) or f"; names start with {', '.join(starts)}"
