"""Keys and values of tokens that were there before, kept so that each new token costs one row and no more.

A *slot* is one sequence.  A pass brings either whole sequences, as packed segments, whose attention is the trainer's;
or one new token of each slot, which attends to all that its slot holds.  Which token comes next is not known here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mm.device.attention import Kernel, Segments

_ROOM_TOKENS = 256
"""By so much, at least, the kept rows of a slot grow: growing copies all of them."""


@dataclass(frozen=True, eq=False)
class Places:
    """Where the rows of one pass belong, on the device."""

    slots: Tensor
    """int64 [rows]"""
    numbers: Tensor
    """int64 [rows]: of the token within its sequence."""
    longest: int
    """Tokens of the longest sequence, the new ones included."""
    lengths: Tensor | None = None
    """int64 [slots]: tokens of each, where every slot has one new one; None where whole sequences come."""

    @classmethod
    def of_sequences(cls, lengths: Sequence[int], device: torch.device) -> "Places":
        """Whole sequences, one after another: slot 0, slot 1, and so on."""
        counts = torch.tensor(lengths)
        slots = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        numbers = torch.cat([torch.arange(length) for length in lengths])
        return cls(slots.to(device), numbers.to(device), max(lengths))

    @classmethod
    def of_new_tokens(cls, lengths: Sequence[int], device: torch.device) -> "Places":
        """One token of each slot; ``lengths`` count it."""
        counts = torch.tensor(lengths).to(device)
        return cls(torch.arange(len(lengths), device=device), counts - 1, max(lengths), counts)


@dataclass(frozen=True, eq=False)
class LayerCache:
    """What one layer keeps, during one pass."""

    keys: Tensor
    """[slots, key heads, room, head_dim], like the values."""
    values: Tensor
    places: Places

    def attend(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
        """As ``kernel``, of the rows of this pass, whose keys and values are kept."""
        places = self.places
        self.keys[places.slots, :, places.numbers] = k
        self.values[places.slots, :, places.numbers] = v
        if places.lengths is None:
            return kernel(q, k, v, segments, causal)
        longest = places.longest
        return attend_to_kept(q, self.keys[:, :, :longest], self.values[:, :, :longest], places.lengths)


def attend_to_kept(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Attention of one query for each slot to the first ``lengths`` of its keys: [slots, heads, head_dim].

    Plain operations, which every device has: one query a slot makes the keys' way out of memory the cost, not the
    products.  The softmax is in fp32, as in the fused kernels.
    """
    num_slots, num_heads, head_dim = q.shape
    num_groups, longest = keys.shape[1:3]
    grouped = q.view(num_slots, num_groups, num_heads // num_groups, head_dim)
    scores = (grouped @ keys.transpose(2, 3)).float() * head_dim**-0.5
    is_beyond = torch.arange(longest, device=q.device) >= lengths[:, None]
    shares = scores.masked_fill(is_beyond[:, None, None], float("-inf")).softmax(dim=-1)
    return (shares.to(q.dtype) @ values).view(num_slots, num_heads, head_dim)


class KeyValueCache:
    """What the LLM layers of one chunk keep for the sequences of one batch."""

    def __init__(self, layers: Iterable[str], num_groups: int, like: Tensor) -> None:
        """``num_groups``: key heads of this rank.  ``like`` has the dtype and device, and the width of a head."""
        self._num_groups, self._like = num_groups, like
        self._kept: dict[str, tuple[Tensor, Tensor]] = {layer: (like, like) for layer in layers}
        self._num_slots = self._room = 0

    def during(self, places: Places) -> Mapping[str, LayerCache]:
        """For one pass: what each layer keeps, by its global number, with room for the rows that come."""
        if places.lengths is None:
            self._num_slots = int(places.slots[-1]) + 1
        if places.longest > self._room:
            self._grow(places.longest)
        return {layer: LayerCache(*kept, places) for layer, kept in self._kept.items()}

    def keep(self, slots: Sequence[int]) -> None:
        """Forget all other slots; those that stay are numbered anew, in this order."""
        index = torch.tensor(slots, device=self._like.device)
        self._num_slots = len(slots)
        self._kept = {layer: (keys[index], values[index]) for layer, (keys, values) in self._kept.items()}

    def _grow(self, longest: int) -> None:
        old, self._room = self._room, longest + _ROOM_TOKENS
        shape = (self._num_slots, self._num_groups, self._room, self._like.shape[-1])
        for layer, kept in self._kept.items():
            # Zeros: what is beyond a sequence's end has no weight, but 0 times an accident may be no number.
            grown = self._like.new_zeros(shape), self._like.new_zeros(shape)
            for new, one in zip(grown, kept, strict=True):
                if old:
                    new[:, :, :old] = one
            self._kept[layer] = grown
