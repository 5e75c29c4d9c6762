"""Fuses a weight from Hugging Face's tensors (q, k, v; gate, up), and cuts it over tensor-parallel ranks.

Pure tensor algebra on what ``mm.weights.table`` states.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mm.errors import UserError
from mm.weights.table import Fusion, Weight


def fuse(weight: Weight, hf_tensors: Sequence[Tensor]) -> Tensor:
    """Our tensor from the Hugging Face tensors, in the order of ``weight.hf_names``.

    Only the layout matters, not the size: ``fuse_pieces`` fuses one rank's pieces with it.
    """
    match weight.fusion:
        case Fusion.COPY | Fusion.STACKED_QKV:
            return hf_tensors[0]
        case Fusion.GATE_UP:
            return torch.cat(list(hf_tensors))
        case Fusion.PER_HEAD_QKV:
            tensor, rest = hf_tensors[0], hf_tensors[0].shape[1:]
            return tensor.reshape(3, -1, weight.head_dim, *rest).transpose(0, 1).reshape(-1, *rest)
        case Fusion.GROUPED_QKV:
            num_groups = hf_tensors[1].shape[0] // weight.head_dim
            grouped = [tensor.reshape(num_groups, -1, *tensor.shape[1:]) for tensor in hf_tensors]
            return torch.cat(grouped, dim=1).flatten(0, 1)


def local_shape(weight: Weight, tp_size: int) -> tuple[int, ...]:
    """Shape of one TP rank's shard in files, the same on every rank: 3420 ffn columns at TP 8 are padded to 3424.

    In memory an ffn is wider: ``mm.weights.shard``.
    """
    if weight.tp_dim is None:
        return weight.shape
    shape = list(weight.shape)
    shape[weight.tp_dim] = shape[weight.tp_dim] // weight.num_units * _units_per_rank(weight, tp_size)
    return tuple(shape)


def shard(weight: Weight, whole: Tensor, tp_size: int, tp_rank: int) -> Tensor:
    """One TP rank's part of a whole fused tensor, zero-padded; [gate; up] gives [gate_i; up_i]."""
    assert whole.shape == weight.shape, (weight.name, whole.shape)
    if weight.tp_dim is None or weight.shards(tp_size)[0] == 1:
        return whole
    num_blocks = num_stacked_blocks(weight)
    block_size = weight.shape[weight.tp_dim] // num_blocks
    kept = _rank_range(weight, block_size, tp_size, tp_rank)
    padded_size = local_shape(weight, tp_size)[weight.tp_dim] // num_blocks
    blocks = whole.chunk(num_blocks, weight.tp_dim)
    pieces = [block.narrow(weight.tp_dim, kept.start, len(kept)) for block in blocks]
    return torch.cat([_zero_pad(piece, weight.tp_dim, padded_size) for piece in pieces], dim=weight.tp_dim)


def unshard(weight: Weight, shards: Sequence[Tensor]) -> Tensor:
    """The whole fused tensor from the shards of all TP ranks, without padding.  A replicated one is rank 0's."""
    assert all(shard.shape == local_shape(weight, len(shards)) for shard in shards), weight.name
    if weight.tp_dim is None or weight.shards(len(shards))[0] == 1:
        return shards[0]
    num_blocks = num_stacked_blocks(weight)
    block_size = weight.shape[weight.tp_dim] // num_blocks
    padded = zip(*(shard.chunk(num_blocks, dim=weight.tp_dim) for shard in shards), strict=True)
    blocks = [torch.cat(pieces, dim=weight.tp_dim).narrow(weight.tp_dim, 0, block_size) for pieces in padded]
    return torch.cat(blocks, dim=weight.tp_dim)


def hf_ranges(weight: Weight, tp_size: int, tp_rank: int) -> tuple[tuple[range, ...], ...]:
    """For each Hugging Face tensor, the ranges along ``tp_dim`` that one TP rank needs: no rank reads more.

    ``fuse_pieces`` makes the rank's shard of them.  Only for weights that have a ``tp_dim``.
    """
    assert weight.tp_dim is not None, weight.name
    num_blocks = 3 if weight.fusion in (Fusion.PER_HEAD_QKV, Fusion.STACKED_QKV) else 1
    ranges: list[tuple[range, ...]] = []
    for shape in weight.hf_shapes:
        block_size = shape[weight.tp_dim] // num_blocks
        kept = _rank_range(weight, block_size, tp_size, tp_rank)
        ranges.append(tuple(range(kept.start + b * block_size, kept.stop + b * block_size) for b in range(num_blocks)))
    return tuple(ranges)


def fuse_pieces(weight: Weight, pieces: Sequence[Tensor], tp_size: int) -> Tensor:
    """One TP rank's shard from its piece of each Hugging Face tensor: the joined ``hf_ranges``."""
    if weight.pads and weight.tp_dim is not None:
        padded_size = local_shape(weight, tp_size)[weight.tp_dim] // num_stacked_blocks(weight)
        pieces = [_zero_pad(piece, weight.tp_dim, padded_size) for piece in pieces]
    return fuse(weight, pieces)


def num_stacked_blocks(weight: Weight) -> int:
    """Stacked parts of our tensor that are cut one by one."""
    return {Fusion.GATE_UP: 2, Fusion.STACKED_QKV: 3}.get(weight.fusion, 1)


def _units_per_rank(weight: Weight, tp_size: int) -> int:
    tp_size, _ = weight.shards(tp_size)
    if weight.num_units % tp_size and not weight.pads:
        raise UserError(f"{weight.name} has {weight.num_units} units (heads, key/value groups or vocabulary rows) "
                        f"along dimension {weight.tp_dim}, which tensor parallel size {tp_size} does not divide; "
                        f"choose a size that does.")
    return -(-weight.num_units // tp_size)


def _rank_range(weight: Weight, block_size: int, tp_size: int, tp_rank: int) -> range:
    """The real (not padding) part of a block of ``block_size`` that belongs to one rank."""
    unit_size, per_rank = block_size // weight.num_units, _units_per_rank(weight, tp_size)
    _, shard = weight.shards(tp_size, tp_rank)
    return range(*(min(index * per_rank, weight.num_units) * unit_size for index in (shard, shard + 1)))


def _zero_pad(tensor: Tensor, dim: int, size: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, size - tensor.shape[dim]))
