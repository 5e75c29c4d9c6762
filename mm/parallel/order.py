"""The schedule as data: the passes of a stage in their order, and when it begins to receive what they need.

Pure functions of counts, for the loop that runs the passes (``mm.parallel.pipeline.loop``), the simulation and the
memory formulas.  The order is megatron's 1F1B and its interleaved variant; tests/parallel/test_order.py compares it
with megatron's own tables.
"""

from collections.abc import Iterator, Sequence

ChunkPass = tuple[int, int]
"""Microbatch and chunk."""
Step = tuple[bool, ChunkPass]
"""A pass of a stage: whether it is a forward pass, and of what.  Also the message that the pass waits for."""


def group_size(num_microbatches: int, num_stages: int) -> int:
    """How many microbatches run through a chunk before the next chunk starts: the fewest that megatron allows.

    The last group is full, or has at least one microbatch for each stage.
    """
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
    """The order of the backward steps: the same, with the chunks from last to first."""
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
