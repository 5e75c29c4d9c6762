"""Suggestions for messages about patterns that match no weight name."""

from collections.abc import Collection

from mm.errors import nearest
from mm.weights.names import matches
from mm.weights.table import Weight


def nearest_names(pattern: str, weights: Collection[Weight]) -> str:
    """What a message suggests for ``pattern``: that it is one of Hugging Face's names, a similar word, or how our names
    start."""
    foreign = [weight.name for weight in weights if any(matches(pattern, name) for name in weight.hf_names)]
    if foreign:
        return f"; in Hugging Face's names it matches {foreign[0]}{' and others' if len(foreign) > 1 else ''}"
    words = {word for weight in weights for word in weight.name.split(".") if not word.isdecimal()}
    starts = dict.fromkeys(".".join(weight.name.split(".")[:2]) for weight in weights)
    return nearest(pattern, sorted(words)) or f"; names start with {', '.join(starts)}"
