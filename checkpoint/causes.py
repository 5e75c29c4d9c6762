"""Guesses why two copies of a weight differ.  Each guess is checked on a sample of the data before it is reported.

Samples are in Hugging Face order: all rows of a weight at a few places around the first difference.  A row is an index
along the cut dimension; row numbers count through all Hugging Face tensors of the weight.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import torch
from torch import Tensor

from mm.conversion.compare import Unequal, bits, coarser, held_dtype, hf_weights, same, sample
from mm.formats.source import Kind, Source
from mm.formats.storage import Structure, stored_weights
from mm.weights.cut import Span, cut_dim, shard_spans
from mm.weights.plan import dtype_name
from mm.weights.table import Fusion, Weight
from mm.weights.views import Misfit, View, shard_view, whole_view

PADDING = -1
"""Row number of zero padding: a row of zeros is appended to the sample of a weight, so index -1 selects zeros."""
_SAMPLE_ELEMENTS = 1 << 18
_BLOCK_SIZE = 64
"""Number of indices and places in a block that identifies a tensor."""


@dataclass(frozen=True)
class _Case:
    """A tensor that differs, assuming that one directory is right and the other wrong."""

    weight: Weight
    unequal: Unequal
    right: Source
    found: Source
    expected: Mapping[str, Tensor]
    """[row, place] in ``right`` by Hugging Face tensor; only tensors that are complete in both directories."""
    content: Mapping[str, Tensor]
    """The same rows and places in ``found``, in the same dtype."""
    weights: Sequence[Weight]
    """All weights of the model."""


def guess(weight: Weight, unequal: Sequence[Unequal], source: Source, target: Source, weights: Sequence[Weight]) -> str:
    """Guess why the tensors of ``weight`` differ; ``weights`` are all weights of the model."""
    different = [one for one in unequal if one.num_different]
    if not different:
        dtypes = unequal[0].dtypes
        rounded, other = (source, target) if dtypes[0] == coarser(dtypes) else (target, source)
        return f"dtype: {rounded.path} holds the values of {other.path}, rounded to {dtype_name(coarser(dtypes))}"
    num_different = sum(one.num_different for one in different)
    if num_different == different[0].num_bits == 1:
        return "one flipped bit: a damaged copy"
    for one in different:
        left, right = _samples(weight, one, source, target)
        cases = (_Case(weight, one, source, target, left, right, weights),
                 _Case(weight, one, target, source, right, left, weights))
        for cause, case in ((find_cause(case), case) for find_cause in _CAUSES for case in cases):
            if cause is not None:
                return f"{cause} (in {case.found.path})"
    if num_different < sum(math.prod(one.hf_weight.shape) for one in different) / 100:
        return "a few values differ, as in a damaged copy or after very little training"
    return "values differ, as after training"


def _samples(
    weight: Weight, near: Unequal, source: Source, target: Source
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    dim, shape, left, right = cut_dim(weight), near.hf_weight.shape, {}, {}
    width = max(1, _SAMPLE_ELEMENTS // weight.shape[dim])
    places = _around(near.at[1], math.prod(shape) // shape[dim], width)
    for hf_weight in hf_weights(weight):
        if held_dtype(source, hf_weight) and held_dtype(target, hf_weight):
            key, rows = hf_weight.hf_names[0], range(hf_weight.shape[dim])
            left[key], right[key] = _as_coarser(*(sample(side, hf_weight, rows, places) for side in (source, target)))
    return left, right


def _around(index: int, size: int, width: int) -> range:
    """At most ``width`` indices around ``index``, within 0 to ``size - 1``."""
    start = max(0, min(index - width // 2, size - width))
    return range(start, min(start + width, size))


def _as_coarser(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    dtype = coarser([one.dtype, other.dtype])
    return one.to(dtype), other.to(dtype)


def _proves_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two blocks are equal and not constant; equal constant blocks prove nothing."""
    one, other = _as_coarser(one, other)
    return same(one, other) and bool((bits(one) != bits(one).flatten()[0]).any())


# Orders of rows


