"""Types of the model JSON's fields that count or list layers.

How a tower keeps activations for the backward pass: on the device, not at all, or in host memory.
"""

import re
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from annotated_types import Le
from pydantic import AfterValidator, BeforeValidator, Field, Strict
from pydantic.dataclasses import dataclass

from mm.config.schema import STRICT, Count, Int, NaturalNumber, OrDefault
from mm.errors import NoEffect

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


Granularity = Literal["full", "selective"]
Method = Literal["uniform", "block"]
RecomputeModule = Literal["layernorm", "mlp_act", "mlp", "core_attn"]
RecomputeModules = Annotated[
    tuple[RecomputeModule, ...], Strict(False), Field(title=f"one or more of {', '.join(get_args(RecomputeModule))}")]


@dataclass(frozen=True, config=STRICT)
class RecomputeConfig:
    """Activation recompute of one tower: whole layers ("full"), or modules of each ("selective"); None is off."""

    granularity: Granularity | None = None
    method: Method | None = None
    num_layers: Count | None = None
    modules: Annotated[RecomputeModules, OrDefault] = ()
    """What "selective" recomputes, in Megatron's words: the outputs of both norms ("layernorm"), the whole MLP with its
    norm ("mlp"), and nothing for "core_attn", whose scores are never kept.  "mlp_act", the output of SwiGLU, is
    named after Megatron's "moe_act".  Empty: "layernorm" and "mlp_act", cheap to recompute and large to keep."""

    def recomputes(self, module: RecomputeModule) -> bool:
        """Whether this module of each layer, or its output, is recomputed; false for "mlp_act" inside "mlp"."""
        modules = self.modules or ("layernorm", "mlp_act")
        return self.granularity == "selective" and module in modules and not (module == "mlp_act" and "mlp" in modules)

    def whole_layers(self, layers: range) -> range:
        """The layers of one chunk that are recomputed as a whole, as in Megatron: the first ``num_layers`` with method
        "block", all with "uniform"."""
        if self.granularity != "full":
            return layers[:0]
        return layers[: self.num_layers if self.method == "block" else None]


@dataclass(frozen=True, config=STRICT)
class OffloadConfig:
    """Layers of one tower whose activations wait in host memory for the backward pass; under the names of Megatron's
    settings."""

    activations: bool | None = None
    """Whether layers are offloaded: all, or the first ``num_layers``; None: they are if ``num_layers`` is given."""
    num_layers: NaturalNumber | None = None
    """The first ones of each chunk; None: all if ``activations`` is true, else none.  0, Megatron's default: none."""

    @property
    def is_on(self) -> bool:
        """Whether the settings ask for offload; ``layers`` says of which layers."""
        return (self.num_layers is not None if self.activations is None else self.activations) and self.num_layers != 0

    def layers(self, layers: range, *, is_before_head: bool) -> range:
        """Those of one chunk's layers whose activations are offloaded.

        ``is_before_head``: the head follows the last layer.  That layer's backward pass then begins right after its
        forward pass, so its activations stay on the device.
        """
        candidates = layers[:-1] if is_before_head else layers
        return candidates[: self.num_layers] if self.is_on else layers[:0]


def recompute_problems(recompute: RecomputeConfig, prefix: str, count: str) -> Iterator[str]:
    """Megatron's rules for the three recompute settings.

    In messages, the names of the first two start with ``prefix``, and ``count`` is the whole name of the third.
    """
    is_given = (recompute.method is not None, recompute.num_layers is not None)
    if recompute.granularity == "full" and not all(is_given):
        yield (f"{prefix}granularity is 'full', which also needs {prefix}method ('uniform' or 'block') and {count}, "
               f"for example 'uniform' and 1")
    if recompute.granularity != "full" and any(is_given):
        yield f"{prefix}method and {count} need {prefix}granularity 'full'; it is {recompute.granularity!r}"
    if recompute.granularity != "selective" and recompute.modules:
        yield f"{prefix}modules needs {prefix}granularity 'selective'; it is {recompute.granularity!r}"


def offload_problems(offload: OffloadConfig, switch: str, count: str) -> Iterator[str]:
    """``switch`` and ``count``: the names of the two settings."""
    if offload.activations is False and offload.num_layers:
        yield f"{count} is {offload.num_layers}, but {switch} is false; set it to true, or remove {count}"


def recompute_notes(
    recompute: RecomputeConfig, prefix: str, count: str, file: object = None
) -> Iterator[str]:
    """Notes on recompute settings that have no effect; for ``prefix`` and ``count`` see ``recompute_problems``."""
    if "core_attn" in recompute.modules:
        yield NoEffect([f"core_attn of {prefix}modules"], "attention scores are never kept", file)
    if recompute.method == "uniform" and (recompute.num_layers or 1) > 1:
        yield NoEffect([count], f"with {prefix}method uniform each layer is recomputed separately, so one hidden state "
                                f"per layer is kept", file)


def offload_notes(offload: OffloadConfig, switch: str, count: str, file: object = None) -> Iterator[str]:
    """A note if no layer is offloaded although offload is on; ``switch`` and ``count``: as in ``offload_problems``."""
    if offload.activations and offload.num_layers == 0:
        yield NoEffect([switch], f"{count} is 0", file)
