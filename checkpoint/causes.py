"""Guesses at what made two copies of one weight differ; each is tried on the data before it is reported.

A mistake is an order of rows: in the files, row ``i`` holds number ``theirs[i]`` of the weight in the place of
``ours[i]``.  Numbers count through all Hugging Face tensors of the weight, one after the other.  What both directories
hold is read in Hugging Face order, as a sample: every number, and at most ``SAMPLE_ELEMENTS`` elements around the first
that differs.  So a cause is a guess, but never one that the sample contradicts.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from checkpoint.compare import Unequal, bits, coarser, held_dtype, sample, tensors
from checkpoint.formats.source import Kind, Source
from checkpoint.formats.storage import Structure, stored_weights
from mm.weights.cut import Span, cut_dim, shard_spans
from mm.weights.table import HF_EMBEDDING_NAME, HF_OUTPUT_LAYER_NAME, Fusion, Weight, local_shape
from mm.weights.views import Misfit, Stored

PADDING = -1
SAMPLE_ELEMENTS = 1 << 18
_LAYER_SIZE = 64
"""Indices and places that are enough to know a layer by, where all layers are looked at."""
_JOINED_TP_SIZES = (2, 4, 8)
"""TP sizes whose shards may have been put one after the other."""


# The guess


def guess(weight: Weight, unequal: Sequence[Unequal], source: Source, target: Source, weights: Sequence[Weight]) -> str:
    """Why the tensors of ``weight`` differ; ``weights`` are all of the model."""
    different = [one for one in unequal if one.first is not None]
    if not different:
        dtypes = unequal[0].dtypes
        rounded, other = (source, target) if dtypes[0] == coarser(dtypes) else (target, source)
        return f"dtype: {rounded.path} holds what {other.path} does, rounded to {_short(coarser(dtypes))}"
    num_different, num_elements = (sum(counts) for counts in zip(
        *((one.num_different, math.prod(one.shape)) for one in different), strict=True))
    if (num_different, different[0].num_bits) == (1, 1):
        return "one flipped bit: a damaged copy"
    for cause in _causes(weight, different, source, target, weights):
        return cause
    if num_different < num_elements / 100:
        return "a few values differ, as in a damaged copy or after very little training"
    return "values differ, as after training"


def _causes(
    weight: Weight, unequal: Sequence[Unequal], source: Source, target: Source, weights: Sequence[Weight]
) -> Iterator[str]:
    """Every cause that fits, the likeliest first; each is tried when it is asked for."""
    both = ((source, target), (target, source))
    yield from _tied_causes(weight, unequal[0], source, target)
    for right, found in both:
        yield from (f"{cause} (in {found.path})" for cause in _order_causes(weight, unequal[0], right, found))
    for right, found in both:
        yield from (f"{cause} (in {found.path})" for cause in _cut_causes(weight, unequal, right, found))
    yield from (f"{cause} of {source.path} (in {target.path})"
                for cause in _layer_causes(weight, unequal[0], source, target, weights))
    for right, found in both:
        for one in unequal:
            places = _window(one.place, weight, sum(shape[one.dim] for shape in weight.hf_shapes))
            samples = [sample(side, one.key, one.shape, one.dim, places) for side in (right, found)]
            yield from (f"{cause} (in {found.path})" for cause in _value_causes(*_as_coarser(samples)))


def missing_head_cause(side: Source, weight: Weight) -> str | None:
    """Why only ``side`` has ``weight``, if that is an output layer."""
    if weight.hf_names != (HF_OUTPUT_LAYER_NAME,):
        return None
    is_copy = _is_twin(weight, (side, HF_OUTPUT_LAYER_NAME), (side, HF_EMBEDDING_NAME), 0)
    what = "it equals the embedding" if is_copy else "it is no copy of the embedding"
    return f"tied head: {what}, to which the directory without it ties its output layer"


# Samples


def _whole_sample(source: Source, weight: Weight, places: range) -> Tensor | None:
    """[number, place] of a whole weight; None when ``source`` does not hold all of it in one dtype."""
    held = list(tensors(weight, source))
    dtypes = {dtype for _, _, (dtype,) in held}
    if None in dtypes or len(dtypes) > 1:
        return None
    return torch.cat([sample(source, key, shape, cut_dim(weight), places) for key, shape, _ in held])


def _window(place: int, weight: Weight, num_numbers: int) -> range:
    """Places around ``place``, as many as a sample of ``num_numbers`` may have."""
    dim = cut_dim(weight)
    size = math.prod(weight.shape[:dim] + weight.shape[dim + 1 :])
    width = max(1, min(size, SAMPLE_ELEMENTS // num_numbers))
    start = max(0, min(place - width // 2, size - width))
    return range(start, start + width)


def _as_coarser(samples: Sequence[Tensor]) -> list[Tensor]:
    dtype = coarser([one.dtype for one in samples])
    return [one.to(dtype) for one in samples]


def _is_constant(tensor: Tensor) -> bool:
    """Whether it is one value throughout, so that being equal proves nothing."""
    flat = bits(tensor).flatten()
    return not bool((flat != flat[0]).any())


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(bits(one), bits(other))


def _gathered(rows: Tensor, order: Tensor) -> Tensor:
    """``rows`` ([number, place]) in ``order``; zeros for padding."""
    return torch.where((order == PADDING)[:, None], torch.zeros((), dtype=rows.dtype), rows[order.clamp(min=0)])


# Orders of rows


def _order_causes(weight: Weight, unequal: Unequal, right: Source, found: Source) -> Iterator[str]:
    """The wrong orders in which ``found`` holds the rows of ``right``."""
    is_cut = found.kind is not Kind.HUGGING_FACE and weight.tp_dim is not None
    tp_size = found.tp_size if is_cut else 1
    mistakes = list(_mistakes(weight, tp_size))
    if tp_size == 1 and not mistakes:
        return
    places = _window(unequal.place, weight, sum(shape[unequal.dim] for shape in weight.hf_shapes))
    samples = [_whole_sample(side, weight, places) for side in (right, found)]
    if samples[0] is None or samples[1] is None:
        return
    expected, content = _as_coarser(samples)
    ours = _numbers_in_files(weight, found, tp_size)
    is_kept = ours != PADDING
    for cause, theirs in (*mistakes, *_swapped_ranks(expected, content, ours, tp_size)):
        if len(theirs) == len(ours) and not torch.equal(theirs, ours):
            misread = torch.empty_like(expected)
            misread[ours[is_kept]] = _gathered(expected, theirs[is_kept])
            if _same(misread, content):
                yield cause


def _numbers_in_files(weight: Weight, source: Source, tp_size: int) -> Tensor:
    """The numbers of ``weight`` in the order in which a correct directory like ``source`` holds them, rank by rank."""
    if source.kind is Kind.HUGGING_FACE:
        return torch.arange(sum(shape[cut_dim(weight)] for shape in weight.hf_shapes))
    parts = stored_weights(weight, Structure.FUSED if source.storage is None else source.storage.structure)
    return torch.cat([numbers(weight, shard_spans(part, tp_size, rank)) for rank in range(tp_size) for part in parts])


def numbers(weight: Weight, spans: Iterable[Span]) -> Tensor:
    """The numbers of ``weight`` that ``spans`` hold."""
    firsts, first = {}, 0
    for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
        firsts[name] = first
        first += shape[cut_dim(weight)]
    return torch.cat([
        torch.full((span.length,), PADDING) if span.key is None
        else torch.arange(span.start, span.stop) + firsts[span.key]
        for span in spans
    ])


def _mistakes(weight: Weight, tp_size: int) -> Iterator[tuple[str, Tensor]]:
    """(cause, ``theirs``) of every mistake that is known."""
    sizes = [shape[cut_dim(weight)] for shape in weight.hf_shapes]
    if weight.fusion is Fusion.PER_HEAD_QKV:
        sizes = [sizes[0] // 3] * 3
    whole = torch.arange(sum(sizes)).split(sizes)
    ranks = [_padded(part, -len(part) % tp_size).reshape(tp_size, -1) for part in whole]
    yield from _padding_mistakes(whole, tp_size, ranks)
    if weight.fusion is Fusion.GATE_UP:
        yield from _gate_up_mistakes(whole, tp_size, ranks)
    elif weight.fusion in (Fusion.PER_HEAD_QKV, Fusion.GROUPED_QKV):
        yield from _qkv_mistakes(weight, ranks, "")
        if tp_size > 1:
            yield from _qkv_mistakes(weight, [part[None] for part in whole], " as a whole, and then cut")


def _qkv_mistakes(weight: Weight, qkv: Sequence[Tensor], scope: str) -> Iterator[tuple[str, Tensor]]:
    """``qkv``: numbers of q, k and v, [rank, number] each."""
    is_vision, width = weight.fusion is Fusion.PER_HEAD_QKV, weight.head_dim
    unit, num_ranks, num_units = "head" if is_vision else "group", len(qkv[0]), qkv[1].shape[1] // width

    def per_unit(parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([part.reshape(num_ranks, num_units, -1) for part in parts], dim=2).flatten()

    for order in permutations(range(3)):
        letters, parts = ["QKV"[index] for index in order], [qkv[index] for index in order]
        # Release 2.1.0 and those from 26.0.0 on write the ViT's qkv per head, as their runtime reads it.
        version = ", as MindSpeed-MM 2.2.0 and 2.3.0 leave the ViT's; convert again with mm-convert hf_to_mm"
        is_known = is_vision and letters == ["Q", "K", "V"] and num_ranks == 1
        yield f"qkv order: [{'; '.join(letters)}] one after the other{scope}{version * is_known}", torch.cat(
            parts, dim=1).flatten()
        yield f"qkv order: per {unit} [{', '.join(letters).lower()}]{scope}", per_unit(parts)
    dealt = qkv[0].reshape(num_ranks, -1, num_units, width).transpose(1, 2)
    yield (f"qkv order: per {unit} [q, k, v], with the query heads dealt to the groups in turn{scope}",
           per_unit([dealt, *qkv[1:]]))
    if qkv[0].shape == qkv[1].shape:
        yield f"qkv order: q, k, v row by row{scope}", torch.stack(list(qkv), dim=2).flatten()


def _gate_up_mistakes(
    whole: Sequence[Tensor], tp_size: int, ranks: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    gate, up = ranks
    yield "gate/up order: [up; gate] instead of [gate; up]", torch.cat((up, gate), dim=1).flatten()
    yield "gate/up order: gate and up row by row", torch.stack((gate, up), dim=2).flatten()
    num_padding = gate.numel() + up.numel() - len(whole[0]) - len(whole[1])
    for names, order in (("[gate; up]", whole), ("[up; gate]", whole[::-1])):
        yield (f"gate/up order: {names} is cut over the ranks as a whole, instead of gate and up each"
               + ", with the padding after both" * (num_padding > 0)), _padded(torch.cat(order), num_padding)
    for size in _JOINED_TP_SIZES if tp_size == 1 else ():
        if len(whole[0]) % size == 0:
            joined = torch.cat([part.reshape(size, -1) for part in whole], dim=1).flatten()
            yield f"gate/up order: the [gate; up] of {size} ranks joined as they are", joined


def _padding_mistakes(
    whole: Sequence[Tensor], tp_size: int, ranks: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Where zeros may be, if not after the last number of each part."""
    length = ranks[0].shape[1]
    if tp_size * length == len(whole[0]):
        return
    spread = [torch.stack([_padded(piece, length - len(piece)) for piece in part.tensor_split(tp_size)])
              for part in whole]
    yield "padding: at the end of every rank instead of the last", torch.cat(spread, dim=1).flatten()
    before = [part.flatten().roll(tp_size * length - len(whole[0])).reshape(tp_size, -1) for part in ranks]
    yield "padding: before the weights instead of after them", torch.cat(before, dim=1).flatten()


