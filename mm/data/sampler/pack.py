"""Packing: whole samples combined into as few microbatches as a budget allows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Budget:
    """Upper limits for one microbatch."""

    num_tokens: int
    """No single sample has more."""
    num_patches: int | None = None
    """A sample with more shares its microbatch with text-only samples only."""


def fullest_packs(num_tokens: np.ndarray, num_patches: np.ndarray, budget: Budget) -> list[list[int]]:
    """Few, full packs: lists of sample numbers, counted from 0; each sample once.

    Best fit decreasing: the longest sample first, each into the fullest pack with room.  With a budget of patches, a
    sample's size is the larger of its shares of the two budgets, and a pack's room is the smaller.  Text-only samples
    follow last; for them only tokens count.
    """
    packs = _Packs(budget.num_tokens)
    tokens, patches = num_tokens.astype(np.int64), num_patches.astype(np.int64)
    if budget.num_patches is None:
        packs.fill(tokens, np.arange(len(tokens)))
        return packs.members
    as_tokens = -(-patches * budget.num_tokens // budget.num_patches)
    packs.fill(np.maximum(tokens, as_tokens), np.flatnonzero(patches))
    used = [int(tokens[members].sum()) for members in packs.members]
    packs = _Packs(budget.num_tokens, packs.members, [budget.num_tokens - tokens_used for tokens_used in used])
    packs.fill(tokens, np.flatnonzero(patches == 0))
    return packs.members


class _Packs:
    """Packs, indexed by free room.

    A bitmap of the amounts of room that exist finds the pack to use, so time grows with the number of samples, not with
    the number of packs.
    """

    def __init__(self, size: int, members: Sequence[list[int]] = (), rooms: Sequence[int] = ()) -> None:
        self.members = list(members)
        self._size = size
        self._by_room: dict[int, list[int]] = {}
        self._rooms = 0  # bit r: _by_room[r] has a pack
        for pack, room in enumerate(rooms):
            self._put(pack, room)

    def fill(self, needs: np.ndarray, numbers: np.ndarray) -> None:
        """Put ``numbers`` into packs; number n takes up ``needs[n]``, or a whole pack if that is more than its size."""
        for one in numbers[np.argsort(-needs[numbers], kind="stable")].tolist():
            needed = int(needs[one])
            candidates = self._rooms >> needed
            if candidates:
                room = needed + (candidates & -candidates).bit_length() - 1
                pack = self._by_room[room].pop()
                if not self._by_room[room]:
                    self._rooms ^= 1 << room
            else:
                room, pack = max(self._size, needed), len(self.members)
                self.members.append([])
            self.members[pack].append(one)
            self._put(pack, room - needed)

    def _put(self, pack: int, room: int) -> None:
        self._by_room.setdefault(room, []).append(pack)
        self._rooms |= 1 << room
