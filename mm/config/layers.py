"""Types of the model JSON's fields that count or list layers."""

import re
import typing
from typing import Annotated, Any

from annotated_types import Le
from pydantic import AfterValidator, BeforeValidator, Field, Strict

from mm.config.schema import Count, Int

NumLayers = Annotated[Count, Le(1000)]
"""Layers of a tower, at most ten times those of any published model."""


def _chunks(value: Any) -> Any:
    """Tuples of tuples; a flat list is one virtual chunk.  A strict check accepts no lists from Python."""
    match value:
        case [[*_], *_]:
            chunks = typing.cast(list[Any], value)
            return tuple(tuple(typing.cast(Any, chunk)) if isinstance(chunk, list) else chunk for chunk in chunks)
        case [*counts]:
            return (tuple(counts),)
        case _:
            return value


def layers_in(spans: str) -> frozenset[int]:
    """The layers that ``"0-15,20"`` names, both ends of a span included; raises ValueError for other text."""
    layers: set[int] = set()
    for span in spans.split(",") if spans.strip() else ():
        found = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", span)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(span)
        layers |= {*range(int(found[1]), int(found[2] or found[1]) + 1)}
    return frozenset(layers)


def _spans(text: str) -> str:
    layers_in(text)
    return text


# Strict(False): a JSON list becomes a tuple.
Ints = Annotated[tuple[Int, ...], Strict(False), Field(title="a list of integers")]
Layers = Annotated[
    tuple[Ints, ...], Strict(False), BeforeValidator(_chunks),
    Field(title="a list of integers [pp], or a list of such lists [vpp][pp]"),
]
LayerSpans = Annotated[str, AfterValidator(_spans), Field(title='layers and spans of them, such as "0-15,20"')]
