"""How many seconds each microbatch takes in each slot of a placement, by the laws of a calibration.

Laws are linear, so a slot's cost is linear in the counts of a microbatch: the laws of its blocks are added once, and
any number of microbatches is one product of matrices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np

from mm.batch import NO_SAMPLES, BatchTotals
from mm.config.model import ModelConfig, RecomputeConfig
from mm.errors import UserError
from mm.model.flops import Backward, BlockPlace, block_backwards, block_slots, blocks
from mm.parallel.simulation import SlotCost
from mm.plan.calibration import BlockKey, BlockLaws, Calibration
from mm.plan.laws import Law
from mm.weights.memory import memory_shape
from mm.weights.table import Place, model_weights

COUNTS = tuple(field.name for field in fields(BatchTotals))
"""The columns of an array of microbatches."""
VISION_PLACES = (Place.PATCH_EMBEDDING, Place.VISION_LAYER, Place.PROJECTOR)
WHOLE_LAYER = "layer"
"""``BlockKey.recompute`` of a layer that is recomputed as a whole."""


@dataclass(frozen=True)
class Cutting:
    """How tensor parallelism cuts the blocks of a run."""

    tp_size: int
    sequence_parallel: bool


def counts_of(microbatches: Sequence[BatchTotals]) -> np.ndarray:
    """float64 [num_microbatches, num_counts]."""
    return np.array([[getattr(one, name) for name in COUNTS] for one in microbatches], dtype=np.float64)


def block_keys(model: ModelConfig, cutting: Cutting, has_images: bool) -> Mapping[BlockPlace, BlockKey]:
    """The key of each block of ``model`` in a calibration."""
    matrices, recomputed = _matrices(model, cutting.tp_size), _recomputed(model)
    backwards = block_backwards(model, has_images)
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
    """What each layer computes again, as ``BlockKey.recompute`` has it; layers that keep everything are left out."""
    found: dict[BlockPlace, str] = {}
    for spec in model.placement().slots:
        for place, tower, layers in ((Place.VISION_LAYER, model.vision, spec.vision_layers),
                                     (Place.LANGUAGE_LAYER, model.language, spec.language_layers)):
            if modules := recomputed_modules(tower.recompute):
                found |= {(place, layer): modules for layer in layers}
            found |= {(place, layer): WHOLE_LAYER for layer in tower.recompute.whole_layers(layers)}
    return found


def recomputed_modules(recompute: RecomputeConfig) -> str:
    """The modules that "selective" recomputes; the scores of attention are never kept, so they do not count."""
    chosen = [module for module in ("layernorm", "mlp", "mlp_act") if recompute.recomputes(module)]
    return ", ".join(chosen)


@dataclass(frozen=True)
class SlotLaws:
    """The cost of each slot as a function of a microbatch's counts: seconds [direction, has_images, slot]."""

    fixed: np.ndarray
    """[2, 2, num_slots]: if the microbatch has any rows there."""
    per_count: np.ndarray
    """[2, 2, num_slots, num_counts]"""
    chunk_pass: float
    """Seconds of a pass besides its blocks."""
    is_passed: np.ndarray
    """bool [2, 2, num_slots]: whether the slot has such a pass."""

    def of(self, counts: np.ndarray) -> np.ndarray:
        """Seconds [2, num_microbatches, num_slots], forward and backward, of microbatches [num_microbatches,
        num_counts]."""
        kinds = (counts[:, COUNTS.index("num_images")] > 0).astype(int)
        seconds = np.einsum("dmsc,mc->dms", self.per_count[:, kinds], counts)
        return seconds + self.fixed[:, kinds] + self.is_passed[:, kinds] * self.chunk_pass

    def costs(self, counts: np.ndarray) -> list[list[SlotCost]]:
        """The same as ``mm.parallel.simulation`` takes them."""
        forward, backward = self.of(counts).tolist()
        return [[SlotCost(*both) for both in zip(*rows, strict=True)] for rows in zip(forward, backward, strict=True)]


def slot_laws(model: ModelConfig, cutting: Cutting, calibration: Calibration) -> SlotLaws:
    """Add up the laws of the blocks of each slot of ``model``."""
    slots, num_slots = block_slots(model), len(model.placement().slots)
    return BlockArrays.of(model, cutting, calibration).in_slots(slots, num_slots)


