"""Packs: whole samples laid into as few microbatches as a budget allows.

A function of lengths alone.  What a sample costs, and who trains on which pack, is not known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Budget:
    """How much one microbatch holds at most."""

    num_tokens: int
    """No sample has more."""
    num_patches: int | None = None
    """A sample with more is the only one with pictures in its microbatch."""


def fullest_packs(num_tokens: np.ndarray, num_patches: np.ndarray, budget: Budget) -> list[list[int]]:
    """Few, full packs: the samples' numbers, counted from 0; each sample once.

    Best fit, the longest samples first: each goes into the fullest pack that has room.  With a budget of patches, what
    a sample takes up is the larger of its parts of the two budgets, and room is the smaller; text follows last, for
    which only tokens count.
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
    """Packs by how much room they have.

    A bit for each amount of room that some pack has finds the one to take, so time grows with the number of samples,
    not with that of packs.
    """

    def __init__(self, size: int, members: Sequence[list[int]] = (), rooms: Sequence[int] = ()) -> None:
        self.members = list(members)
        self._size = size
        self._by_room: dict[int, list[int]] = {}
        self._rooms = 0  # bit r: a pack in _by_room[r]
        for pack, room in enumerate(rooms):
            self._put(pack, room)

    def fill(self, needs: np.ndarray, numbers: np.ndarray) -> None:
        """Put each of ``numbers`` into a pack: number n needs ``needs[n]``; with more than a pack's size, all of it."""
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
