"""Whether a layer's activations are cheaper to offload to host memory or to compute again.

Pure arithmetic over laws and formulas; nothing is measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mm.config.model import ModelConfig
from mm.model.flops import BlockPlace
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
        for place, tower, layers in ((Place.VISION_LAYER, model.vision, spec.vision_layers),
                                     (Place.LANGUAGE_LAYER, model.language, spec.language_layers)):
            known = layer_memories(one_stage(model), place, tp_size, WIDTHS[precision], num_pieces, 1)
            found |= {(place, layer): sizes.kept(keeps)
                      for layer, sizes, keeps, is_offloaded in kept_by_layers(tower, layers, known) if is_offloaded}
    return found


def exposed_layers(model: ModelConfig) -> frozenset[BlockPlace]:
    """Layers whose backward pass waits for their own activations.

    Each layer's come back during the backward pass of the next layer of its tower in the same chunk.  The last one has
    none: it waits, unless its backward pass follows its forward pass at once, as before the head.
    """
    found = set[BlockPlace]()
    for spec in model.placement().slots:
        for place, tower, layers, waits in (
                (Place.VISION_LAYER, model.vision, spec.vision_layers, True),
                (Place.LANGUAGE_LAYER, model.language, spec.language_layers, not spec.has_head)):
            found |= {(place, layer) for layer in tower.offload.layers(layers) if waits and layer == layers[-1]}
    return frozenset(found)


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


@dataclass(frozen=True)
class Ways:
    """Seconds that each way to keep fewer activations adds to a layer of one microbatch."""

    recomputed: float
    """The whole layer is computed again; its input is kept."""
    offloaded: float
    """All that it keeps goes to the host and comes back."""
    both: float
    """It is computed again from its input, which goes to the host and comes back."""

    @classmethod
    def of(cls, forward: float, backward: float, kept_bytes: int, input_bytes: int, host_bytes: float) -> "Ways":
        """From the seconds of the layer's passes, the bytes that it keeps and those of its input, and the speed of the
        link in bytes per second."""
        kept, entered = kept_bytes / host_bytes, input_bytes / host_bytes
        again = backward + forward
        return cls(
            recomputed=forward, offloaded=max(0.0, kept - forward) + max(0.0, kept - backward),
            both=forward + max(0.0, entered - forward) + max(0.0, entered - again))
