"""The schedule as data: the passes of a stage in their order, when it begins to receive what they need, and how long
they take.

Pure functions of counts and costs, for the loop that runs the passes (``pipeline/loop.py``), for predictions and for
the memory formulas.  The order is megatron's 1F1B and its interleaved variant, compared with megatron's own tables in
tests/parallel/test_pipeline_schedule.py.  It is the same for all costs, so many pipelines of one shape are timed at
once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

ChunkPass = tuple[int, int]
"""Microbatch and chunk."""
Step = tuple[bool, ChunkPass]
"""A pass of a stage: whether it is a forward pass, and of what.  Also the message that the pass waits for."""


def group_size(num_microbatches: int, num_stages: int) -> int:
    """How many microbatches run through a chunk before the next one starts: the fewest that megatron allows.  The last
    group is full, or has at least one microbatch for each stage."""
    assert num_microbatches >= num_stages, "checked with the settings"
    sizes = range(num_stages, num_microbatches + 1)
    return next(size for size in sizes if num_microbatches % size == 0 or num_microbatches % size >= num_stages)


def forward_order(num_microbatches: int, num_stages: int, num_chunks: int) -> list[ChunkPass]:
    """The order in which every stage runs its forward steps: group by group, each through all chunks."""
    size = group_size(num_microbatches, num_stages) if num_chunks > 1 else num_microbatches
    return [
        (microbatch, chunk)
        for first in range(0, num_microbatches, size)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + size, num_microbatches))
    ]


def backward_order(forward: Sequence[ChunkPass]) -> list[ChunkPass]:
    """The same, with the chunks from last to first."""
    last = max(chunk for _, chunk in forward)
    return [(microbatch, last - chunk) for microbatch, chunk in forward]


def num_warmup_steps(num_microbatches: int, stage: int, num_stages: int, num_chunks: int) -> int:
    """Forward steps of a stage before its 1F1B phase, with or without chunks."""
    num_behind = num_stages - stage - 1
    if num_chunks > 1:
        num_behind = 2 * num_behind + (num_chunks - 1) * group_size(num_microbatches, num_stages)
    return min(num_behind, num_microbatches * num_chunks)


def stage_steps(
    num_microbatches: int, stage: int, num_stages: int, num_chunks: int, forward_only: bool = False
) -> list[Step]:  # fmt: skip
    """The passes of a stage, in their order."""
    forward = forward_order(num_microbatches, num_stages, num_chunks)
    if forward_only:
        return [(True, chunk_pass) for chunk_pass in forward]
    backward = backward_order(forward)
    num_warmup = num_warmup_steps(num_microbatches, stage, num_stages, num_chunks)
    steps = [(True, chunk_pass) for chunk_pass in forward[:num_warmup]]
    for ahead, behind in zip(forward[num_warmup:], backward, strict=False):
        steps += [(True, ahead), (False, behind)]
    return steps + [(False, turn) for turn in backward[len(forward) - num_warmup :]]


def stage_receives(
    steps: Sequence[Step], stage: int, num_stages: int, num_chunks: int, starts_ahead: bool
) -> list[list[Step]]:  # fmt: skip
    """When a stage begins to receive the messages that its ``steps`` wait for: element i before step i, which is also
    right after step i - 1, together with what that step sends.

    A message is asked for before the step that needs it; with ``starts_ahead`` after the step before it in the same
    direction, so that it arrives during computation.  The stage that the ring of chunks leads back to asks as soon as
    the other end may have sent: otherwise that send would hold up all later ones.
    """
    found: list[list[Step]] = [[] for _ in range(len(steps) + 1)]
    for is_forward in (True, False):
        places = [place for place, (direction, _) in enumerate(steps) if direction is is_forward]
        leads = stage == (0 if is_forward else num_stages - 1)
        for number, place in enumerate(places):
            microbatch, chunk = steps[place][1]
            if not leads:
                is_first = number == 0
                at = places[number - 1] + 1 if starts_ahead and not is_first else place
                found[at].append((is_forward, (microbatch, chunk)))
            elif (onward := chunk + (1 if is_forward else -1)) in range(num_chunks):
                # the other end runs this step while this stage runs the one num_stages - 1 later
                found[places[number + num_stages - 1] + 1].append((is_forward, (microbatch, onward)))
    return found


def max_sent_ahead(num_stages: int, num_chunks: int) -> int:
    """How many sends of a stage may be in flight when it starts another one, in training.

    A neighbour that sends gradients back is behind by at most half of this, so only stages that get none ever wait.
    """
    return 4 * num_stages * num_chunks


def in_flight(num_microbatches: int, stage: int, num_stages: int, num_chunks: int) -> Iterator[tuple[int, ...]]:
    """After each forward step of a stage: by chunk, how many microbatches still wait for their backward step."""
    counts = [0] * num_chunks
    for is_forward, (_, chunk) in stage_steps(num_microbatches, stage, num_stages, num_chunks):
        counts[chunk] += 1 if is_forward else -1
        if is_forward:
            yield tuple(counts)


# How long the steps take.  A message leaves when its step ends, follows the one before it on its link, and takes no
# time of the stages, because the engine starts sends and receives ahead.

Number = TypeVar("Number", float, np.ndarray)


@dataclass(frozen=True)
class SlotCost:
    """The cost of one microbatch in one slot, or of its messages across one boundary: seconds, FLOPs, or the like."""

    forward: float
    backward: float
    """0 if no gradient comes back; the stage does not wait for one then."""


@dataclass(frozen=True)
class TimedStep:
    """One step of a stage."""

    is_forward: bool
    microbatch: int
    chunk: int
    start: float
    end: float


def as_array(costs: Sequence[Sequence[SlotCost]]) -> np.ndarray:
    """``costs[m][s]`` as float64 [2, num_microbatches, num_slots]: forward, backward."""
    return np.array([[[one.forward for one in row] for row in costs],
                     [[one.backward for one in row] for row in costs]]).reshape(2, len(costs), -1)


def as_costs(costs: np.ndarray) -> list[list[SlotCost]]:
    """The reverse of ``as_array``."""
    return [[SlotCost(*both) for both in zip(*rows, strict=True)] for rows in zip(*costs.tolist(), strict=True)]


def simulate(
    costs: Sequence[Sequence[SlotCost]], num_stages: int, messages: Sequence[Sequence[SlotCost]] | None = None,
) -> list[list[TimedStep]]:  # fmt: skip
    """The timeline of each stage.  ``costs[m][s]`` is the cost of microbatch m in slot s; ``messages[m][s]`` that of
    its messages between slots s and s + 1, None if they take no time."""
    of_steps = as_array(costs)
    ends = step_ends(of_steps, num_stages, None if messages is None else as_array(messages))
    num_chunks = len(costs[0]) // num_stages
    timeline = []
    for stage in range(num_stages):
        steps = []
        for is_forward, (microbatch, chunk) in stage_steps(len(costs), stage, num_stages, num_chunks):
            at = int(not is_forward), microbatch, chunk * num_stages + stage
            end = float(ends[at])
            steps.append(TimedStep(is_forward, microbatch, chunk, end - float(of_steps[at]), end))
        timeline.append(steps)
    return timeline


def step_cost(costs: Sequence[Sequence[SlotCost]], num_stages: int) -> float:
    """The time from the first stage's start to the last stage's end."""
    return float(step_ends(as_array(costs), num_stages).max())


def even_step_cost(busy: Number, num_microbatches: Number, num_stages: int, num_chunks: int) -> Number:
    """The cost of a step with equal stages and microbatches, in which each stage works for ``busy`` (Megatron-LM,
    arXiv:2104.04473, section 2.2)."""
    return busy * (num_microbatches + (num_stages - 1) / num_chunks) / num_microbatches


def step_costs(costs: np.ndarray, num_stages: int, messages: np.ndarray | None = None) -> np.ndarray:
    """``step_cost`` of many pipelines: float64 [num_pipelines].

    ``costs``: float64 [2, num_microbatches, num_slots, num_pipelines]; ``messages`` the same with one slot fewer.
    """
    return step_ends(costs, num_stages, messages).max(axis=(0, 1, 2))


def step_ends(costs: np.ndarray, num_stages: int, messages: np.ndarray | None = None) -> np.ndarray:
    """When each step ends: float64, in the shape of ``costs``, which is as in ``step_costs``, or without its last
    dimension for one pipeline.

    A step begins when its stage is free and its input is there.  The input of a backward step is the next slot's
    gradient.  In the last slot, and in a slot with no work in the backward pass, it is the slot's own forward step.
    """
    _, num_microbatches, num_slots, *pipelines = costs.shape
    last, zeros = num_slots - 1, np.zeros(pipelines)
    has_links = messages is not None and num_stages > 1
    ends, arrived = np.zeros_like(costs), np.zeros_like(costs)
    free, links = [zeros] * num_stages, [[zeros] * num_stages for _ in range(2)]
    comes_back = costs[1] > 0
    for is_backward, microbatch, slot in _schedule(num_microbatches, num_stages, num_slots // num_stages):
        stage, ready = slot % num_stages, arrived[is_backward, microbatch, slot]
        if is_backward:
            own = ends[0, microbatch, slot]
            ready = own if slot == last else np.where(comes_back[microbatch, slot], ready, own)
        free[stage] = end = np.maximum(ready, free[stage]) + costs[is_backward, microbatch, slot]
        ends[is_backward, microbatch, slot] = end
        target = slot - 1 if is_backward else slot + 1
        if not 0 <= target <= last:
            continue
        if has_links:
            assert messages is not None, "checked above"
            link = np.maximum(end, links[is_backward][stage]) + messages[is_backward, microbatch, min(slot, target)]
            links[is_backward][stage] = end = link
        arrived[is_backward, microbatch, target] = end
    return ends


@cache
def _schedule(num_microbatches: int, num_stages: int, num_chunks: int) -> tuple[tuple[int, int, int], ...]:
    """Every step as (is_backward, microbatch, slot), each after all on which it depends, whatever the steps cost."""
    last = num_stages * num_chunks - 1
    queues = [stage_steps(num_microbatches, stage, num_stages, num_chunks) for stage in range(num_stages)]
    numbers = [0] * num_stages
    done, found = set[tuple[int, int, int]](), list[tuple[int, int, int]]()
    while len(found) < 2 * num_microbatches * (last + 1):
        before = len(found)
        for stage, queue in enumerate(queues):
            for is_forward, (microbatch, chunk) in queue[numbers[stage] :]:
                slot = chunk * num_stages + stage
                if is_forward:
                    needed = (0, microbatch, slot - 1) if slot else None
                else:
                    needed = (1, microbatch, slot + 1) if slot < last else (0, microbatch, slot)
                if needed is not None and needed not in done:
                    break
                one = int(not is_forward), microbatch, slot
                done.add(one)
                found.append(one)
                numbers[stage] += 1
        assert len(found) > before, "a schedule never waits for itself"
    return tuple(found)
