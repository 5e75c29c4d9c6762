"""The families of models that this program trains: their names and constants; what they compute is in ``mm.model``.

For code that has no model yet; code that has one uses ``model.family``.
"""

from collections.abc import Callable, Iterable

from mm.families.family import Family, Section
from mm.families.qwen2_5_vl import QWEN2_5_VL

FAMILIES: tuple[Family, ...] = (QWEN2_5_VL,)
TITLES = " or ".join(family.title for family in FAMILIES)
"""Their names, for messages."""


def names_of(get: Callable[[Family], Iterable[str]]) -> tuple[str, ...]:
    """The names that ``get`` returns for all families, without duplicates."""
    return tuple(dict.fromkeys(name for family in FAMILIES for name in get(family)))


def family_of(config: Section) -> Family | None:
    """The family of a parsed ``config.json``, by its ``model_type``; None if it is of another model."""
    return next((family for family in FAMILIES if family.config_json.model_type == config.get("model_type")), None)
