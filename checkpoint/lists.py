"""Layers per stage as a user of the command line writes them."""

from collections.abc import Sequence
from typing import Any

import yaml

from mm.errors import UserError
from mm.placement import PipelineLayout


def read_lists(value: Any, key: str) -> PipelineLayout:
    """Layers per ``[chunk][stage]`` from ``[12,16]``, ``[[12,16]]`` or ``12,16``, as text or already parsed.

    Raises:
        UserError: it is none of these; ``key`` is what the message calls it.
    """
    parsed = value
    if isinstance(value, str):
        try:
            parsed = yaml.safe_load(value)
            if isinstance(parsed, str):
                parsed = yaml.safe_load(f"[{value}]")
        except yaml.YAMLError:
            parsed = None
    if isinstance(parsed, int) and not isinstance(parsed, bool):
        parsed = [parsed]
    if isinstance(parsed, Sequence) and parsed and not isinstance(parsed, str):
        nested = list(parsed) if all(isinstance(part, Sequence) for part in parsed) else [parsed]
        if all(type(count) is int for chunk in nested for count in chunk):
            return tuple(tuple(chunk) for chunk in nested)
    raise UserError(
        f"{key} is {value!r}; expected layers per pipeline stage such as [12,16], 12,16 or, with one list for every "
        f"virtual chunk, [[6,8],[6,8]]. A missing bracket, or a space that the shell split at, is the usual cause."
    )
