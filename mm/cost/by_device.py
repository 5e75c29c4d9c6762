"""Calibrations without measurements: by a device's published figures times usual efficiencies, and by FLOPs alone.

They compare layouts on one device: times by published figures are estimates, those by FLOPs only ratios.
"""

from collections.abc import Iterator, Mapping

from mm.config.args import Arguments
from mm.config.model import ModelConfig, Tower
from mm.config.run import Run
from mm.cost.calibration import FREE, BlockKey, BlockLaws, Calibration, Law, Machine, MeasuredBlock, Network
from mm.cost.costs import HOST_BYTES_PER_SECOND, WHOLE_LAYER, Cutting, block_keys, forward_laws
from mm.cost.layer_memory import ALL, FP32, WIDTHS, LayerBytes, layer_bytes
from mm.cost.stage_memory import state_widths
from mm.cost.workload import one_stage
from mm.device.device import PLATFORMS
from mm.device.platform import KnownDevice, Links
from mm.errors import UserError
from mm.model.flops import BlockPlace, block_backwards
from mm.weights.table import Place

PRODUCTS, ATTENTION, MEMORY, LINKS = 0.7, 0.45, 0.7, 0.7
"""Assumed fractions of the published figures that kernels reach.  Huawei's msmodeling assumes 0.7 of the arithmetic
and 0.6 of the memory bandwidth.  Attention over short samples reaches less than matrix products."""
LAYER_SECONDS = 60e-6
"""Assumed fixed time of a layer's forward pass: launching and draining about twenty kernels, 3 us each."""
COLLECTIVE_SECONDS = 15e-6
"""Assumed latency of a collective or message within a node; msmodeling assumes 10 us."""
NETWORK_SECONDS = 25e-6
"""Assumed latency of a message between nodes."""
SMALL_MODULES = 0.02
"""Assumed cost of recomputing norms and SwiGLU, as a share of a layer's matrix products."""
ASSUMED_ERROR = 0.2
"""Relative standard error of a predicted time."""
UPDATE_BYTES = 42
"""Memory traffic of the update per trained parameter: the norm reads the gradient (4 bytes); torch's fused Adam, which
also clips, reads and writes two moments, the fp32 weight and the gradient (32); and the copy to the bf16 weight (6).
Measured on an H200: 47.2 ms for 3.75 billion parameters, where this number and ``MEMORY`` give 46.9 ms."""
ROUNDED_BYTES = {"exp_avg": 12, "exp_avg_sq": 20}
"""Additional traffic of the update for a bf16 moment: it is widened and rounded, and stochastic rounding of the
second one also reads the weight."""
COPY_TRAFFIC_BYTES = {"fp32": 0, "remainder": 42, "none": 26}
"""Additional traffic for a weight without an fp32 copy, by ``Arguments.kept_copy``: its fp32 value is joined and split
by single operators, or widened and rounded stochastically.  No copy is read to fill the bf16 weight."""
EAGER_ROUNDING_BYTES = 366
"""Additional traffic where stochastic rounding runs as single operators instead of one kernel, counted by operators."""
UPDATE_SECONDS = 1e-3
"""Assumed fixed time of the update: launches, and the host's work."""
_NUM_COLLECTIVES = 2
"""Collectives of a tensor-parallel layer in each direction: after attention and after the MLP."""


