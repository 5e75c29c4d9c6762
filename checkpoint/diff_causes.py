"""Guesses at what made two copies of one weight differ; each is tried on the data before it is told.

A weight is given as a sample: every index along the dimension that is cut, a few places of each.  Indices are numbered
through all Hugging Face tensors of the weight, one after the other, and ``PADDING`` stands for zeros, so that an order
of rows is a tensor of numbers, and a wrong order another one.  Pure: opens no file; what is right is told by the
weight table, and only what peers get wrong is written here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from mm.weights.cut import Run, cut_dim, shard_runs
from mm.weights.table import Fusion, Weight, local_shape

PADDING = -1
_JOINED_TP_SIZES = (2, 4, 8)
"""Whose shards may have been put one after the other."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Orders = list[Tensor]
"""The numbers that each tensor-parallel rank holds, from its first index to its last."""


@dataclass(frozen=True)
class RankSample:
    """What one tensor-parallel rank holds of a weight."""

    order: Tensor
    """[index] What should be there."""
    found: Tensor
    """[index, place]"""


def bits(tensor: Tensor) -> Tensor:
    """The same bytes as integers, so that equal means equal in every bit."""
    return tensor.contiguous().view(_BITS[tensor.dtype.itemsize])


def is_constant(tensor: Tensor) -> bool:
    """Whether it is one value throughout, so that being equal proves nothing."""
    flat = bits(tensor).flatten()
    return not bool((flat != flat[0]).any())


def gathered(right: Tensor, order: Tensor) -> Tensor:
    """Rows of ``right`` ([number, place]) in ``order``; zeros for padding."""
    return torch.where((order == PADDING)[:, None], torch.zeros((), dtype=right.dtype), right[order.clamp(min=0)])


# Orders


def order_cause(weight: Weight, right: Tensor, ranks: Sequence[RankSample]) -> str | None:
    """In which wrong order, or by which wrong cut, ``ranks`` hold the rows ``right`` ([number, place])."""
    expected = bits(right)
    for cause, orders in wrong_orders(weight, [rank.order for rank in ranks]):
        if all(torch.equal(gathered(expected, order), bits(rank.found))
               for order, rank in zip(orders, ranks, strict=True)):
            return cause
    return _rank_cause(expected, ranks)


def wrong_orders(weight: Weight, right: Orders) -> Iterator[tuple[str, Orders]]:
    """(cause, order) of every mistake that is known for a weight that should have the orders ``right``."""
    found = [_padding_orders(weight, right)]
    if weight.fusion is Fusion.GATE_UP:
        found.append(_gate_up_orders(right))
    elif weight.fusion in (Fusion.PER_HEAD_QKV, Fusion.GROUPED_QKV):
        found.append(_qkv_orders(weight, right))
    for orders in found:
        for cause, order in orders:
            sizes = [len(part) for part in order]
            is_wrong = any(not torch.equal(part, ours) for part, ours in zip(order, right, strict=False))
            if is_wrong and sizes == [len(part) for part in right]:
                yield cause, order


