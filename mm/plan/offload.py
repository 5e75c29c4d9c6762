"""Whether a layer's activations are cheaper to offload to host memory or to compute again.

Pure arithmetic over laws and formulas; nothing is measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mm.config.model import ModelConfig
from mm.model.flops import BlockPlace
from mm.plan.calibration import BlockLaws, Calibration
from mm.plan.layer_memory import INPUT, NOTHING, WIDTHS, layer_memories
from mm.plan.lists import one_stage
from mm.weights.table import Place

HOST_BYTES_PER_SECOND = 20e9
"""Assumed for a device and each direction of its way to host memory: PCIe 4.0 with 16 lanes moves 31.5 GB/s at most,
and the devices of a node share the host's memory."""


def offloaded_bytes(model: ModelConfig, tp_size: int, precision: str, num_pieces: int) -> Mapping[BlockPlace, int]:
    """Bytes per row that each offloaded layer sends to host memory, and gets back, for a microbatch.

    ``num_pieces``: as in ``ChunkMemory``.  Ranks that exchange heads for tokens keep slightly more.
    """
    found = dict[BlockPlace, int]()
    for spec in model.placement().slots:
        for place, tower, layers in ((Place.VISION_LAYER, model.vision, spec.vision_layers),
                                     (Place.LANGUAGE_LAYER, model.language, spec.language_layers)):
            if not (leaving := tower.offload.layers(layers)):
                continue
            known = layer_memories(one_stage(model), place, tp_size, WIDTHS[precision], num_pieces, 1)
            whole = tower.recompute.whole_layers(layers)
            for layer in leaving:
                sizes, keeps = known[layer]
                found[place, layer] = sizes.kept(INPUT if layer in whole and keeps != NOTHING else keeps)
    return found


def behind_link(laws: BlockLaws, num_bytes: int, calibration: Calibration) -> BlockLaws:
    """The laws of a layer with ``num_bytes`` per row on their way to or from host memory while it is computed.

    Whichever takes longer per row counts; attention's pairs are added to either, so this is an upper bound.
    """
    if calibration.host_bytes is None:
        return laws
    way = num_bytes / calibration.host_bytes
    return BlockLaws(*(replace(law, per_row=max(law.per_row, way)) for law in (laws.forward, laws.backward)))


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