def _other_order(case: _Case) -> str | None:
    """Try wrong row orders: permute the right rows as each known mistake would, and compare with the wrong directory.

    Example: a writer puts [up; gate] where readers expect [gate; up].  With 2 rows each, the files of a correct writer
    hold the rows 0 1 2 3, those of the mistaken one 2 3 0 1.  So the reader gets row 2 as row 0: ``misread[0] ==
    expected[2]``.  If all of ``misread`` equals the content of the wrong directory, this is the mistake.
    """
    weight, (tp_size, _) = case.weight, case.weight.shards(case.found.tp_size)
    if len(case.content) < len(weight.hf_names):
        return None
    expected, content = (
        torch.nn.functional.pad(torch.cat([*side.values()]), (0, 0, 0, 1)) for side in (case.expected, case.content)
    )
    correct_order = _rows_in_files(weight, case.found, tp_size)
    if _has_early_padding(weight, expected[:PADDING], content[:PADDING], tp_size):
        return "padding: not at the end of the weights"
    for mistake, wrong_order in _wrong_orders(weight, tp_size):
        misread = torch.zeros_like(expected)
        misread[correct_order] = expected[wrong_order]
        if same(misread[:PADDING], content[:PADDING]):
            return mistake
    owners = _owners(expected, content, correct_order.reshape(tp_size, -1))
    if tp_size == 1 or None in owners:
        return None
    return (f"transposed cut: the ranks {', '.join(map(str, range(tp_size)))} hold the shards of the ranks "
            f"{', '.join(map(str, owners))}")


def _rows_in_files(weight: Weight, found: Source, tp_size: int) -> Tensor:
    """Row numbers in file order, rank by rank, of a correct directory with the layout of ``found``."""
    structure = Structure.CANONICAL if found.kind is Kind.HUGGING_FACE else Structure.FUSED
    if found.storage is not None:
        structure = found.storage.structure
    sizes = [one.shape[cut_dim(one)] for one in hf_weights(weight)]
    rows = dict(zip(weight.hf_names, torch.arange(sum(sizes)).split(sizes), strict=True))
    return torch.cat([
        torch.full((span.length,), PADDING) if span.key is None else rows[span.key][span.start : span.stop]
        for rank in range(tp_size)
        for stored in stored_weights(weight, structure)
        for span in shard_spans(stored, tp_size, rank)
    ])


def _has_early_padding(weight: Weight, expected: Tensor, content: Tensor, tp_size: int) -> bool:
    """Whether ``content`` is ``expected`` with zero rows inserted before its end, as if padded too early."""
    sizes = [one.shape[cut_dim(one)] for one in hf_weights(weight)]
    for right, found in zip(expected.split(sizes), content.split(sizes), strict=True):
        is_zero = ~found.bool().any(dim=1)
        moved = right[(~is_zero).cumsum(0) - 1]
        if not 0 < is_zero.sum() <= -sizes[0] % tp_size or not same(moved[~is_zero], found[~is_zero]):
            return False
    return True