def calibration_by_device(run: Run, device: KnownDevice, links: Links) -> Calibration:
    """The laws of every block of ``run``.  Raises UserError for fp32, for which no peaks are published."""
    if run.args.precision == "fp32":
        raise UserError(f"the run is in fp32, but the published peak of {device.label} is for 16 bits; add --bf16, or "
                        f"measure the device with mm-plan calibrate and give --calibration")
    rates, found = _DeviceRates(run, device, links), dict[BlockKey, MeasuredBlock]()
    for place, key, flops, num_backward in _blocks(run.model, Cutting(run.tp_size, run.args.sequence_parallel)):
        if key not in found:
            found[key] = MeasuredBlock(key, rates.laws(place[0], flops, key, num_backward), ASSUMED_ERROR)
    is_compiled = any(one.compiles_kernels for one in PLATFORMS if device in one.known_devices)
    seconds = (UPDATE_BYTES + rounding_bytes(run.args, is_compiled)) / (MEMORY * device.memory_bandwidth)
    seconds += run.args.host_share * sum(state_widths(run.args)) / HOST_BYTES_PER_SECOND  # both ways at the same time
    within = Law(COLLECTIVE_SECONDS, 1 / (LINKS * links.within))
    return Calibration(
        Machine(device.label, run.args.precision, 1, {}), "", tuple(found.values()), step=Law(UPDATE_SECONDS, seconds),
        message=within, all_reduce={2: within}, host_bytes=HOST_BYTES_PER_SECOND,
        network=Network(links.node_size, NETWORK_SECONDS, 1 / (LINKS * links.between)), assumed_error=ASSUMED_ERROR)


