"""Takes the samples of a weight that differs and finds the cause that they fit.

A sample is at most ``SAMPLE_ELEMENTS`` of a weight, whatever its size, around the first element that differs; so what
is said is a guess, though never one that the sample contradicts.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from checkpoint.diff_causes import (
    Cut,
    RankSample,
    amount_cause,
    bits,
    flipped_bit_cause,
    gathered,
    is_constant,
    layer_cause,
    order_cause,
    precision_order,
    run_numbers,
    value_cause,
    wrong_cuts,
)
from checkpoint.diff_compare import Finding, Unequal
from checkpoint.diff_sides import Held, Misfit, Side, sample
from checkpoint.formats.storage import Structure, stored_weights
from mm.weights.table import HF_EMBEDDING_NAME, HF_OUTPUT_LAYER_NAME, Weight
from mm.weights.views import Stored

SAMPLE_ELEMENTS = 1 << 20
_LAYER_INDICES, _LAYER_PLACES = 64, 64
"""Enough to know a layer by, where all layers are looked at."""


def guess(finding: Finding, source: Side, target: Side, weights: Sequence[Weight]) -> str:
    """Why the tensors of ``finding`` differ; ``weights`` are all of the model."""
    unequal = [one for one in finding.unequal if one.first is not None]
    if not unequal:
        return _dtype_cause(finding.unequal[0], source, target)
    num_different = sum(one.num_different for one in unequal)
    flipped = flipped_bit_cause(num_different, unequal[0].num_bits)
    if flipped is not None:
        return flipped
    for cause in _causes(finding.weight, unequal, source, target, weights):
        return cause
    return amount_cause(num_different, sum(one.num_elements for one in unequal))


def _causes(
    weight: Weight, unequal: list[Unequal], source: Side, target: Side, weights: Sequence[Weight]
) -> Iterator[str]:
    """Every one that fits, the likeliest first; each is tried when it is asked for."""
    yield from _tied_causes(weight, unequal[0], source, target)
    for right, found in ((source, target), (target, source)):
        cause = _order_cause(weight, unequal, right, found)
        if cause is not None:
            yield f"{cause} (in {found.path})"
    for right, found in ((source, target), (target, source)):
        cause = _cut_cause(weight, unequal, right, found)
        if cause is not None:
            yield f"{cause} (in {found.path})"
    cause = _layer_cause(weight, unequal[0], source, target, weights)
    if cause is not None:
        yield f"{cause} of {source.path} (in {target.path})"
    for right, found in ((source, target), (target, source)):
        cause = _value_cause(unequal, right, found, right is source)
        if cause is not None:
            yield f"{cause} (in {found.path})"


def missing_head_cause(side: Side, weight: Weight) -> str | None:
    """Why only ``side`` has ``weight``, if that is an output layer."""
    if weight.hf_names != (HF_OUTPUT_LAYER_NAME,):
        return None
    head = side.held(HF_OUTPUT_LAYER_NAME, weight.hf_shapes[0])
    embedding = side.held(HF_EMBEDDING_NAME, weight.hf_shapes[0])
    if head is None or embedding is None or not _same_sample(side, head, side, embedding, 0):
        return "tied head: it is no copy of the embedding, to which the directory without it ties its output layer"
    return "tied head: it equals the embedding, to which the directory without it ties its output layer"


def misfit_cause(misfit: Misfit, side: Side, other: Side) -> str | None:
    """Why a stored tensor has another shape, tried on the ``other`` directory's."""
    if misfit.stored is None:
        return None
    for cut in wrong_cuts(misfit.weight, side.tp_size, misfit.tp_rank, misfit.stored.shape):
        if _is_cut(misfit.weight, side, misfit.stored, cut, other):
            return f"{cut.cause} (in {side.path})"
    return None


def _dtype_cause(unequal: Unequal, source: Side, target: Side) -> str:
    dtypes = unequal.source.dtype, unequal.target.dtype
    if not all(dtype.is_floating_point for dtype in dtypes):
        return "dtype: one of them holds integers, which are no weights"
    coarser, _ = precision_order(dtypes)
    rounded, other = (source, target) if unequal.source.dtype == coarser else (target, source)
    return f"dtype: {rounded.path} holds what {other.path} does, rounded to {str(coarser).removeprefix('torch.')}"


# Samples


