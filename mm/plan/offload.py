"""What offloaded activations add to a layer: bytes on the link to host memory, and the time that they do not hide."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mm.config.model import ModelConfig, Tower
from mm.model.flops import BlockPlace
from mm.placement import StageSpec
from mm.plan.calibration import BlockLaws, Calibration
from mm.plan.layer_memory import WIDTHS, kept_by_layers, layer_memories
from mm.plan.lists import one_stage
from mm.weights.table import Place

HOST_BYTES_PER_SECOND = 20e9
"""Assumed for a device's link to host memory, in each direction: PCIe 4.0 with 16 lanes moves 31.5 GB/s at most,
and the devices of a node share the host's memory."""


def offloaded_bytes(model: ModelConfig, tp_size: int, precision: str, num_pieces: int) -> Mapping[BlockPlace, int]:
    """Bytes per row that each offloaded layer sends to host memory and fetches back.

    ``num_pieces``: as in ``ChunkMemory``.  Ranks that exchange heads for tokens keep slightly more.
    """
    found = dict[BlockPlace, int]()
    if not model.offloads_activations:
        return found
    for spec in model.placement().slots:
        for place, tower, layers, is_before_head in _stacks(model, spec):
            known = layer_memories(one_stage(model), place, tp_size, WIDTHS[precision], num_pieces, 1)
            kept = kept_by_layers(tower, layers, known, is_before_head=is_before_head)
            found |= {(place, layer): sizes.kept(keeps) for layer, sizes, keeps, is_offloaded in kept if is_offloaded}
    return found


def _stacks(model: ModelConfig, spec: StageSpec) -> Iterator[tuple[Place, Tower, range, bool]]:
    """The layers of each tower in a slot, and whether the head follows them."""
    yield Place.VISION_LAYER, model.vision, spec.vision_layers, False
    yield Place.LANGUAGE_LAYER, model.language, spec.language_layers, spec.has_head


def exposed_layers(model: ModelConfig) -> frozenset[BlockPlace]:
    """Layers whose backward pass waits for their own activations.

    The activations of a layer come back during the backward pass of the next layer of its tower in the same chunk.  The
    last layer has no next one, so it waits if it is offloaded.
    """
    return frozenset(
        (place, layer) for spec in model.placement().slots
        for place, tower, layers, is_before_head in _stacks(model, spec)
        for layer in tower.offload.layers(layers, is_before_head=is_before_head) if layer == layers[-1])


def behind_link(laws: BlockLaws, num_bytes: int, calibration: Calibration, *, is_exposed: bool) -> BlockLaws:
    """The laws of a layer during which ``num_bytes`` per row cross the link to host memory.

    Per row, the slower of computation and transfer counts; attention's pairs are added to either.  ``is_exposed``: its
    backward pass first waits for the layer's own transfer, which is added (``exposed_layers``).
    """
    if calibration.host_bytes is None:
        return laws
    per_row = num_bytes / calibration.host_bytes
    forward, backward = (replace(law, per_row=max(law.per_row, per_row)) for law in (laws.forward, laws.backward))
    return BlockLaws(forward, replace(backward, per_row=backward.per_row + per_row) if is_exposed else backward)