def _padded(part: Tensor, num_padding: int) -> Tensor:
    return torch.cat((part, torch.full((num_padding,), PADDING)))


def _swapped_ranks(expected: Tensor, content: Tensor, ours: Tensor, tp_size: int) -> Iterator[tuple[str, Tensor]]:
    """Every rank may hold what another rank should."""
    shards, owners = ours.reshape(tp_size, -1), []
    for rank, shard in enumerate(shards):
        is_kept = shard != PADDING
        fits = [other for other, theirs in enumerate(shards)
                if _same(_gathered(expected, theirs[is_kept]), content[shard[is_kept]])]
        owners.append(rank if rank in fits or not fits else fits[0])
    yield (f"transposed cut: the ranks {', '.join(map(str, range(tp_size)))} hold the shards of the ranks "
           f"{', '.join(map(str, owners))}"), shards[owners].flatten()


# Matrices that are cut or turned in another way


def _cut_causes(weight: Weight, unequal: Sequence[Unequal], right: Source, found: Source) -> Iterator[str]:
    """Tried on matrices that hold one Hugging Face tensor, in shards of the right shape."""
    for part in stored_weights(weight, Structure.CANONICAL):
        (key,) = part.hf_names
        views = list(dict.fromkeys(one.view for one in found.index.stretches(key)))
        is_alone = all({span.key for span in view.spans} <= {key, None} for view in views)
        if is_alone and any(one.key == key for one in unequal):
            causes = {cut_cause(part, view.stored, len(views), rank, found, right) for rank, view in enumerate(views)}
            if len(causes) == 1 and None not in causes:
                yield causes.pop()