def _window(unequal: Unequal, num_indices: int) -> range:
    """Places around the first difference, as many as a sample of ``num_indices`` may have."""
    held, first = unequal.source, unequal.first
    width = max(1, min(held.num_places, SAMPLE_ELEMENTS // num_indices))
    place = first.row if held.dim else first.place
    start = max(0, min(place - width // 2, held.num_places - width))
    return range(start, start + width)


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return one if one == other else precision_order((one, other))[0]


def _held(side: Side, weight: Weight) -> list[Held] | None:
    found = [side.held(key, shape) for key, shape in zip(weight.hf_names, weight.hf_shapes, strict=True)]
    return None if None in found else found


def _right(side: Side, held: Sequence[Held], window: range, dtype: torch.dtype) -> Tensor:
    """[number, place] of a whole weight."""
    return torch.cat([one.sample(side.path, window, range(one.num_indices)).to(dtype) for one in held])


def _order_cause(weight: Weight, unequal: list[Unequal], right: Side, found: Side) -> str | None:
    held, other = _held(right, weight), _held(found, weight)
    if held is None or other is None:
        return None
    dtype = _coarser(held[0].dtype, other[0].dtype)
    window = _window(unequal[0], sum(one.num_indices for one in held))
    ranks: dict[str, list[RankSample]] = {}
    for view in found.views_of(weight):
        content = sample(found.path, view.stored, view.dim, window).to(dtype)
        rank = "" if found.kind == "hf" else view.stored.file
        ranks.setdefault(rank, []).append(RankSample(run_numbers(weight, view.runs), content))
    joined = [
        RankSample(torch.cat([part.order for part in parts]), torch.cat([part.found for part in parts]))
        for parts in ranks.values()
    ]
    return order_cause(weight, _right(right, held, window, dtype), joined)


def _cut_cause(weight: Weight, unequal: list[Unequal], right: Side, found: Side) -> str | None:
    """Of matrices that hold one published tensor, in shards of the right shape."""
    for part in stored_weights(weight, Structure.CANONICAL):
        key = part.hf_names[0]
        shards = [view for view in found.views_of(part) if {run.key for run in view.runs} <= {key, None}]
        if not shards or all(one.key != key for one in unequal):
            continue
        for cuts in zip(*(wrong_cuts(part, len(shards), rank, view.stored.shape) for rank, view in enumerate(shards)),
                        strict=True):
            if all(_is_cut(part, found, view.stored, cut, right) for view, cut in zip(shards, cuts, strict=True)):
                return cuts[0].cause
    return None


def _is_cut(weight: Weight, found: Side, stored: Stored, cut: Cut, right: Side) -> bool:
    """Whether ``stored`` holds what ``cut`` says, and not one value throughout, which would prove nothing."""
    held = _held(right, weight)
    if held is None:
        return False
    size = stored.shape[1 - cut.dim]
    width = max(1, min(size, SAMPLE_ELEMENTS // max(len(cut.order), sum(one.num_indices for one in held))))
    dtype = _coarser(held[0].dtype, stored.dtype)
    content = sample(found.path, stored, cut.dim, range(width)).to(dtype)
    expected = bits(_right(right, held, range(cut.shift, cut.shift + width), dtype))
    return not is_constant(content) and torch.equal(gathered(expected, cut.order), bits(content))


def _layer_cause(
    weight: Weight, unequal: Unequal, source: Side, target: Side, weights: Sequence[Weight]
) -> str | None:
    if weight.layer is None:
        return None
    place = weight.name.replace(f".layers.{weight.layer}.", ".layers.{}.")
    number = weight.hf_names.index(unequal.key)
    first, window = unequal.first.index, _window(unequal, SAMPLE_ELEMENTS // _LAYER_PLACES)
    start = max(0, min(first - _LAYER_INDICES // 2, unequal.source.num_indices - _LAYER_INDICES))
    indices = range(start, min(start + _LAYER_INDICES, unequal.source.num_indices))
    others = {}
    for other in weights:
        is_like = other.layer not in (None, weight.layer) and other.name == place.format(other.layer)
        held = source.held(other.hf_names[number], other.hf_shapes[number]) if is_like else None
        if held is not None and held.dtype == unequal.target.dtype:
            others[other.layer] = held.sample(source.path, window, indices)
    return layer_cause(weight.layer, unequal.target.sample(target.path, window, indices), others)


def _tied_causes(weight: Weight, unequal: Unequal, source: Side, target: Side) -> Iterator[str]:
    """An output layer that is the embedding in one of the directories, or the other way round."""
    if weight.hf_names not in ((HF_OUTPUT_LAYER_NAME,), (HF_EMBEDDING_NAME,)):
        return
    is_head, place = weight.hf_names[0] == HF_OUTPUT_LAYER_NAME, unequal.first.place
    sides = ((target, unequal.target, source), (source, unequal.source, target))
    for side, held, other in sides if is_head else sides[:1]:
        origin = side if is_head else other
        twin = origin.held(HF_EMBEDDING_NAME if is_head else HF_OUTPUT_LAYER_NAME, weight.hf_shapes[0])
        if twin is not None and _same_sample(side, held, origin, twin, place):
            names = ("output layer", "embedding") if is_head else ("embedding", "output layer")
            yield f"tied head: the {names[0]} of {side.path} is the {names[1]} of {origin.path}"


def _same_sample(side: Side, held: Held, other_side: Side, other: Held, place: int) -> bool:
    """Whether two tensors of one shape are equal around a place, and not one value throughout."""
    width = max(1, min(held.num_places, SAMPLE_ELEMENTS // held.num_indices))
    start = max(0, min(place - width // 2, held.num_places - width))
    window, everything = range(start, start + width), range(held.num_indices)
    dtype = _coarser(held.dtype, other.dtype)
    one = held.sample(side.path, window, everything).to(dtype)
    another = other.sample(other_side.path, window, everything).to(dtype)
    return not is_constant(one) and torch.equal(bits(one), bits(another))


def _value_cause(unequal: list[Unequal], right: Side, found: Side, is_source_right: bool) -> str | None:
    for one in unequal:
        held, other = (one.source, one.target) if is_source_right else (one.target, one.source)
        dtype = _coarser(held.dtype, other.dtype)
        window, everything = _window(one, held.num_indices), range(held.num_indices)
        expected = held.sample(right.path, window, everything).to(dtype)
        cause = value_cause(expected, other.sample(found.path, window, everything).to(dtype))
        if cause is not None:
            return cause
    return None