@dataclass(frozen=True)
class BlockArrays:
    """The laws of all blocks of a model as arrays, from which those of the slots follow for any lists."""

    places: tuple[BlockPlace, ...]
    fixed: np.ndarray
    """[2, 2, num_blocks], as in ``SlotLaws``."""
    per_count: np.ndarray
    """[2, 2, num_blocks, num_counts]"""
    chunk_pass: float

    @classmethod
    def of(cls, model: ModelConfig, cutting: Cutting, calibration: Calibration) -> "BlockArrays":
        """Raises UserError if the calibration lacks one of the blocks."""
        places = tuple((block.place, block.layer) for block in blocks(model, NO_SAMPLES))
        fixed, per_count = np.zeros((2, 2, len(places))), np.zeros((2, 2, len(places), len(COUNTS)))
        rows, pairs = _linear_counts(model)
        for has_images in (False, True):
            keys = block_keys(model, cutting, has_images)
            for number, place in enumerate(places):
                if not has_images and place[0] in VISION_PLACES:
                    continue  # nothing passes them
                laws = laws_of(keys[place], calibration)
                for direction, law in enumerate((laws.forward, laws.backward)):
                    at = direction, int(has_images), number
                    fixed[at] = law.fixed
                    per_count[at] = law.per_row * rows[place] + law.per_pair * pairs[place]
        is_pipeline = model.num_stages > 1 and calibration.pipeline_pass is not None
        chunk_pass = max(calibration.chunk_pass, (calibration.pipeline_pass or 0.0) * is_pipeline)
        return cls(places, fixed, per_count, chunk_pass)

    def in_slots(self, slots: Mapping[BlockPlace, int], num_slots: int) -> SlotLaws:
        """The laws of the slots, given the slot of each block."""
        is_in = np.zeros((len(self.places), num_slots))
        is_in[range(len(self.places)), [slots[place] for place in self.places]] = 1
        has_law = (self.fixed > 0) | (self.per_count > 0).any(axis=-1)
        return SlotLaws(self.fixed @ is_in, np.einsum("dkbc,bs->dksc", self.per_count, is_in), self.chunk_pass,
                        (has_law @ is_in) > 0)


@cache
def _linear_counts(model: ModelConfig) -> tuple[Mapping[BlockPlace, np.ndarray], Mapping[BlockPlace, np.ndarray]]:
    """Rows and pairs of each block are linear in the counts of a microbatch: their coefficients [num_counts]."""
    of_one = [blocks(model, replace(NO_SAMPLES, **{name: 1})) for name in COUNTS]
    by_block = list(zip(*of_one, strict=True))
    return ({(one[0].place, one[0].layer): np.array([block.rows for block in one], float) for one in by_block},
            {(one[0].place, one[0].layer): np.array([block.pairs for block in one], float) for one in by_block})


def laws_of(key: BlockKey, calibration: Calibration) -> BlockLaws:
    """The laws of a block; raises UserError if neither it nor one that they follow from was measured."""
    if (found := calibration.by_key.get(key)) is not None:
        return found.laws
    if key.backward == Backward.NOTHING.name:  # a forward pass is the same whatever follows it
        for one in calibration.blocks:
            if _but(one.key, key, "backward", "recompute"):
                return BlockLaws(one.laws.forward, Law(0.0, 0.0))
    if key.recompute == WHOLE_LAYER:
        plain = laws_of(replace(key, recompute=""), calibration)
        return BlockLaws(plain.forward, plain.backward + plain.forward)
    matrices = ", ".join(f"{rows} x {columns}" for rows, columns in key.matrices) or "none"
    raise UserError(
        f"the calibration has no {key.kind} of this run: matrices {matrices} on each of {key.tp_size} tensor-parallel "
        f"ranks{' with sequence parallelism' * key.sequence_parallel}, backward pass: "
        f"{Backward[key.backward].value[1]}, recomputed: {key.recompute or 'nothing'}; run mm-plan calibrate with the "
        f"flags of this run")


def _but(one: BlockKey, other: BlockKey, *names: str) -> bool:
    """Whether two keys differ in nothing but the fields ``names``."""
    return replace(one, **{name: getattr(other, name) for name in names}) == other
