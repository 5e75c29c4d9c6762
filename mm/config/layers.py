"""Settings of a tower's layers: types that count or list them, and how activations are kept for the backward pass."""

import re
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, get_args

from annotated_types import Le
from pydantic import AfterValidator, BeforeValidator, Field, Strict
from pydantic.dataclasses import dataclass

from mm.config.parse import STRICT, Count, Int, NaturalNumber, OrDefault
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
        """The layers of one chunk that are recomputed as a whole: the first ``num_layers`` with "block", else all."""
        if self.granularity != "full":
            return layers[:0]
        return layers[: self.num_layers if self.method == "block" else None]


@dataclass(frozen=True, config=STRICT)
class OffloadConfig:
    """Layers of one tower whose activations wait in host memory for the backward pass."""

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


def activation_problems(
    recompute: RecomputeConfig, offload: OffloadConfig, named: Callable[[str], str]
) -> Iterator[str]:  # fmt: skip
    """Rules between the settings of one tower, as in Megatron.  ``named``: the name of a JSON key in messages."""
    granularity, method, count, modules = (
        named(f"recompute_{name}") for name in ("granularity", "method", "num_layers", "modules"))
    is_given = (recompute.method is not None, recompute.num_layers is not None)
    if recompute.granularity == "full" and not all(is_given):
        yield (f"{granularity} is 'full', which also needs {method} ('uniform' or 'block') and {count}, for example "
               f"'uniform' and 1")
    if recompute.granularity != "full" and any(is_given):
        yield f"{method} and {count} need {granularity} 'full'; it is {recompute.granularity!r}"
    if recompute.granularity != "selective" and recompute.modules:
        yield f"{modules} needs {granularity} 'selective'; it is {recompute.granularity!r}"
    if offload.activations is False and offload.num_layers:
        count, switch = named("cpu_offloading_num_layers"), named("cpu_offloading_activations")
        yield f"{count} is {offload.num_layers}, but {switch} is false; set it to true, or remove {count}"


def activation_notes(
    recompute: RecomputeConfig, offload: OffloadConfig, named: Callable[[str], str], file: object = None
) -> Iterator[str]:
    """Settings without effect; ``named``: as in ``activation_problems``."""
    if "core_attn" in recompute.modules:
        yield NoEffect([f"core_attn of {named('recompute_modules')}"], "attention scores are never kept", file)
    if recompute.method == "uniform" and (recompute.num_layers or 1) > 1:
        yield NoEffect([named("recompute_num_layers")], f"with {named('recompute_method')} uniform each layer is "
                       f"recomputed separately, so one hidden state per layer is kept", file)
    if offload.activations and offload.num_layers == 0:
        yield NoEffect([named("cpu_offloading_activations")], f"{named('cpu_offloading_num_layers')} is 0", file)