def misfit_cause(misfit: Misfit, side: Source, other: Source) -> str | None:
    """Why a stored tensor of ``side`` has another shape, tried on the ``other`` directory's."""
    if misfit.kind != "shape":
        return None
    parts = stored_weights(misfit.weight, Structure.CANONICAL) if misfit.hf_name else [misfit.weight]
    part = next(part for part in parts if misfit.hf_name in (None, *part.hf_names))
    cause = cut_cause(part, misfit.stored, side.tp_size, misfit.tp_rank, side, other)
    return cause and f"{cause} (in {side.path})"


def cut_cause(
    weight: Weight, stored: Stored, tp_size: int, tp_rank: int, found: Source, right: Source
) -> str | None:
    """What the matrix ``stored`` holds instead of one rank's shard of ``weight``."""
    if len(stored.shape) != 2 or len(weight.shape) != 2:
        return None
    dim = cut_dim(weight)
    size = weight.shape[1 - dim]
    own = numbers(weight, shard_spans(weight, tp_size, tp_rank))
    tries = [("the matrix is transposed", own, range(size), True)]
    if tp_size > 1 and weight.tp_dim is not None:
        every, width = numbers(weight, shard_spans(weight, 1, 0)), size // tp_size
        part = range(tp_rank * width, (tp_rank + 1) * width)
        tries += [("every rank holds the whole, which is not cut", every, range(size), False),
                  (f"it is cut along dimension {1 - dim} instead of {dim}", every, part, False),
                  ("the matrix was transposed and then cut", every, part, True)]
    for cause, order, places, is_transposed in tries:
        shape = (len(order), len(places)) if dim == 0 else (len(places), len(order))
        is_shape = stored.shape == (shape[::-1] if is_transposed else shape)
        is_new = is_transposed or stored.shape != local_shape(weight, tp_size)
        if is_shape and is_new and _holds(weight, stored, (order, places), (dim == 0) == is_transposed, found, right):
            return f"transposed cut: {cause}"
    return None


