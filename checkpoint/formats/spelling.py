"""The two ways in which Hugging Face files spell the names of the same weights."""

from collections.abc import Iterable
from enum import Enum

from mm.errors import UserError


class Spelling(Enum):
    """The two ways Hugging Face names these weights: prefixes of (ViT, LLM)."""

    PUBLISHED = ("visual.", "model.")
    """On the hub, and what ``save_pretrained`` writes."""
    MODULE = ("model.visual.", "model.language_model.")
    """Names of the live module since transformers 4.52, and of files saved from its state dict."""


def published_name(name: str) -> str:
    """The published spelling of a Hugging Face name in any spelling; an unknown name comes back as it is."""
    for spelled, published in zip(Spelling.MODULE.value, Spelling.PUBLISHED.value, strict=True):
        if name.startswith(spelled):
            return published + name.removeprefix(spelled)
    return name


def hf_spelling(names: Iterable[str]) -> Spelling:
    """Which spelling a set of Hugging Face names is in.  Names that mix the two are a ``UserError``."""
    examples = {
        name.startswith(Spelling.MODULE.value): name for name in names if name.startswith(Spelling.PUBLISHED.value)
    }
    if len(examples) > 1:
        raise UserError(
            f"The weights are named in two ways, for example {examples[False]!r} and {examples[True]!r}; expected "
            f"either 'visual.*' with 'model.*' or 'model.visual.*' with 'model.language_model.*'. Export them again."
        )
    return Spelling.MODULE if True in examples else Spelling.PUBLISHED
