"""Seconds by the laws of a calibration: of each microbatch in each slot, of messages, of the reduction and the update.

Laws are linear, so a slot's cost is linear in the counts of a microbatch: the laws of its blocks are added once, and
any number of microbatches then takes one matrix product.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from mm.batch import NO_SAMPLES
from mm.config.model import ModelConfig, Tower
from mm.config.run import Run
from mm.cost.calibration import FREE, BlockKey, BlockLaws, Calibration, Law
from mm.cost.layer_memory import WIDTHS, kept_by_layers, layer_memories
from mm.cost.stage_memory import StageSize, gathered_params, num_optimizer_shards
from mm.cost.workload import COUNTS, image_kinds, one_stage
from mm.errors import UserError
from mm.model.arithmetic import Block
from mm.model.flops import Backward, BlockPlace, block_backwards, blocks
from mm.placement import Placement, StageSpec
from mm.weights.shard import memory_shape
from mm.weights.table import VISION_PLACES, Place, model_weights

WHOLE_LAYER = "layer"
"""``BlockKey.recompute`` of a layer that is recomputed as a whole."""


@dataclass(frozen=True)
class Cutting:
    """How tensor parallelism cuts the blocks of a run."""

    tp_size: int
    sequence_parallel: bool


def block_keys(model: ModelConfig, cutting: Cutting, has_images: bool) -> Mapping[BlockPlace, BlockKey]:
    """The key of each block of ``model`` in a calibration."""
    recomputed, model = _recomputed(model), one_stage(model)
    matrices, backwards = _matrices(model, cutting.tp_size), block_backwards(model, has_images)
    of_vision = Cutting(1, sequence_parallel=False) if model.encodes_whole else cutting
    found: dict[BlockPlace, BlockKey] = {}
    for block in blocks(model, NO_SAMPLES):
        place, own = (block.place, block.layer), of_vision if block.place in VISION_PLACES else cutting
        found[place] = BlockKey(block.kind, matrices[place], own.tp_size, own.sequence_parallel, backwards[place].name,
                                recomputed.get(place, "") if backwards[place] is not Backward.NOTHING else "")
    return found


@cache
def _matrices(model: ModelConfig, tp_size: int) -> Mapping[BlockPlace, tuple[tuple[int, int], ...]]:
    found: dict[BlockPlace, list[tuple[int, int]]] = {(block.place, block.layer): [] for block in
                                                      blocks(model, NO_SAMPLES)}
    for weight in model_weights(model.base):
        if len(weight.shape) > 1:
            rows, *columns = memory_shape(weight, tp_size)
            found[weight.place, weight.layer].append((rows, math.prod(columns)))
    if model.language.tied:
        found[Place.HEAD, None] += found[Place.EMBEDDING, None]
    return {place: tuple(shapes) for place, shapes in found.items()}


def _recomputed(model: ModelConfig) -> Mapping[BlockPlace, str]:
    """``BlockKey.recompute`` of each layer that does not keep everything; attention's scores never count."""
    found: dict[BlockPlace, str] = {}
    for spec in model.placement().slots:
        for place, tower, layers, _ in _stacks(model, spec):
            modules = ", ".join(one for one in ("layernorm", "mlp", "mlp_act") if tower.recompute.recomputes(one))
            found |= {(place, layer): modules for layer in layers if modules}
            found |= {(place, layer): WHOLE_LAYER for layer in tower.recompute.whole_layers(layers)}
    return found


def _stacks(model: ModelConfig, spec: StageSpec) -> Iterator[tuple[Place, Tower, range, bool]]:
    """The layers of each tower in a slot, and whether the head follows them."""
    yield Place.VISION_LAYER, model.vision, spec.vision_layers, False
    yield Place.LANGUAGE_LAYER, model.language, spec.language_layers, spec.has_head