def _qkv_orders(weight: Weight, right: Orders) -> Iterator[tuple[str, Orders]]:
    sizes = [shape[0] for shape in weight.hf_shapes]
    sizes = sizes if len(sizes) == 3 else [sizes[0] // 3] * 3
    whole = torch.arange(sum(sizes))
    for scope, owners in (("", right), (" as a whole, and then cut", [whole])):
        if scope and len(right) == 1:
            continue
        parts = [[numbers.sort().values for numbers in _split(owned, sizes)] for owned in owners]
        for cause, made in _qkv_layouts(weight, parts):
            orders = list(made[0].chunk(len(right))) if scope else made
            yield f"qkv order: {cause}{scope}", orders


def _qkv_layouts(weight: Weight, parts: list[Orders]) -> Iterator[tuple[str, Orders]]:
    """``parts``: the numbers of q, k and v in their own order, of each owner."""
    unit, width = "group" if weight.fusion is Fusion.GROUPED_QKV else "head", weight.head_dim
    for names in permutations(range(3)):
        letters = ["QKV"[index] for index in names]
        yield f"[{'; '.join(letters)}] one after the other", [torch.cat([p[i] for i in names]) for p in parts]
        in_unit = ", ".join(letters).lower()
        yield f"per {unit} [{in_unit}]", [_interleaved([p[i] for i in names], len(p[1]) // width) for p in parts]
    yield f"per {unit} [q, k, v], with the query heads dealt to the groups in turn", [
        _interleaved([_dealt(q, len(k) // width, width), k, v], len(k) // width) for q, k, v in parts
    ]
    if all(len(part) == len(owned[0]) for owned in parts for part in owned):
        yield "q, k, v row by row", [torch.stack(owned, dim=1).flatten() for owned in parts]


def _split(numbers: Tensor, sizes: Sequence[int]) -> Orders:
    """Those of ``numbers`` that belong to each of the tensors of ``sizes``."""
    parts, first = [], 0
    for size in sizes:
        parts.append(numbers[(numbers >= first) & (numbers < first + size)])
        first += size
    return parts


def _interleaved(parts: Orders, num_units: int) -> Tensor:
    return torch.cat([part.reshape(num_units, -1) for part in parts], dim=1).flatten()


def _dealt(query: Tensor, num_groups: int, width: int) -> Tensor:
    """Heads 0, g, 2g... first, then 1, g + 1..."""
    return query.reshape(-1, num_groups, width).transpose(0, 1).flatten()


def _gate_up_orders(right: Orders) -> Iterator[tuple[str, Orders]]:
    num_ranks, length = len(right), len(right[0])
    halves = [order.chunk(2) for order in right]
    num_numbers = sum(int((order != PADDING).sum()) for order in right)
    gate, up = torch.arange(num_numbers).chunk(2)
    yield "gate/up order: [up; gate] instead of [gate; up]", [torch.cat((up, gate)) for gate, up in halves]
    yield "gate/up order: gate and up row by row", [torch.stack(pair, dim=1).flatten() for pair in halves]
    for cause, order in (("[gate; up]", (gate, up)), ("[up; gate]", (up, gate))):
        stacked = _padded(torch.cat(order), num_ranks * length)
        yield (f"gate/up order: {cause} is cut over the ranks as a whole, instead of gate and up each"
               + ", with the padding after both" * (num_ranks * length > num_numbers)), list(stacked.chunk(num_ranks))
    if num_ranks == 1:
        for size in _JOINED_TP_SIZES:
            if len(gate) % size == 0:
                pairs = zip(gate.chunk(size), up.chunk(size), strict=True)
                joined = torch.cat([torch.cat(pair) for pair in pairs])
                yield f"gate/up order: the [gate; up] of {size} ranks joined as they are", [joined]


def _padding_orders(weight: Weight, right: Orders) -> Iterator[tuple[str, Orders]]:
    """Where zeros may be, if not after the last index of the whole."""
    if not any((order == PADDING).any() for order in right):
        return
    num_ranks, num_parts = len(right), 2 if weight.fusion is Fusion.GATE_UP else 1
    num_numbers = sum(int((order != PADDING).sum()) for order in right)
    length = len(right[0]) // num_parts
    parts = torch.arange(num_numbers).chunk(num_parts)
    spread = [[_padded(piece, length) for piece in part.tensor_split(num_ranks)] for part in parts]
    at_ends = [torch.cat(rank) for rank in zip(*spread, strict=True)]
    yield "padding: at the end of every rank instead of the last", at_ends
    padding = torch.full((num_ranks * length - num_numbers // num_parts,), PADDING)
    before = [torch.cat((padding, part)).chunk(num_ranks) for part in parts]
    at_start = [torch.cat(rank) for rank in zip(*before, strict=True)]
    yield "padding: before the weights instead of after them", at_start


def _padded(numbers: Tensor, length: int) -> Tensor:
    return torch.cat((numbers, torch.full((max(0, length - len(numbers)),), PADDING)))


@dataclass(frozen=True)
class Cut:
    """What a stored matrix may hold instead of its shard."""

    cause: str
    dim: int
    """Of the stored matrix, along which the numbers of ``order`` are."""
    order: Tensor
    shift: int
    """Place of the weight at which the other dimension of the stored matrix begins."""


def wrong_cuts(weight: Weight, tp_size: int, tp_rank: int, shape: tuple[int, ...]) -> Iterator[Cut]:
    """What a stored matrix of this ``shape`` may be instead of one rank's shard of ``weight``."""
    dim, expected, whole = cut_dim(weight), local_shape(weight, tp_size), weight.shape
    if len(shape) != 2 or len(whole) != 2:
        return
    other, own, every = 1 - dim, numbers(weight, tp_size, tp_rank), numbers(weight, 1, 0)
    if shape == expected[::-1]:
        yield Cut("transposed cut: the matrix is transposed", other, own, 0)
    if tp_size == 1 or weight.tp_dim is None:
        return
    if shape == whole:
        yield Cut("transposed cut: every rank holds the whole, which is not cut", dim, every, 0)
    width = whole[other] // tp_size
    cut = (whole[dim], width) if dim == 0 else (width, whole[dim])
    if shape == cut:
        yield Cut(f"transposed cut: it is cut along dimension {other} instead of {dim}", dim, every, tp_rank * width)
    if shape == cut[::-1]:
        yield Cut("transposed cut: the matrix was transposed and then cut", other, every, tp_rank * width)


def numbers(weight: Weight, tp_size: int, tp_rank: int) -> Tensor:
    """The order of one rank's shard."""
    return run_numbers(weight, shard_runs(weight, tp_size, tp_rank))


def run_numbers(weight: Weight, runs: Iterable[Run]) -> Tensor:
    """The order that ``runs`` say."""
    first, firsts = 0, {}
    for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
        firsts[name] = first
        first += shape[cut_dim(weight)]
    return torch.cat([
        torch.full((run.length,), PADDING) if run.key is None
        else torch.arange(run.length) + firsts[run.key] + run.start
        for run in runs
    ])


def _rank_cause(expected: Tensor, ranks: Sequence[RankSample]) -> str | None:
    """Whether every rank holds what another rank should."""
    owners = []
    for rank in ranks:
        fits = [number for number, other in enumerate(ranks) if len(other.order) == len(rank.order)
                and torch.equal(gathered(expected, other.order), bits(rank.found))]
        if not fits:
            return None
        owners.append(len(owners) if len(owners) in fits else fits[0])
    if owners == list(range(len(ranks))):
        return None
    return (f"transposed cut: the ranks {', '.join(map(str, range(len(ranks))))} hold the shards of the ranks "
            f"{', '.join(map(str, owners))}")


# Values


def value_cause(right: Tensor, found: Tensor) -> str | None:
    """What was done to the values of ``right``; both have the same order, shape and dtype, and differ."""
    for precision in (torch.bfloat16, torch.float16):
        if precision.itemsize < right.dtype.itemsize and is_rounding(right, found, precision):
            return f"dtype: rounded to {_short(precision)}"
    if not found.any():
        return "only zeros, as if never written"
    if right.isfinite().all() and not found.isfinite().all():
        return "infinite values or none at all (NaN)"
    return None


def is_rounding(right: Tensor, found: Tensor, precision: torch.dtype) -> bool:
    """Whether ``found`` is ``right`` rounded to ``precision``, in whatever dtype it is kept."""
    return torch.equal(bits(right.to(precision).to(found.dtype)), bits(found))


def precision_order(dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[torch.dtype, torch.dtype]:
    """(coarser, finer) of two dtypes."""
    coarser, finer = sorted(dtypes, key=lambda dtype: -torch.finfo(dtype).eps)
    return coarser, finer


def flipped_bit_cause(num_different: int, num_bits: int) -> str | None:
    """``num_bits`` are those that differ in the only differing element."""
    return "one flipped bit: a damaged copy" if (num_different, num_bits) == (1, 1) else None


def layer_cause(layer: int, found: Tensor, others: Mapping[int, Tensor]) -> str | None:
    """Whether ``found`` is what another layer should hold; ``others`` are the layers of the other directory."""
    fits = [number for number, other in others.items() if torch.equal(bits(other), bits(found))]
    if not fits or is_constant(found):
        return None
    nearest = min(fits, key=lambda number: abs(number - layer))
    return f"another layer: they are the weights of layer {nearest} ({nearest - layer:+d})"


def amount_cause(num_different: int, num_elements: int) -> str:
    """When nothing else fits."""
    if num_different < num_elements / 100:
        return "a few values differ, as in a damaged copy or after very little training"
    return "values differ, as after training"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