def _holds(
    weight: Weight, stored: Stored, what: tuple[Tensor, range], numbers_are_columns: bool, found: Source, right: Source
) -> bool:
    """Whether ``stored`` holds these numbers at these places of ``weight``, and not one value throughout."""
    order, places = what
    places = places[: max(1, SAMPLE_ELEMENTS // max(len(order), weight.shape[cut_dim(weight)]))]
    expected = _whole_sample(right, weight, places)
    if expected is None:
        return False
    integers = np.memmap(found.path / stored.file, f"i{stored.dtype.itemsize}", "r", stored.offset, stored.shape)
    integers = integers.T if numbers_are_columns else integers
    content = torch.from_numpy(np.array(integers[:, : len(places)], order="C")).view(stored.dtype)
    expected, content = _as_coarser((expected, content))
    return not _is_constant(content) and _same(_gathered(expected, order), content)


# Other tensors, and other values


def _tied_causes(weight: Weight, unequal: Unequal, source: Source, target: Source) -> Iterator[str]:
    """An output layer that is the embedding in one of the directories, or the other way round."""
    (key, *more), names = weight.hf_names, (HF_OUTPUT_LAYER_NAME, HF_EMBEDDING_NAME)
    if more or key not in names:
        return
    is_head = key == HF_OUTPUT_LAYER_NAME
    words = ("output layer", "embedding") if is_head else ("embedding", "output layer")
    for side, origin in ((target, target), (source, source)) if is_head else ((target, source),):
        if _is_twin(weight, (side, key), (origin, names[is_head]), unequal.place):
            yield f"tied head: the {words[0]} of {side.path} is the {words[1]} of {origin.path}"


def _is_twin(weight: Weight, one: tuple[Source, str], other: tuple[Source, str], place: int) -> bool:
    """Whether two tensors of the shape of ``weight`` are equal around a place, and not one value throughout."""
    dim, shape = cut_dim(weight), weight.shape
    if any(held_dtype(side, key, shape, dim) is None for side, key in (one, other)):
        return False
    places = _window(place, weight, shape[dim])
    samples = _as_coarser([sample(side, key, shape, dim, places) for side, key in (one, other)])
    return not _is_constant(samples[0]) and _same(*samples)


def _layer_causes(
    weight: Weight, unequal: Unequal, source: Source, target: Source, weights: Sequence[Weight]
) -> Iterator[str]:
    if weight.layer is None:
        return
    name, number = weight.name.replace(f".layers.{weight.layer}.", ".layers.{}."), weight.hf_names.index(unequal.key)
    shape, dim, first = unequal.shape, unequal.dim, unequal.index[unequal.dim]
    start = max(0, min(first - _LAYER_SIZE // 2, shape[dim] - _LAYER_SIZE))
    where = (shape, dim, _window(unequal.place, weight, SAMPLE_ELEMENTS // _LAYER_SIZE),
             range(start, min(start + _LAYER_SIZE, shape[dim])))
    content = sample(target, unequal.key, *where)
    others = [other for other in weights if other.layer not in (None, weight.layer)
              and other.name == name.format(other.layer)
              and held_dtype(source, other.hf_names[number], shape, dim) == content.dtype]
    fits = [other.layer for other in others if _same(sample(source, other.hf_names[number], *where), content)]
    if fits and not _is_constant(content):
        nearest = min(fits, key=lambda layer: abs(layer - weight.layer))
        yield f"another layer: they are the weights of layer {nearest} ({nearest - weight.layer:+d})"


def _value_causes(right: Tensor, found: Tensor) -> Iterator[str]:
    """What was done to the values of ``right``; both have the same order, shape and dtype, and differ."""
    for precision in (torch.bfloat16, torch.float16):
        if precision.itemsize < right.dtype.itemsize and _same(right.to(precision).to(found.dtype), found):
            yield f"dtype: rounded to {_short(precision)}"
    if not found.any():
        yield "only zeros, as if never written"
    if right.isfinite().all() and not found.isfinite().all():
        yield "infinite values or none at all (NaN)"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
