"""What attention reads besides the rows of its layer: positions, segments, other ranks' rows, and earlier tokens, whose
keys and values are cached so that a new token costs only one row.

A pass processes either whole sequences, as packed segments with the trainer's attention, or one new token of each
sequence, which attends to everything in its sequence.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mm.device.attention import Kernel, Segments
from mm.model.layers.lora_linear import NO_KEYS, RowKeys
from mm.model.parallel.ring import Ring, Ulysses
from mm.model.parallel.sharded_rows import ShardedRows

_ROOM_TOKENS = 256
"""Spare rows of a sequence when it grows, because growing copies all rows."""


@dataclass(frozen=True, eq=False)
class Places:
    """Where the rows of one pass belong, on the device."""

    sequences: Tensor
    """int64 [rows]"""
    numbers: Tensor
    """int64 [rows]: the token's index within its sequence."""
    longest: int
    """Tokens of the longest sequence, including the new ones."""
    lengths: Tensor | None = None
    """int64 [sequences]: tokens of each sequence, including the new one; None when whole sequences are processed."""

    @classmethod
    def of_sequences(cls, lengths: Sequence[int], device: torch.device) -> "Places":
        """Whole sequences, one after another."""
        counts = torch.tensor(lengths)
        sequences = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        numbers = torch.cat([torch.arange(length) for length in lengths])
        return cls(sequences.to(device), numbers.to(device), max(lengths))

    @classmethod
    def of_new_tokens(cls, lengths: Sequence[int], device: torch.device) -> "Places":
        """One new token of each sequence; ``lengths`` include it."""
        counts = torch.tensor(lengths).to(device)
        return cls(torch.arange(len(lengths), device=device), counts - 1, max(lengths), counts)


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's cache during one pass."""

    keys: Tensor
    """[sequences, key heads, room, head_dim], like the values."""
    values: Tensor
    places: Places

    def attend(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
        """Like ``kernel``, for the rows of this pass; stores their keys and values."""
        places = self.places
        self.keys[places.sequences, :, places.numbers] = k
        self.values[places.sequences, :, places.numbers] = v
        if places.lengths is None:
            return kernel(q, k, v, segments, causal)
        longest = places.longest
        return attend_to_kept(q, self.keys[:, :, :longest], self.values[:, :, :longest], places.lengths)


def attend_to_kept(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Attention of one query for each sequence to the first ``lengths`` of its keys: [sequences, heads, head_dim].

    Plain operations suffice: with one query per sequence the cost is reading the keys from memory, not the products.
    The softmax is in fp32, as in the fused kernels.
    """
    num_sequences, num_heads, head_dim = q.shape
    num_groups, longest = keys.shape[1:3]
    grouped = q.view(num_sequences, num_groups, num_heads // num_groups, head_dim)
    scores = (grouped @ keys.transpose(2, 3)).float() * head_dim**-0.5
    is_beyond = torch.arange(longest, device=q.device) >= lengths[:, None]
    shares = scores.masked_fill(is_beyond[:, None, None], float("-inf")).softmax(dim=-1)
    return (shares.to(q.dtype) @ values).view(num_sequences, num_heads, head_dim)


class KeyValueCache:
    """The caches of one chunk's LLM layers for the sequences of one batch."""

    def __init__(self, layers: Iterable[str], num_groups: int, like: Tensor) -> None:
        """``num_groups``: key heads on this rank.  ``like`` gives dtype, device and head size (its last dimension)."""
        self._num_groups, self._like = num_groups, like
        self._kept: dict[str, tuple[Tensor, Tensor]] = {layer: (like, like) for layer in layers}
        self._num_sequences = self._room = 0

    def during(self, places: Places) -> Mapping[str, LayerCache]:
        """Each layer's cache for one pass, by global layer number, with room for the new rows."""
        if places.lengths is None:
            self._num_sequences = int(places.sequences[-1]) + 1
        if places.longest > self._room:
            self._grow(places.longest)
        return {layer: LayerCache(*kept, places) for layer, kept in self._kept.items()}

    def keep(self, sequences: Sequence[int]) -> None:
        """Drop all other sequences and renumber these in this order."""
        index = torch.tensor(sequences, device=self._like.device)
        self._num_sequences = len(sequences)
        self._kept = {layer: (keys[index], values[index]) for layer, (keys, values) in self._kept.items()}

    def _grow(self, longest: int) -> None:
        old, self._room = self._room, longest + _ROOM_TOKENS
        shape = (self._num_sequences, self._num_groups, self._room, self._like.shape[-1])
        for layer, kept in self._kept.items():
            # Zeros: values beyond a sequence's end have weight 0, but 0 times uninitialised memory may be NaN.
            grown = self._like.new_zeros(shape), self._like.new_zeros(shape)
            for new, one in zip(grown, kept, strict=True):
                if old:
                    new[:, :, :old] = one
            self._kept[layer] = grown


@dataclass(frozen=True)
class AttentionInputs:
    """What an attention layer needs besides its rows."""

    cos: Tensor
    """[rows, head_dim]; its dtype is the one rope computes in."""
    sin: Tensor
    segments: Segments
    causal: bool
    sharded: ShardedRows | None = None
    """Under sequence parallelism, a layer's input and output are shards of the rows; its attention sees all rows, in
    the order of ``segments``.  None: each rank has all rows, in that order."""
    across: Ulysses | Ring | LayerCache | None = None
    """How attention sees tokens beyond this rank's rows: other ranks' under context parallelism (``segments`` then
    describe the tokens of all ranks), or earlier tokens when a layer caches keys and values."""
    caches: Mapping[str, LayerCache] | None = None
    """Each layer's keys and values, by its global number, during generation."""
    keys: RowKeys = NO_KEYS
