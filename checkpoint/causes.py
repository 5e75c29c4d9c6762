"""Guesses at what made two copies of one weight differ; each is tried on a sample of the data before it is reported.

Samples are in Hugging Face order: all rows of a weight at a few places around the first difference.  A row is an index
along the dimension that is cut; its number counts through all Hugging Face tensors of the weight.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, permutations

import torch
from torch import Tensor

from checkpoint.compare import Unequal, bits, coarser, held_dtype, sample, tensors
from checkpoint.formats.source import Kind, Source
from checkpoint.formats.storage import Structure, stored_weights
from mm.weights.cut import Span, cut_dim, shard_spans
from mm.weights.table import HF_EMBEDDING_NAME, HF_OUTPUT_LAYER_NAME, Fusion, Weight
from mm.weights.views import Misfit, Stored, View

PADDING = -1
"""Row number of zero padding: the last row of ``_Case.whole``, which is zero."""
_SAMPLE_ELEMENTS = 1 << 18
_BLOCK_SIZE = 64
"""How many indices and places are enough to know a tensor by."""


@dataclass(frozen=True)
class _Case:
    """A tensor that differs, with one directory taken to be right and the other wrong."""

    weight: Weight
    unequal: Unequal
    right: Source
    found: Source
    samples: dict[str, tuple[Tensor, Tensor]]
    """[row, place] in both directories by Hugging Face tensor, in one dtype; without those that are not whole."""
    weights: Sequence[Weight]
    """All of the model."""

    @property
    def tp_size(self) -> int:
        """How many shards of the weight ``found`` has."""
        return 1 if self.weight.tp_dim is None else self.found.tp_size

    def whole(self) -> list[Tensor] | None:
        """[row, place] of the weight in both directories; None if one of them lacks a tensor of it."""
        if len(self.samples) < len(self.weight.hf_names):
            return None
        both = (torch.cat(parts) for parts in zip(*self.samples.values(), strict=True))
        return [torch.cat((one, torch.zeros_like(one[:1]))) for one in both]

    def rows_in_files(self) -> Tensor:
        """Row numbers in the order of a correct directory like ``found``, rank by rank."""
        if self.found.storage is not None:
            structure = self.found.storage.structure
        else:
            structure = Structure.CANONICAL if self.found.kind is Kind.HUGGING_FACE else Structure.FUSED
        sizes = (shape[cut_dim(self.weight)] for shape in self.weight.hf_shapes)
        firsts = dict(zip(self.weight.hf_names, accumulate(sizes, initial=0), strict=False))
        return torch.cat([
            torch.full((span.length,), PADDING) if span.key is None
            else torch.arange(span.start, span.stop) + firsts[span.key]
            for rank in range(self.tp_size)
            for part in stored_weights(self.weight, structure)
            for span in shard_spans(part, self.tp_size, rank)
        ])


def guess(weight: Weight, unequal: Sequence[Unequal], source: Source, target: Source, weights: Sequence[Weight]) -> str:
    """Why the tensors of ``weight`` differ; ``weights`` are all of the model."""
    different = [one for one in unequal if one.num_different]
    if not different:
        dtypes = unequal[0].dtypes
        rounded, other = (source, target) if dtypes[0] == coarser(dtypes) else (target, source)
        return f"dtype: {rounded.path} holds what {other.path} does, rounded to {_short(coarser(dtypes))}"
    num_different = sum(one.num_different for one in different)
    if num_different == different[0].num_bits == 1:
        return "one flipped bit: a damaged copy"
    for one in different:
        samples = _samples(weight, one, source, target)
        swapped = {key: (right, left) for key, (left, right) in samples.items()}
        cases = (_Case(weight, one, source, target, samples, weights),
                 _Case(weight, one, target, source, swapped, weights))
        for cause in (find_cause(case) for find_cause in _CAUSES for case in cases):
            if cause is not None:
                return cause
    if num_different < sum(math.prod(one.shape) for one in different) / 100:
        return "a few values differ, as in a damaged copy or after very little training"
    return "values differ, as after training"


def _samples(weight: Weight, near: Unequal, source: Source, target: Source) -> dict[str, tuple[Tensor, Tensor]]:
    dim, num_rows = near.dim, sum(shape[near.dim] for shape in weight.hf_shapes)
    places = _around(near.at[1], math.prod(near.shape) // near.shape[dim], max(1, _SAMPLE_ELEMENTS // num_rows))
    return {
        key: _as_coarser(sample(source, key, dim, range(shape[dim]), places),
                         sample(target, key, dim, range(shape[dim]), places))
        for key, shape, dtypes in tensors(weight, source, target) if None not in dtypes
    }


def _around(index: int, size: int, width: int) -> range:
    """At most ``width`` indices around ``index``, none outside 0 to ``size - 1``."""
    start = max(0, min(index - width // 2, size - width))
    return range(start, min(start + width, size))


def _as_coarser(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    dtype = coarser([one.dtype, other.dtype])
    return one.to(dtype), other.to(dtype)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(bits(one), bits(other))


def _proves_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two blocks are equal, but not one value throughout, which would prove nothing."""
    one, other = _as_coarser(one, other)
    return _same(one, other) and bool((bits(one) != bits(one).flatten()[0]).any())