def calibration_by_flops(model: ModelConfig, cutting: Cutting, precision: str) -> Calibration:
    """Every FLOP takes one unit of time; messages, collectives, the update and selective recomputation take none."""
    found = dict[BlockKey, MeasuredBlock]()
    for _, key, flops, num_backward in _blocks(model, cutting):
        # Tensor-parallel ranks share a block that is cut; one of a whole encoder runs on each rank alone.
        forward = flops * (cutting.tp_size // key.tp_size)
        backward = forward * num_backward + (forward if key.recompute == WHOLE_LAYER else FREE)
        found[key] = MeasuredBlock(key, BlockLaws(forward, backward), error=0.0)
    machine = Machine("any device, by FLOPs", precision, 1, {})
    return Calibration(machine, "", tuple(found.values()), step=FREE, message=FREE, all_reduce={2: FREE})


def _blocks(model: ModelConfig, cutting: Cutting) -> Iterator[tuple[BlockPlace, BlockKey, Law, int]]:
    """Each block without and with images: its place, key, forward FLOPs, and its backward pass in forward passes."""
    forward = forward_laws(one_stage(model))
    for has_images in (False, True):
        backwards = block_backwards(one_stage(model), has_images)
        for place, key in block_keys(model, cutting, has_images).items():
            yield place, key, forward[place], backwards[place].num_forward


def rounding_bytes(args: Arguments, is_compiled: bool = True) -> int:
    """Additional traffic of the update, in bytes per trained parameter, for states in 16 bits."""
    found = sum(one for name, one in ROUNDED_BYTES.items() if getattr(args, f"{name}_dtype") != "fp32")
    num_rounded = (args.exp_avg_sq_dtype != "fp32") + (args.kept_copy == "none")
    return found + COPY_TRAFFIC_BYTES[args.kept_copy] + (0 if is_compiled else EAGER_ROUNDING_BYTES * num_rounded)


class _DeviceRates:
    """What one rank computes and moves in a second."""

    def __init__(self, run: Run, device: KnownDevice, links: Links) -> None:
        assert device.peak_flops is not None, "checked where the device is chosen"

        def link_bytes(num_ranks: int) -> float:
            return LINKS * (links.within if num_ranks <= links.node_size else links.between)

        self.model, self.width, self.cp_size, self.is_ring = (
            run.model, WIDTHS[run.args.precision], run.cp_size, run.is_ring)
        self.product_flops, self.attention_flops = PRODUCTS * device.peak_flops, ATTENTION * device.peak_flops
        self.memory_bytes = MEMORY * device.memory_bandwidth
        self.tensor_link_bytes = link_bytes(run.tp_size)
        self.context_link_bytes = link_bytes(run.tp_size * run.cp_size)

    def laws(self, place: Place, flops: Law, key: BlockKey, num_backward: int) -> BlockLaws:
        """``num_backward``: work of the backward pass, in forward passes."""
        tp_size = key.tp_size
        work = Law(0.0, flops.per_row / tp_size / self.product_flops, flops.per_pair / tp_size / self.attention_flops)
        moved, of_tensor = self._moved(place, key), self._exchanged(place, key)
        exchanged = of_tensor + self._exchanged_in_attention(place, key.tp_size)
        forward = work + moved + exchanged
        if not num_backward:
            return BlockLaws(forward, FREE)
        # gradients are written and read like activations, and the kept activations are read again
        backward = work * num_backward + moved * 2 + exchanged + self._recomputed(key, work)
        if key.recompute == WHOLE_LAYER:
            backward += forward
        if key.sequence_parallel:  # inputs of layers are gathered again
            backward += of_tensor * 0.5
        return BlockLaws(forward, backward)

    def _moved(self, place: Place, key: BlockKey) -> Law:
        """The time to write the activations of a pass and to read them once."""
        if place is Place.HEAD:  # logits in the precision of the run and in fp32
            return Law(LAYER_SECONDS, 2 * (self.width + FP32) * key.matrices[0][0] / self.memory_bytes)
        if (tower := self._tower(place)) is None:
            return Law(LAYER_SECONDS / 4, 4 * self.model.language.hidden_size * self.width / self.memory_bytes)
        return Law(LAYER_SECONDS, 2 * self._bytes(tower, key).kept(ALL) / self.memory_bytes)

    def _recomputed(self, key: BlockKey, work: Law) -> Law:
        """The time to recompute single modules in the backward pass."""
        if key.recompute in ("", WHOLE_LAYER):
            return FREE
        qkv, proj, fc1, fc2 = (rows * columns for rows, columns in key.matrices[:4])
        is_mlp = "mlp" in key.recompute.split(", ")
        share = (fc1 + fc2) / (qkv + proj + fc1 + fc2) if is_mlp else SMALL_MODULES
        return Law(LAYER_SECONDS / 4, share * work.per_row)

    def _exchanged(self, place: Place, key: BlockKey) -> Law:
        """Collectives of tensor parallelism; whole encoders exchange their visual tokens where these meet the text."""
        tp_size, tower = key.tp_size, self._tower(place)
        if tp_size == 1 or place is Place.PATCH_EMBEDDING:
            return FREE
        hidden = (tower or self.model.language).hidden_size * self.width
        count = _NUM_COLLECTIVES if tower is not None else 1
        count += self.model.encodes_whole and place is Place.EMBEDDING
        per_row = 2 * (tp_size - 1) / tp_size * hidden / self.tensor_link_bytes
        return Law(count * COLLECTIVE_SECONDS, count * per_row)

    def _exchanged_in_attention(self, place: Place, tp_size: int) -> Law:
        """Context parallelism: Ulysses redistributes q, k, v and the output by heads; a ring passes keys and values."""
        language, others = self.model.language, self.cp_size - 1
        if not others or place is not Place.LANGUAGE_LAYER:
            return FREE
        q, k = (heads * language.head_dim * self.width / tp_size
                for heads in (language.num_attention_heads, language.num_query_groups))
        if self.is_ring:
            return Law(others * COLLECTIVE_SECONDS, others * 2 * k / self.context_link_bytes)
        return Law(4 * COLLECTIVE_SECONDS, (2 * q + 2 * k) * others / self.cp_size / self.context_link_bytes)

    def _bytes(self, tower: Tower, key: BlockKey) -> LayerBytes:
        num_pieces = key.tp_size if key.sequence_parallel else 1
        return layer_bytes(tower, key.matrices[2][0] // 2, key.tp_size, self.width, num_pieces)

    def _tower(self, place: Place) -> Tower | None:
        towers: Mapping[Place, Tower] = {Place.VISION_LAYER: self.model.vision,
                                         Place.LANGUAGE_LAYER: self.model.language}
        return towers.get(place)
