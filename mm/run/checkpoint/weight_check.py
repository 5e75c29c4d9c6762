"""Compares the weights that several ranks hold: silent damage in one replica would otherwise spread, or be saved.

A rank's weight equals that of every data- and context-parallel rank, of every tensor-parallel rank if it is not cut,
and a tied embedding equals its copy on the last stage.  The check compares exact sums of the bits, not floats.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from mm.errors import AgreedError
from mm.parallel.agreement import all_of
from mm.parallel.health.heartbeat import ranks_text
from mm.run.step import Setup

_CHUNK_ELEMENTS = 1 << 24
"""Elements that are widened to 64 bits at a time: 128 MiB."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Digest = tuple[int, int]


def digest(tensor: Tensor) -> Digest:
    """The sum of a tensor's bit patterns as integers, and the sum of their squares, both modulo 2**64.

    Integer sums do not depend on their order, so equal tensors have equal digests on any device.  One changed element
    always changes the first sum.
    """
    flat = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for chunk in flat.split(_CHUNK_ELEMENTS):
        wide = chunk.long()
        sums += torch.stack([wide.sum(), (wide * wide).sum()])
    first, second = sums.tolist()
    return first, second


class WeightCheck:
    """Compares the ranks' weights with ``--check-weights-interval``: at its steps, and before each save."""

    def __init__(self, interval: int | None, setup: Setup) -> None:
        self._interval, self._setup = interval, setup
        self._last = 0

    def after(self, iteration: int) -> None:
        """Compare them if it is due after this step."""
        if self._interval is not None and iteration % self._interval == 0:
            self.check(iteration)

    def check(self, iteration: int) -> None:
        """Compare them, once a step."""
        if self._interval is not None and self._last != iteration:
            check_weights(self._setup, iteration)
            self._last = iteration


def check_weights(setup: Setup, iteration: int) -> None:
    """Compare the weights of all ranks after this iteration.  Raises AgreedError on every rank if any differ, with the
    ranks and tensors."""
    setup.finish_gathering()
    mesh, stage = setup.mesh, setup.stage
    # of sharded weights, only those that are not cut are held twice, by tensor-parallel ranks
    compared = [one for one in stage.weights if not stage.shards_weights or not (one.is_cut or mesh.tp_size == 1)]
    own = tuple((str(weight.hf_names), weight.name, mesh.tp_rank if weight.is_cut else -1, digest(values))
                for weight, values in stage.whole_weights(compared))
    held: dict[tuple[str, int], dict[int, Digest]] = defaultdict(dict)
    names: dict[str, str] = {}
    for rank, weights in all_of(((mesh.rank, own),), mesh.control_group):
        for key, name, tp_rank, found in weights:
            held[key, tp_rank][rank] = found
            names.setdefault(key, name)
    problems = [f"{names[key]}: {_outliers(by_rank)}" for (key, _), by_rank in held.items()
                if len(set(by_rank.values())) > 1]  # fmt: skip
    if problems:
        raise AgreedError(
            f"after iteration {iteration}, ranks that must hold the same weights hold different ones: "
            f"{'; '.join(problems[:5])}{f'; and {len(problems) - 5} other tensors' if len(problems) > 5 else ''}. "
            f"Nothing was saved since the last check (--check-weights-interval): continue from the last checkpoint, "
            f"and test the memory and the device of that rank's machine")


def _outliers(by_rank: Mapping[int, Digest]) -> str:
    """Which ranks differ from the majority; all of them, if there is none."""
    (usual, count), *_ = Counter(by_rank.values()).most_common()
    if 2 * count <= len(by_rank):
        return f"{ranks_text(sorted(by_rank))} do not agree"
    wrong = [rank for rank, found in sorted(by_rank.items()) if found != usual]
    others = [rank for rank, found in sorted(by_rank.items()) if found == usual]
    return f"{ranks_text(wrong)} differs from {ranks_text(others)}" if len(wrong) == 1 else (
        f"{ranks_text(wrong)} differ from {ranks_text(others)}")