@dataclass(frozen=True)
class BlockCosts:
    """The costs of all blocks of a model as linear functions of a microbatch's counts; the costs of slots are sums."""

    places: tuple[BlockPlace, ...]
    fixed: np.ndarray
    """[2, 2, num_blocks], by direction and whether the microbatch has images: the part that no count changes."""
    per_count: np.ndarray
    """[2, 2, num_blocks, num_counts]"""

    @classmethod
    def of(cls, model: ModelConfig, cutting: Cutting, calibration: Calibration) -> "BlockCosts":
        """The costs in seconds.  Raises UserError if the calibration lacks one of the blocks."""
        found = dict[tuple[BlockPlace, bool], BlockLaws]()
        for has_images in (False, True):
            keys = block_keys(model, cutting, has_images)
            found |= {(place, has_images): laws_of(key, calibration) for place, key in keys.items()
                      if has_images or place[0] not in VISION_PLACES}
        offloaded = offloaded_bytes(model, cutting.tp_size, calibration.machine.precision,
                                    cutting.tp_size if cutting.sequence_parallel else 1)
        exposed = exposed_layers(model)
        found |= {at: behind_link(found[at], offloaded[at[0]], calibration, is_exposed=at[0] in exposed)
                  for at in found if at[0] in offloaded}
        return cls._from_laws(one_stage(model), found)

    @classmethod
    def in_flops(cls, model: ModelConfig) -> "BlockCosts":
        """The costs in FLOPs, as ``mm.model.flops.slot_flops`` counts them: without recomputation."""
        forward, found = forward_laws(model), dict[tuple[BlockPlace, bool], BlockLaws]()
        for has_images in (False, True):
            for place, backward in block_backwards(model, has_images).items():
                if has_images or place[0] not in VISION_PLACES:
                    found[place, has_images] = BlockLaws(forward[place], forward[place] * backward.num_forward)
        return cls._from_laws(model, found)

    @classmethod
    def _from_laws(cls, model: ModelConfig, laws: Mapping[tuple[BlockPlace, bool], BlockLaws]) -> "BlockCosts":
        places = tuple((block.place, block.layer) for block in blocks(model, NO_SAMPLES))
        fixed, per_count = np.zeros((2, 2, len(places))), np.zeros((2, 2, len(places), len(COUNTS)))
        rows, pairs = _linear_counts(model)
        for number, place in enumerate(places):
            for has_images in (False, True):
                if (found := laws.get((place, has_images))) is None:
                    continue
                for direction, law in enumerate((found.forward, found.backward)):
                    at = direction, int(has_images), number
                    fixed[at] = law.fixed
                    per_count[at] = law.per_row * rows[place] + law.per_pair * pairs[place]
        return cls(places, fixed, per_count)

    @property
    def is_vision(self) -> np.ndarray:
        """Whether each block is one of the ViT's: bool [num_blocks]."""
        return np.array([place in VISION_PLACES for place, _ in self.places])

    def of_blocks(self, counts: np.ndarray) -> np.ndarray:
        """[2, num_microbatches, num_blocks], forward and backward, of microbatches [num_microbatches, num_counts]."""
        kinds = image_kinds(counts)
        return np.einsum("dmbc,mc->dmb", self.per_count[:, kinds], counts) + self.fixed[:, kinds]

    def of_all(self, counts: np.ndarray, has_fixed: bool = True) -> np.ndarray:
        """Costs [num_microbatches] of all blocks in both directions; without ``has_fixed``, without fixed costs."""
        kinds = image_kinds(counts)
        fixed, per_count = self.fixed.sum(axis=(0, 2)) * has_fixed, self.per_count.sum(axis=(0, 2))
        return (per_count[kinds] * counts).sum(axis=1) + fixed[kinds]

    @property
    def fixed_of_all(self) -> tuple[float, float]:
        """The fixed costs of a microbatch: at least, and with images."""
        without, with_images = self.fixed.sum(axis=(0, 2)).tolist()
        return min(without, with_images), with_images

    def of_groups(self, counts: np.ndarray, sizes: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Sums of both directions over ``sizes`` consecutive microbatches: [num_groups, num_slots, num_placements]."""
        of_groups = np.add.reduceat(self.of_blocks(counts).sum(axis=0), np.cumsum(sizes) - sizes, axis=0)
        return np.tensordot(of_groups, slots, 1)

    def of_slots(self, counts: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """[2, num_microbatches, num_slots, num_placements], for several placements, as ``slots_of`` gives them."""
        return np.tensordot(self.of_blocks(counts), slots, 1)

    def slots_of(self, placements: Sequence[Placement]) -> np.ndarray:
        """Which blocks are in which slot: 0.0 or 1.0 [num_blocks, num_slots, num_placements]."""
        first = {place.value: number for number, (place, _) in reversed(list(enumerate(self.places)))}
        found = np.zeros((len(self.places), len(placements[0].slots), len(placements)))
        for number, placement in enumerate(placements):
            for slot, spec in enumerate(placement.slots):
                for name, start in first.items():
                    here = getattr(spec, name)  # the range of its layers, or whether it has the only block there
                    if here:
                        stop = start + (here.stop if isinstance(here, range) else 1)
                        found[start + (here.start if isinstance(here, range) else 0) : stop, slot, number] = 1.0
        return found


@cache
def forward_laws(model: ModelConfig) -> Mapping[BlockPlace, Law]:
    """Forward FLOPs of each block per row and per pair; they are linear in both."""
    found = {}
    for same in _of_single_counts(model):
        per_row = [one.forward / one.rows for one in same if one.rows > 0 and not one.pairs]
        per_pair = [one.forward / one.pairs for one in same if one.pairs > 0 and not one.rows]
        found[same[0].place, same[0].layer] = Law(0.0, (per_row or [0.0])[0], (per_pair or [0.0])[0])
    return found


@cache
def _linear_counts(model: ModelConfig) -> tuple[Mapping[BlockPlace, np.ndarray], Mapping[BlockPlace, np.ndarray]]:
    """Rows and pairs of each block are linear in the counts of a microbatch: their coefficients [num_counts]."""
    by_block = _of_single_counts(model)
    return ({(one[0].place, one[0].layer): np.array([block.rows for block in one], float) for one in by_block},
            {(one[0].place, one[0].layer): np.array([block.pairs for block in one], float) for one in by_block})


def _of_single_counts(model: ModelConfig) -> list[tuple[Block, ...]]:
    """Each block, with one count of ``COUNTS`` after the other at 1 and all others at 0."""
    return list(zip(*(blocks(model, replace(NO_SAMPLES, **{name: 1})) for name in COUNTS), strict=True))


def laws_of(key: BlockKey, calibration: Calibration) -> BlockLaws:
    """The laws of a block; raises UserError if neither it nor a block from which they follow was measured."""
    if (found := calibration.by_key.get(key)) is not None:
        return found.laws
    if key.backward == Backward.NOTHING.name:  # a forward pass is the same whatever follows it
        for one in calibration.blocks:
            if replace(one.key, backward=key.backward, recompute=key.recompute) == key:
                return BlockLaws(one.laws.forward, FREE)
    if key.recompute == WHOLE_LAYER:
        plain = laws_of(replace(key, recompute=""), calibration)
        return BlockLaws(plain.forward, plain.backward + plain.forward)
    raise UserError(
        f"the calibration has no {key.kind} of this run, on {key.tp_size} tensor-parallel ranks"
        f"{' with sequence parallelism' * key.sequence_parallel}, whose backward pass computes "
        f"{Backward[key.backward].value[1]} and recomputes {key.recompute or 'nothing'}; run mm-plan calibrate with "
        f"the flags of this run")


HOST_BYTES_PER_SECOND = 20e9
"""Assumed for a device's link to host memory, in each direction: PCIe 4.0 with 16 lanes moves 31.5 GB/s at most,
and the devices of a node share the host's memory."""


def offloaded_bytes(model: ModelConfig, tp_size: int, precision: str, num_pieces: int) -> Mapping[BlockPlace, int]:
    """Bytes per row that each offloaded layer sends to host memory and fetches back."""
    found = dict[BlockPlace, int]()
    if not model.offloads_activations:
        return found
    for spec in model.placement().slots:
        for place, tower, layers, is_before_head in _stacks(model, spec):
            known = layer_memories(one_stage(model), place, tp_size, WIDTHS[precision], num_pieces, 1)
            kept = kept_by_layers(tower, layers, known, is_before_head=is_before_head)
            found |= {(place, layer): sizes.kept(keeps) for layer, sizes, keeps, is_offloaded in kept if is_offloaded}
    return found


def exposed_layers(model: ModelConfig) -> frozenset[BlockPlace]:
    """Layers whose own activations come back only when they are needed: the last of a chunk, if offloaded."""
    return frozenset(
        (place, layer) for spec in model.placement().slots
        for place, tower, layers, is_before_head in _stacks(model, spec)
        for layer in tower.offload.layers(layers, is_before_head=is_before_head) if layer == layers[-1])


def behind_link(laws: BlockLaws, num_bytes: int, calibration: Calibration, *, is_exposed: bool) -> BlockLaws:
    """The laws of a layer during which ``num_bytes`` per row cross the link to host memory.

    Per row, the slower of computation and transfer counts.  ``is_exposed``: its backward pass first waits for the
    layer's own transfer (``exposed_layers``).
    """
    if calibration.host_bytes is None:
        return laws
    per_row = num_bytes / calibration.host_bytes
    forward, backward = (replace(law, per_row=max(law.per_row, per_row)) for law in (laws.forward, laws.backward))
    return BlockLaws(forward, replace(backward, per_row=backward.per_row + per_row) if is_exposed else backward)


def all_reduce_law(calibration: Calibration, num_ranks: int, stride: int = 1) -> Law:
    """The law of a sum over ``num_ranks`` ranks that are ``stride`` apart, by bytes.

    Between nodes, the ranks on one divide the bytes over their network adapters, while a ring within it moves all.
    """
    network = calibration.network
    if network is None or num_ranks * stride <= network.node_size:
        return _within_node(calibration, num_ranks)
    num_here = max(1, network.node_size // stride)
    within = _within_node(calibration, num_here) if num_here > 1 else FREE
    per_byte = 2 * (num_ranks - 1) / num_ranks * network.per_byte / num_here
    num_nodes = -(-num_ranks // num_here)
    return Law(within.fixed + 2 * (num_nodes - 1) * network.fixed, max(within.per_row, per_byte))


def message_law(calibration: Calibration, sender: int, receiver: int) -> Law:
    """The law of a message from rank ``sender`` to rank ``receiver``, by bytes."""
    network = calibration.network
    if network is None or sender // network.node_size == receiver // network.node_size:
        return calibration.message or FREE
    return Law(network.fixed, network.per_byte)


def _within_node(calibration: Calibration, num_ranks: int) -> Law:
    """The law of a sum within a node; if this size was not measured, the nearest size's, scaled by a ring's bytes."""
    nearest = min(calibration.all_reduce, key=lambda size: (abs(size - num_ranks), size))
    law = calibration.all_reduce[nearest]
    if nearest == num_ranks:
        return law
    traffic = ((num_ranks - 1) / num_ranks) / ((nearest - 1) / nearest)
    return Law(law.fixed * (num_ranks - 1) / (nearest - 1), law.per_row * traffic)


def reduction_seconds(run: Run, calibration: Calibration, sizes: Sequence[StageSize], num_passes: float) -> float:
    """Seconds to sum the gradients over the ranks with the same weights, and to gather weights, without overlap.

    ``num_passes``: microbatches of a replica in a step.  Sharded gradients are reduced in each one's backward pass,
    sharded weights are gathered in its forward and in its backward pass.
    """
    found, most = _of_copies(run, calibration, sizes, num_passes), max(size.whole_gradient_bytes for size in sizes)
    if run.tp_size > 1 and most:  # of whole encoders; with sharded states, each rank sums its shard
        found += all_reduce_law(calibration, run.tp_size).seconds(most / num_optimizer_shards(run))
    return found


def _of_copies(run: Run, calibration: Calibration, sizes: Sequence[StageSize], num_passes: float) -> float:
    most, num_copies = max(sizes, key=lambda size: size.reduced_bytes), run.num_copies
    if num_copies == 1 or not (most.reduced_bytes or run.shards_weights):
        return 0.0
    law = all_reduce_law(calibration, num_copies, run.tp_size)
    if not run.args.splits_optimizer:
        return law.seconds(most.reduced_bytes)
    # a reduce-scatter of gradients and an all-gather of weights are half of an all-reduce each
    gather = law.seconds(most.num_trainable_params * WIDTHS[run.args.precision]) / 2
    if not run.shards_gradients:
        return law.seconds(most.reduced_bytes) / 2 + gather
    reduced = num_passes * most.num_buckets * law.seconds(most.reduced_bytes / max(1, most.num_buckets)) / 2
    if not run.shards_weights:
        return reduced + gather
    gathered = sum(law.seconds(num_params * WIDTHS[run.args.precision]) for num_params in gathered_params(run)) / 2
    return reduced + num_passes * gathered


def update_seconds(run: Run, calibration: Calibration, sizes: Sequence[StageSize]) -> float:
    """Seconds of the optimizer."""
    law = calibration.step
    return law.fixed + law.per_row * max(size.num_trainable_params for size in sizes) / num_optimizer_shards(run)