def _wrong_orders(weight: Weight, tp_size: int) -> Iterator[tuple[str, Tensor]]:
    """Known mistakes, each with the row numbers in the file order that it produces."""
    # The second argument of _interleaved: 1 concatenates whole tensors, tp_size alternates them within each rank, the
    # number of heads or groups within each head or group, and the number of rows row by row.
    if weight.fusion is Fusion.GATE_UP:
        numbers, num_padding = torch.arange(weight.shape[0]), -weight.hf_shapes[0][0] % tp_size
        gate, up = (_padded(half, num_padding) for half in numbers.chunk(2))
        yield "gate/up order: [up; gate] instead of [gate; up]", _interleaved((up, gate), tp_size)
        yield "gate/up order: gate and up row by row", _interleaved((gate, up), len(gate))
        yield ("gate/up order: [gate; up] is cut over the ranks as a whole, instead of gate and up each"
               + ", with the padding after both" * (num_padding > 0), _padded(numbers, 2 * num_padding))
    if weight.fusion in (Fusion.PER_HEAD_QKV, Fusion.GROUPED_QKV):
        is_vision = weight.fusion is Fusion.PER_HEAD_QKV
        sizes = [weight.shape[0] // 3] * 3 if is_vision else [shape[0] for shape in weight.hf_shapes]
        rows_of, num_units = dict(zip("qkv", torch.arange(sum(sizes)).split(sizes), strict=True)), weight.num_units
        # Release 2.1.0 and those from 26.0.0 on write the ViT's qkv per head, as their runtime reads it.
        known = ", as MindSpeed-MM 2.2.0 and 2.3.0 leave the ViT's; convert again with mm-convert hf_to_mm"
        scope = " as a whole, and then cut" * (tp_size > 1) + known * is_vision
        yield f"qkv order: [Q; K; V] one after the other{scope}", torch.cat([*rows_of.values()])
        for letters in permutations("qkv"):
            ordered = [rows_of[letter] for letter in letters]
            yield f"qkv order: [{'; '.join(letters).upper()}] one after the other", _interleaved(ordered, tp_size)
            yield (f"qkv order: per {'head' if is_vision else 'group'} [{', '.join(letters)}]",
                   _interleaved(ordered, num_units))
        if sizes[0] == sizes[1]:
            yield "qkv order: q, k, v row by row", _interleaved([*rows_of.values()], sizes[0])


def _interleaved(tensors: Sequence[Tensor], num_pieces: int) -> Tensor:
    """Cut each of ``tensors`` into ``num_pieces`` and take a piece of each in turn."""
    return torch.cat([one.reshape(num_pieces, -1) for one in tensors], dim=1).flatten()


def _padded(numbers: Tensor, num_padding: int) -> Tensor:
    return torch.nn.functional.pad(numbers, (0, num_padding), value=PADDING)


def _owners(expected: Tensor, content: Tensor, shards: Tensor) -> list[int | None]:
    """The rank whose shard each rank holds, or None."""
    owners = []
    for rank, shard in enumerate(shards):
        is_kept = shard != PADDING
        owners.append(next((other for other in (rank, *range(len(shards)))
                            if same(expected[shards[other][is_kept]], content[shard[is_kept]])), None))
    return owners


# Matrices that are cut differently or transposed


def _other_cut(case: _Case) -> str | None:
    """Try wrong cuts on shards of the right shape; all shards must be wrong in the same way."""
    views = dict.fromkeys(stretch.view for stretch in case.found.index.stretches(case.unequal.key))
    causes = {_cut_cause(view, rank, case.right, case.found) for rank, view in enumerate(views)}
    return causes.pop() if len(causes) == 1 else None


def misfit_cause(misfit: Misfit, side: Source, other: Source) -> str | None:
    """Guess why a stored tensor of ``side`` has a wrong shape; ``other`` is the other directory."""
    weight, stored = misfit.weight, misfit.stored
    if misfit.kind != "shape" or weight is None or stored is None:
        return None
    if misfit.hf_name is not None:
        (weight,) = (one for one in hf_weights(weight) if one.hf_names == (misfit.hf_name,))
    cause = _cut_cause(shard_view(stored, weight, side.tp_size, misfit.tp_rank), misfit.tp_rank, other, side)
    return cause and f"{cause} (in {side.path})"


def _cut_cause(view: View, tp_rank: int, right: Source, found: Source) -> str | None:
    """What a matrix holds instead of the spans of ``view``; only for spans of a single Hugging Face tensor."""
    stored, dim, key = view.stored, view.dim, view.spans[0].key
    weight = next((one for one in hf_weights(view.weight) if one.hf_names[0] == key), None)
    if weight is None or key is None or {span.key for span in view.spans} - {key, None}:
        return None
    if len(stored.shape) != 2 or len(weight.shape) != 2 or held_dtype(right, weight) is None:
        return None
    # Cause; the dimension of the right matrix that is cut; the spans that remain; whether it is then transposed.
    tries = [("the matrix is transposed", dim, view.spans, True)]
    if weight.is_cut and found.tp_size > 1:
        width = weight.shape[1 - dim] // found.tp_size
        of_rank = (Span(key, tp_rank * width, width),)
        tries += [("every rank holds the whole matrix, uncut", dim, (Span(key, 0, weight.shape[dim]),), False),
                  (f"it is cut along dimension {1 - dim} instead of {dim}", 1 - dim, of_rank, False),
                  ("the matrix was transposed and then cut", 1 - dim, of_rank, True)]
    plain = replace(weight, tp_dim=None)
    as_it_stands = replace(found, views=(whole_view(stored, key, plain),))
    for cause, cut, spans, is_turned in tries:
        shape, corner = [*weight.shape], [range(size)[:_BLOCK_SIZE] for size in weight.shape]
        shape[cut], corner[cut] = sum(span.length for span in spans), range(spans[0].start, spans[0].stop)[:_BLOCK_SIZE]
        if stored.shape == tuple(reversed(shape) if is_turned else shape):
            expected = sample(right, weight, corner[dim], corner[1 - dim])
            expected = expected.T if is_turned != (dim == 1) else expected
            if _proves_equal(expected, sample(as_it_stands, plain, *map(range, expected.shape))):
                return f"transposed cut: {cause}"
    return None


# Other tensors, and other values


def _other_tensor(case: _Case) -> str | None:
    """Try confused tensors: the output layer and the embedding, or the same weight of another layer."""
    one, right, found = case.unequal.hf_weight, case.right, case.found
    twins: list[tuple[str, Source, Weight]] = []
    names = right.model.family.weights
    if one.hf_names == (names.output_layer_weight,):
        twins = [("tied head: the output layer is the embedding", found, _renamed(one, names.embedding_weight))]
    elif one.hf_names == (names.embedding_weight,):
        twins = [(f"tied head: the embedding is the output layer of {right.path}", right,
                  _renamed(one, names.output_layer_weight))]
    elif one.layer is not None:
        others = [(other.layer - one.layer, other) for weight in case.weights for other in hf_weights(weight)
                  if other.layer is not None
                  and other.name == one.name.replace(f".layers.{one.layer}.", f".layers.{other.layer}.")]
        twins = [(f"another layer: these are the weights of layer {other.layer} ({distance:+d}) of {right.path}",
                  right, other) for distance, other in sorted(others, key=lambda pair: abs(pair[0]))]
    return next((cause for cause, side, other in twins if _are_twins(case.unequal.at, (found, one), (side, other))),
                None)


def missing_head_cause(side: Source, weight: Weight) -> str | None:
    """Guess why the other directory lacks ``weight``, which ``side`` has; only for the output layer, else None."""
    names = side.model.family.weights
    if weight.hf_names != (names.output_layer_weight,):
        return None
    is_copy = _are_twins((0, 0), (side, weight), (side, _renamed(weight, names.embedding_weight)))
    what = "it equals the embedding" if is_copy else "it is not a copy of the embedding"
    return f"tied head: {what}; the directory without an output layer ties it to the embedding"


def _renamed(weight: Weight, hf_name: str) -> Weight:
    return replace(weight, hf_names=(hf_name,))


def _are_twins(at: tuple[int, int], one: tuple[Source, Weight], other: tuple[Source, Weight]) -> bool:
    """Whether two tensors of the same shape are equal in a block around the index and the place ``at``."""
    if any(held_dtype(side, weight) is None for side, weight in (one, other)):
        return False
    shape, dim = one[1].shape, cut_dim(one[1])
    block = [_around(number, size, _BLOCK_SIZE)
             for number, size in zip(at, (shape[dim], math.prod(shape) // shape[dim]), strict=True)]
    return _proves_equal(*(sample(side, weight, *block) for side, weight in (one, other)))


def _other_values(case: _Case) -> str | None:
    expected, content = case.expected[case.unequal.key], case.content[case.unequal.key]
    for precision in (torch.bfloat16, torch.float16):
        if precision.itemsize < expected.dtype.itemsize and same(expected.to(precision).to(content.dtype), content):
            return f"dtype: rounded to {dtype_name(precision)}"
    if not content.any():
        return "only zeros, as if never written"
    if expected.isfinite().all() and not content.isfinite().all():
        return "infinite values or NaN"
    return None


_CAUSES: tuple[Callable[[_Case], str | None], ...] = (_other_order, _other_cut, _other_tensor, _other_values)
"""In order of likelihood; each is tried assuming that the source is right, then that the target is right."""
