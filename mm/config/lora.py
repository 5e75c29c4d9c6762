"""The settings of adapters (LoRA, arXiv:2106.09685), with the names of PEFT and MindSpeed-MM.

``mm.weights.table`` decides which layers of the model their patterns name.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

from annotated_types import Ge, Le, MinLen
from pydantic import BeforeValidator, Field, Strict
from pydantic.dataclasses import dataclass

from mm.config.command_line import flag_name
from mm.config.parse import (
    STRICT,
    Count,
    Document,
    Fraction,
    Number,
    OrDefault,
    Patterns,
    changed,
    fields_of,
    shown,
)
from mm.errors import NoEffect

PARTS: Mapping[str, tuple[str, ...]] = {
    "all": ("vision", "projector", "language"),
    "image_encoder": ("vision", "projector"),
    "vision_encoder": ("vision",),
    "vision_projector": ("projector",),
    "text_decoder": ("language",),
}
"""Word of ``lora_apply_modules`` -> the parts of the model that it names."""
PartWord = Literal["all", "image_encoder", "vision_encoder", "vision_projector", "text_decoder"]
ALPHAS = 1e-9, 1e9
"""The least and the largest alpha.  Published adapters have 1 to 512; far beyond, products of alphas overflow."""
ALPHAS_TEXT = "a number from 1e-9 to 1e9"


def _pairs(value: Any) -> Any:
    """Tuples from PEFT's object, from the lists in our own files, or from a flag's words, such as ``q_proj=4``."""
    if isinstance(value, dict):
        return tuple(cast("dict[object, object]", value).items())
    if isinstance(value, list | tuple):
        pairs = cast("Sequence[object]", value)
        return tuple(pair.rpartition("=")[::2] if isinstance(pair, str) else
                     tuple(cast("list[object]", pair)) if isinstance(pair, list) else pair for pair in pairs)
    return value


Name = Annotated[str, MinLen(1)]
Ranks = Annotated[
    tuple[Annotated[tuple[Name, Count], Strict(False)], ...], Strict(False), BeforeValidator(_pairs),
    Field(title='an object of ranks by name, such as {"q_proj": 4}'),
]
Alpha = Annotated[Number, Ge(ALPHAS[0]), Le(ALPHAS[1]), Field(title=ALPHAS_TEXT)]
Alphas = Annotated[
    tuple[Annotated[tuple[Name, Alpha], Strict(False)], ...], Strict(False), BeforeValidator(_pairs),
    Field(title='an object of alphas by name, such as {"q_proj": 8}'),
]
PartWords = Annotated[
    tuple[PartWord, ...], Strict(False), Field(title=f"a list of {', '.join(PARTS)}")]


@dataclass(frozen=True, config=STRICT)
class LoraConfig:
    """Adapters beside linear layers: y += scale x B(A(dropout(x))), with A [rank, inputs] and B [outputs, rank]."""

    target_modules: Annotated[Patterns, OrDefault] = ()
    """Patterns of linear layers (``mm.weights.table.is_target``); without any there are no adapters."""
    r: Count = 8
    """The rank of every adapter that ``rank_pattern`` does not name."""
    alpha: Alpha = 16.0
    dropout: Fraction = 0.0
    """Probability that an element of the adapter's input is dropped in training."""
    use_rslora: bool = False
    """Divide alpha by the square root of the rank (rsLoRA, arXiv:2312.03732), not by the rank."""
    rank_pattern: Annotated[Ranks, OrDefault] = ()
    """Pattern -> another rank; the first pattern that matches counts."""
    alpha_pattern: Annotated[Alphas, OrDefault] = ()
    """The same for alpha."""
    apply_modules: Annotated[PartWords, OrDefault] = ()
    """With ``mixed_training``, the parts that have adapters; empty: all."""
    mixed_training: Annotated[bool, OrDefault] = False
    """Whether parts that ``apply_modules`` does not name are trained completely."""

    @property
    def is_on(self) -> bool:
        """Whether there are adapters."""
        return bool(self.target_modules)

    @property
    def parts(self) -> frozenset[str]:
        """The parts of the model that may have adapters."""
        words = self.apply_modules if self.mixed_training and self.apply_modules else ("all",)
        return frozenset(part for word in words for part in PARTS[word])

    def freezes(self, part: str) -> bool:
        """Whether the model's own weights of ``part`` are not trained because of adapters."""
        return self.is_on and not (self.mixed_training and part not in self.parts)

    def scale(self, rank: int, alpha: float) -> float:
        """The factor on an adapter's product."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def merged(stated: LoraConfig, flags: LoraConfig) -> LoraConfig:
    """The model JSON's settings, and the flags' where the model JSON has none."""
    return replace(flags, **{name: getattr(stated, name) for name in changed(stated)})


def lora_problems(stated: LoraConfig, flags: LoraConfig, document: Document, given: Container[str]) -> Iterator[str]:
    """Contradictions between the model JSON, ``document``, and the ``given`` flags, even those with a default value."""
    for name in fields_of(LoraConfig):
        found, key = getattr(flags, name), f"lora_{name}"
        if flag_name(key) in given and document.get(key) is not None and found != getattr(stated, name):
            yield (f"{flag_name(key)} is {shown(found)}, but {document.at(key)} is {shown(document.get(key))}; both "
                   f"set the same value, so keep one")


def lora_notes(stated: LoraConfig, flags: LoraConfig, path: str) -> Iterator[str]:
    """Settings of adapters that have no effect."""
    lora = merged(stated, flags)
    if not lora.is_on:
        keys = [[f"lora_{name}" for name in changed(one)] for one in (flags, stated)]
        for names in (list(map(flag_name, keys[0])), keys[1]):
            if names:
                yield NoEffect(names, "without --lora-target-modules there are no adapters")
    elif lora.apply_modules and not lora.mixed_training:
        yield NoEffect(["lora_apply_modules"], "it needs lora_mixed_training, as in MindSpeed-MM; to keep adapters out "
                                               "of a part, set freeze to true there", path)