# Orders of rows


def _first_order(case: _Case, orders: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first mistake that gives what is found; each comes with the row numbers in the order of the wrong files."""
    both, ours = case.whole(), case.rows_in_files()
    if both is None:
        return None
    expected, content = both
    for mistake, order in orders:
        theirs = order.flatten()
        if len(theirs) == len(ours):
            misread = torch.zeros_like(expected)
            misread[ours] = expected[theirs]
            if _same(misread[:PADDING], content[:PADDING]):
                return f"{mistake} (in {case.found.path})"
    return None


def _qkv_order(case: _Case) -> str | None:
    weight, tp_size = case.weight, case.tp_size
    if weight.fusion not in (Fusion.PER_HEAD_QKV, Fusion.GROUPED_QKV):
        return None
    is_vision = weight.fusion is Fusion.PER_HEAD_QKV
    sizes = [weight.shape[0] // 3] * 3 if is_vision else [shape[0] for shape in weight.hf_shapes]
    numbers = torch.arange(sum(sizes))
    ranks = {letter: part.reshape(tp_size, -1) for letter, part in zip("QKV", numbers.split(sizes), strict=True)}
    # Release 2.1.0 and those from 26.0.0 on write the ViT's qkv per head, as their runtime reads it.
    known = ", as MindSpeed-MM 2.2.0 and 2.3.0 leave the ViT's; convert again with mm-convert hf_to_mm"
    scope = " as a whole, and then cut" * (tp_size > 1) + known * is_vision
    orders = [(f"qkv order: [Q; K; V] one after the other{scope}", numbers)]
    unit, num_units = "head" if is_vision else "group", sizes[1] // weight.head_dim // tp_size
    for letters in permutations("QKV"):
        parts = [ranks[letter] for letter in letters]
        units = [part.reshape(tp_size, num_units, -1) for part in parts]
        orders += [(f"qkv order: [{'; '.join(letters)}] one after the other", torch.cat(parts, dim=1)),
                   (f"qkv order: per {unit} [{', '.join(letters).lower()}]", torch.cat(units, dim=2))]
    if sizes[0] == sizes[1]:
        orders.append(("qkv order: q, k, v row by row", torch.stack(list(ranks.values()), dim=2)))
    return _first_order(case, orders)


def _gate_up_order(case: _Case) -> str | None:
    if case.weight.fusion is not Fusion.GATE_UP:
        return None
    numbers, tp_size = torch.arange(case.weight.shape[0]), case.tp_size
    num_padding = -case.weight.hf_shapes[0][0] % tp_size
    gate, up = (_padded(part, num_padding).reshape(tp_size, -1) for part in numbers.chunk(2))
    return _first_order(case, [
        ("gate/up order: [up; gate] instead of [gate; up]", torch.cat((up, gate), dim=1)),
        ("gate/up order: gate and up row by row", torch.stack((gate, up), dim=2)),
        ("gate/up order: [gate; up] is cut over the ranks as a whole, instead of gate and up each"
         + ", with the padding after both" * (num_padding > 0), _padded(numbers, 2 * num_padding)),
    ])


def _padded(numbers: Tensor, num_padding: int) -> Tensor:
    return torch.nn.functional.pad(numbers, (0, num_padding), value=PADDING)


def _padding_place(case: _Case) -> str | None:
    """Zeros may stand before the last row, which then lies further back in the files."""
    both = case.whole()
    if not case.weight.pads or both is None:
        return None
    sizes = [shape[cut_dim(case.weight)] for shape in case.weight.hf_shapes]
    num_padding = -sizes[0] % case.tp_size
    for expected, content in zip(*(one[:PADDING].split(sizes) for one in both), strict=True):
        is_zero = ~content.bool().any(dim=1)
        moved = expected[(~is_zero).cumsum(0) - 1]
        if not 0 < is_zero.sum() <= num_padding or not _same(moved[~is_zero], content[~is_zero]):
            return None
    return f"padding: not at the end of the weights (in {case.found.path})"


def _swapped_ranks(case: _Case) -> str | None:
    both = case.whole()
    if case.tp_size == 1 or both is None:
        return None
    (expected, content), shards, owners = both, case.rows_in_files().reshape(case.tp_size, -1), []
    for rank, shard in enumerate(shards):
        is_kept = shard != PADDING
        owners.append(next((str(other) for other in (rank, *range(case.tp_size))
                            if _same(expected[shards[other][is_kept]], content[shard[is_kept]])), None))
    if None in owners:
        return None
    return (f"transposed cut: the ranks {', '.join(map(str, range(case.tp_size)))} hold the shards of the ranks "
            f"{', '.join(owners)} (in {case.found.path})")


# Matrices that are cut or turned in another way


def _other_cut(case: _Case) -> str | None:
    """Tried on shards of the right shape; all of them must be wrong in the same way."""
    views = dict.fromkeys(part.view for part in case.found.index.stretches(case.unequal.key))
    causes = {_cut_cause(view.weight, view.spans, view.stored, rank, case.right, case.found)
              for rank, view in enumerate(views)}
    return causes.pop() if len(causes) == 1 else None


def misfit_cause(misfit: Misfit, side: Source, other: Source) -> str | None:
    """Why a stored tensor of ``side`` has a wrong shape; ``other`` is the directory that it is compared with."""
    weight, stored = misfit.weight, misfit.stored
    if misfit.kind != "shape" or weight is None or stored is None:
        return None
    if misfit.hf_name is None:
        spans = shard_spans(weight, side.tp_size, misfit.tp_rank)
    else:
        shape = weight.hf_shapes[weight.hf_names.index(misfit.hf_name)]
        spans = (Span(misfit.hf_name, 0, shape[cut_dim(weight)]),)
    return _cut_cause(weight, spans, stored, misfit.tp_rank, other, side)


def _cut_cause(
    weight: Weight, own: Sequence[Span], stored: Stored, tp_rank: int, right: Source, found: Source
) -> str | None:
    """What the matrix ``stored`` holds instead of ``own``; only tried where that is of one Hugging Face tensor."""
    key = own[0].key
    if key is None or len(stored.shape) != 2 or len(weight.shape) != 2 or {span.key for span in own} - {key, None}:
        return None
    dim, shape = cut_dim(weight), weight.hf_shapes[weight.hf_names.index(key)]
    if held_dtype(right, key, shape, dim) is None:
        return None
    # Cause; the spans that a wrong file holds; along which dimension of the right tensor, and of the wrong one.
    tries = [("the matrix is transposed", own, dim, 1 - dim)]
    if weight.tp_dim is not None and found.tp_size > 1:
        width = shape[1 - dim] // found.tp_size
        whole, part = Span(key, 0, shape[dim]), Span(key, tp_rank * width, width)
        tries += [("every rank holds the whole, which is not cut", (whole,), dim, dim),
                  (f"it is cut along dimension {1 - dim} instead of {dim}", (part,), 1 - dim, 1 - dim),
                  ("the matrix was transposed and then cut", (part,), 1 - dim, dim)]
    for cause, spans, right_dim, wrong_dim in tries:
        sizes = sum(span.length for span in spans), shape[1 - right_dim]
        if stored.shape != (sizes if wrong_dim == 0 else sizes[::-1]):
            continue
        wrong = replace(found, views=(View(stored, replace(weight, tp_dim=wrong_dim), tuple(spans)),))
        along = range(spans[0].start, spans[0].stop)[:_BLOCK_SIZE]
        across = range(shape[1 - right_dim])[:_BLOCK_SIZE]
        content = sample(wrong, key, wrong_dim, along, across)
        block = (along, across) if right_dim == dim else (across, along)
        expected = sample(right, key, dim, *block)
        if _proves_equal(content, expected if right_dim == dim else expected.T):
            return f"transposed cut: {cause} (in {found.path})"
    return None


# Other tensors, and other values


def _tied_head(case: _Case) -> str | None:
    """The output layer may be the embedding of its directory; the embedding may be the other one's output layer."""
    one, found = case.unequal, case.found
    twins = {HF_OUTPUT_LAYER_NAME: (found, HF_EMBEDDING_NAME), HF_EMBEDDING_NAME: (case.right, HF_OUTPUT_LAYER_NAME)}
    if one.key not in twins or not _are_twins(one.shape, one.dim, one.at, (found, one.key), twins[one.key]):
        return None
    if one.key == HF_OUTPUT_LAYER_NAME:
        return f"tied head: the output layer of {found.path} is the embedding of {found.path}"
    return f"tied head: the embedding of {found.path} is the output layer of {case.right.path}"


def missing_head_cause(side: Source, weight: Weight) -> str | None:
    """Why the other directory lacks ``weight``, which ``side`` has; only known of an output layer."""
    if weight.hf_names != (HF_OUTPUT_LAYER_NAME,):
        return None
    is_copy = _are_twins(weight.shape, 0, (0, 0), (side, HF_OUTPUT_LAYER_NAME), (side, HF_EMBEDDING_NAME))
    what = "it equals the embedding" if is_copy else "it is no copy of the embedding"
    return f"tied head: {what}, to which the directory without it ties its output layer"


def _another_layer(case: _Case) -> str | None:
    weight, key = case.weight, case.unequal.key
    if weight.layer is None:
        return None
    fits = []
    for other in case.weights:
        name = weight.name.replace(f".layers.{weight.layer}.", f".layers.{other.layer}.")
        if other.layer not in (None, weight.layer) and other.name == name:
            other_key = other.hf_names[weight.hf_names.index(key)]
            if _are_twins(case.unequal.shape, case.unequal.dim, case.unequal.at, (case.found, key),
                          (case.right, other_key)):
                fits.append(other.layer - weight.layer)
    if not fits:
        return None
    distance = min(fits, key=abs)
    return (f"another layer: they are the weights of layer {weight.layer + distance} ({distance:+d}) of "
            f"{case.right.path} (in {case.found.path})")


def _are_twins(
    shape: tuple[int, ...], dim: int, at: tuple[int, int], one: tuple[Source, str], other: tuple[Source, str]
) -> bool:
    """Whether two tensors of this shape are equal in a block around the index and the place ``at``."""
    if any(held_dtype(side, key, shape, dim) is None for side, key in (one, other)):
        return False
    indices, places = (_around(number, size, _BLOCK_SIZE)
                       for number, size in zip(at, (shape[dim], math.prod(shape) // shape[dim]), strict=True))
    return _proves_equal(*(sample(side, key, dim, indices, places) for side, key in (one, other)))


def _rounding(case: _Case) -> str | None:
    right, found = case.samples[case.unequal.key]
    for precision in (torch.bfloat16, torch.float16):
        if precision.itemsize < right.dtype.itemsize and _same(right.to(precision).to(found.dtype), found):
            return f"dtype: rounded to {_short(precision)} (in {case.found.path})"
    return None


def _only_zeros(case: _Case) -> str | None:
    _, found = case.samples[case.unequal.key]
    return None if found.any() else f"only zeros, as if never written (in {case.found.path})"


def _not_finite(case: _Case) -> str | None:
    right, found = case.samples[case.unequal.key]
    if not right.isfinite().all() or found.isfinite().all():
        return None
    return f"infinite values or none at all (NaN) (in {case.found.path})"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_CAUSES: tuple[Callable[[_Case], str | None], ...] = (
    _tied_head, _padding_place, _gate_up_order, _qkv_order, _swapped_ranks, _other_cut, _another_layer, _rounding,
    _only_zeros, _not_finite,
)  # fmt: skip
"""The likeliest first; each is tried with the source taken to be right, then with the target."""
