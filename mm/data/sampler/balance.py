"""Packs of samples within a budget, and their distribution over data-parallel ranks so that each costs the same.

First greedily, the costliest first and each to the cheapest group; then by swaps between a costly and a cheap group
that halve the difference between them.  Pure functions of integers: every rank gets the same result on any machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np


@dataclass(frozen=True)
class Budget:
    """Upper limits for one microbatch."""

    num_tokens: int
    """No single sample has more."""
    num_patches: int | None = None
    """A sample with more shares its microbatch with text-only samples only."""


def fullest_packs(num_tokens: np.ndarray, num_patches: np.ndarray, budget: Budget) -> list[list[int]]:
    """Few, full packs: lists of sample numbers, each once.  Best fit decreasing: the longest sample first, each into
    the fullest pack with room.

    With a budget of patches, a sample's size is the larger of its shares of the two budgets, and text-only samples
    follow last.
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
    """Packs, indexed by free room: a bitmap of the amounts of room that exist finds the pack to use in constant time.
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


_NUM_ROUNDS = 10
"""Rounds of swaps between packs.  Twice as many bring packs of two or three videos another 1% closer."""
_NUM_RANK_ROUNDS = 40
"""Limit of rounds between ranks.  Most steps need fewer than ten."""
_NUM_PARTNERS = 4
"""Number of cheap packs or ranks in which a costly one looks for the best swap."""
_MAX_WIDTH = 48
"""At most this many samples of a pack or rank are candidates for swaps."""
_CLOSE = 512
"""Swaps end when the costliest group exceeds the mean by less than 1 / 512, or consists of one sample."""

Groups = list[list[int]]
"""Numbers, each in one group."""


@dataclass(frozen=True)
class Sizes:
    """Cost and size of some samples; int64, one entry per sample."""

    costs: np.ndarray
    num_tokens: np.ndarray
    num_patches: np.ndarray

    def __len__(self) -> int:
        return len(self.costs)

    def all_costs(self) -> np.ndarray:
        return self.costs

    def of(self, numbers: np.ndarray) -> "Sizes":
        """The sizes of these samples, in the given order."""
        return Sizes(self.costs[numbers], self.num_tokens[numbers], self.num_patches[numbers])


def even_packs(sizes: Sizes, budget: Budget, num_ranks: int, unit: int = 1, wanted: int = 1) -> Groups:
    """Few packs of even cost: the smallest multiple of ``num_ranks`` x ``unit`` that fits, or one pack per sample.

    Each rank gets at least ``wanted`` packs if there are enough samples.
    """
    num_samples = len(sizes.costs)
    assert num_samples >= num_ranks * unit and (unit == 1 or num_samples % (num_ranks * unit) == 0)
    fewest = _fewest(sizes, budget)
    most_units, wanted_units = num_samples // (num_ranks * unit), -(-wanted // unit)
    first = max(-(-fewest // (num_ranks * unit)), min(wanted_units, most_units))
    for of_each in range(first * unit, num_samples + 1, unit):
        packs = _level(sizes, min(of_each * num_ranks, num_samples), budget, num_samples)
        if packs is not None:
            return _exchanged(packs, sizes, budget, may_move=True)
    raise AssertionError("a pack for each sample always works")


def _fewest(sizes: Sizes, budget: Budget) -> int:
    """A lower bound on the number of packs: from sums, and from samples larger than half a pack."""
    amounts = [(sizes.num_tokens, budget.num_tokens)]
    if budget.num_patches is not None:
        amounts.append((np.minimum(sizes.num_patches, budget.num_patches), budget.num_patches))
    return max(1, *(max(-(-int(values.sum()) // most), int((2 * values > most).sum())) for values, most in amounts))


def even_groups(costs: np.ndarray, size: int) -> Groups:
    """Groups of exactly ``size`` samples each, of even cost."""
    nothing = np.zeros_like(costs)
    sizes, budget = Sizes(costs, nothing, nothing), Budget(num_tokens=0)
    groups = _level(sizes, len(costs) // size, budget, size)
    assert groups is not None, "these groups are limited only in their number of samples"
    return _exchanged(groups, sizes, budget, may_move=False)


def dealt(costs: np.ndarray, num_ranks: int, least: int, most: int | None = None) -> Groups:
    """Which microbatches (by their ``costs``) each rank takes: ``least`` to ``most`` each, with even total costs."""
    assert len(costs) >= least * num_ranks >= num_ranks
    ranks: Groups = [[] for _ in range(num_ranks)]
    heap, num_missing = [(0, rank) for rank in range(num_ranks)], least * num_ranks
    order, cost_of = _costliest_first(costs), costs.tolist()
    limit = len(costs) if most is None else most
    for number, one in enumerate(order):
        if num_missing == len(order) - number and limit != least:  # the rest goes to ranks with too few
            heap, limit = [entry for entry in heap if len(ranks[entry[1]]) < least], least
            heapify(heap)
        cost, rank = heappop(heap)
        num_missing -= len(ranks[rank]) < least
        ranks[rank].append(one)
        if len(ranks[rank]) < limit:
            heappush(heap, (cost + cost_of[one], rank))
    return ranks


def spread(packs: Groups, ranks: Groups, sizes: Sizes, budget: Budget) -> list[Groups]:
    """The packs of each rank, after swapping samples between the packs of ranks whose costs still differ."""
    places = _SamplePlaces([[packs[number] for number in rank] for rank in ranks], sizes, budget, num_empty=0)
    places.exchange_all(_NUM_RANK_ROUNDS)
    coming = iter(places.packs)
    return [[next(coming) for _ in rank] for rank in ranks]


def _costliest_first(costs: np.ndarray) -> list[int]:
    return np.argsort(-costs, kind="stable").tolist()


def _level(sizes: Sizes, num_groups: int, budget: Budget, most: int) -> Groups | None:
    """Put each sample, costliest first, into the cheapest group with room; None if one does not fit anywhere.

    Groups without room for a sample's tokens are set aside, the roomiest first, until a smaller sample comes.
    """
    costs, tokens, patches = sizes.costs.tolist(), sizes.num_tokens.tolist(), sizes.num_patches.tolist()
    groups: Groups = [[] for _ in range(num_groups)]
    tokens_left = [budget.num_tokens] * num_groups
    patches_left = [sum(patches) if budget.num_patches is None else budget.num_patches] * num_groups
    heap, aside = [(0, group) for group in range(num_groups)], []
    for one in _costliest_first(sizes.costs):
        while aside and -aside[0][0] >= tokens[one]:
            heappush(heap, heappop(aside)[1])
        without_patches, found = [], False
        while heap and not found:
            entry = heappop(heap)
            cost, group = entry
            if tokens_left[group] < tokens[one]:
                heappush(aside, (-tokens_left[group], entry))
            elif groups[group] and patches[one] > max(0, patches_left[group]):
                without_patches.append(entry)
            else:
                groups[group].append(one)
                tokens_left[group] -= tokens[one]
                patches_left[group] -= patches[one]
                if len(groups[group]) < most:
                    heappush(heap, (cost + costs[one], group))
                found = True
        if not found:
            return None
        for entry in without_patches:
            heappush(heap, entry)
    return groups


def _exchanged(groups: Groups, sizes: Sizes, budget: Budget, may_move: bool) -> Groups:
    """``groups`` after swaps between costly and cheap ones; ``may_move``: a sample may also move without a swap."""
    places = _SamplePlaces([[group] for group in groups], sizes, budget, int(may_move))
    places.exchange_all(_NUM_ROUNDS)
    return places.packs


class _SamplePlaces:
    """Holders (packs, or ranks with several packs) that swap samples to even out their costs.

    A table with a row per holder and a column per place, which has a sample of a pack.  An exchange swaps an entry of a
    costly row with one of a cheap row:

                  places               costs                                    costs
        holder 0  [ 8   5   nobody ]  13     -- 8 for 5 -->  [ 5   5   nobody ]  10
        holder 1  [ 5   2   nobody ]   7                     [ 8   2   nobody ]  10

    It lowers the cost of the costlier holder by ``min(change, gap - change)``.  Here the gap is 13 - 7 and the change
    8 - 5, half of it, which is optimal.  Packs keep their number of samples, unless a sample moves to an empty place.
    """

    def __init__(self, held: Sequence[Groups], sizes: Sizes, budget: Budget, num_empty: int) -> None:
        """``held`` has the packs of each holder.  Each holder gets ``num_empty`` empty places in its first pack."""
        bounded = [(sizes.num_tokens, budget.num_tokens), (sizes.num_patches, budget.num_patches)]
        bounded = [(values, most) for values, most in bounded if most is not None and values.any()]
        self._values = [np.append(values, 0) for values in (sizes.costs, *(values for values, _ in bounded))]
        self._budgets = [most for _, most in bounded]
        self._nobody = len(sizes.costs)
        self._largest = int(sizes.costs.max(initial=0))
        self.packs: Groups = [list(pack) for packs in held for pack in packs]
        samples = np.array([one for pack in self.packs for one in pack])
        packs = np.repeat(np.arange(len(self.packs)), [len(pack) for pack in self.packs])
        counts = np.array([sum(map(len, packs)) for packs in held])
        starts = np.cumsum(counts) - counts
        stride = -(-counts // _MAX_WIDTH).repeat(counts)
        places = np.arange(len(samples)) - starts.repeat(counts)
        is_kept = places % stride == 0
        rows, columns = np.arange(len(held)).repeat(counts)[is_kept], (places // stride)[is_kept]
        width = int(columns.max()) + 1
        shape = (len(held), width + num_empty)
        self._samples = np.full(shape, self._nobody)
        self._packs = np.full(shape, len(self.packs))  # padding belongs to a pack that does not exist
        self._samples[rows, columns], self._packs[rows, columns] = samples[is_kept], packs[is_kept]
        self._packs[:, width:] = packs[starts][:, None]
        self._costs = np.add.reduceat(self._values[0][samples], starts)
        first = np.flatnonzero(np.diff(packs, prepend=-1))
        self._sums = [np.append(np.add.reduceat(values[samples], first), 0) for values in self._values[1:]]

    def exchange_all(self, num_rounds: int) -> None:
        """Exchange until the holders' costs are nearly even, or no exchange helps."""
        before = self._samples.copy()
        for turn in range(num_rounds):
            mean = int(self._costs.sum()) // len(self._costs)
            if self._costs.max() <= max(mean + mean // _CLOSE, self._largest) or not self._exchange(turn):
                break
        changed = self._samples != before
        exchanged = (one[changed].tolist() for one in (self._packs, before, self._samples))
        for pack, old, new in zip(*exchanged, strict=True):
            if old != self._nobody:
                self.packs[pack].remove(old)
            if new != self._nobody:
                self.packs[pack].append(new)

    def _exchange(self, turn: int) -> bool:
        """One exchange for each of the costliest holders, with whichever of a few cheap ones lowers its cost most.

        The costliest is paired with the cheapest, and so on, shifted by ``turn`` so that an holder that no exchange
        helps changes its partners.  Returns False if no exchange helped.
        """
        order = np.argsort(self._costs, kind="stable")
        num_partners = min(_NUM_PARTNERS, len(order) - 1)
        num_sets = max(1, len(order) // (num_partners + 1))
        costly, cheap = order[::-1][:num_sets], order[: num_sets * num_partners]
        cheap = np.roll(cheap.reshape(num_partners, num_sets).T, turn, axis=0)
        width = self._samples.shape[1]
        # Every place of a costly holder with every place of its partners: [num_sets, width, num_partners * width].
        given = self._samples[costly][:, :, None]
        taken, packs = (places[cheap].reshape(num_sets, 1, -1) for places in (self._samples, self._packs))
        change = self._values[0][given] - self._values[0][taken]
        gap = (self._costs[costly][:, None] - self._costs[cheap]).repeat(width, axis=1)[:, None, :]
        fits = self._fits(given, taken, self._packs[costly][:, :, None], packs)
        gain = np.where(fits, np.minimum(change, gap - change), 0).reshape(num_sets, -1)
        best = gain.argmax(axis=1)
        helped = np.flatnonzero(gain[np.arange(num_sets), best] > 0)
        rows, columns = np.divmod(best[helped], num_partners * width)
        partners, columns = np.divmod(columns, width)
        self._swap(costly[helped], rows, cheap[helped, partners], columns)
        return len(helped) > 0

    def _swap(self, costly: np.ndarray, rows: np.ndarray, cheap: np.ndarray, columns: np.ndarray) -> None:
        """Swap the places ``rows`` of the holders ``costly`` with ``columns`` of ``cheap``.  No holder occurs twice."""
        samples, packs = self._samples, self._packs
        at_costly, at_cheap = (costly, rows), (cheap, columns)
        ends = [(costly, cheap)] + len(self._sums) * [(packs[at_costly], packs[at_cheap])]
        for values, sums, (giver, taker) in zip(self._values, (self._costs, *self._sums), ends, strict=True):
            moved = values[samples[at_costly]] - values[samples[at_cheap]]
            sums[giver] -= moved
            sums[taker] += moved
        samples[at_costly], samples[at_cheap] = samples[at_cheap], samples[at_costly]

    def _fits(self, given: np.ndarray, taken: np.ndarray, giver: np.ndarray, taker: np.ndarray) -> np.ndarray:
        """Which exchanges keep both packs within the budget, or no further above it than before."""
        no_pack = len(self.packs)
        fits = (giver != no_pack) & (taker != no_pack)
        for values, sums, budget in zip(self._values[1:], self._sums, self._budgets, strict=True):
            moved = values[given] - values[taken]
            fits &= sums[taker] + moved <= np.maximum(budget, sums[taker])
            fits &= sums[giver] - moved <= np.maximum(budget, sums[giver])
        return fits
