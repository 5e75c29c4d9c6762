"""The order in which a stage runs its forward and backward steps: megatron's schedules, as data.

Pure functions of counts.  They know neither torch nor megatron; tests/parallel/test_order.py compares them with
megatron's own tables.
"""

from collections.abc import Iterator, Sequence

ChunkPass = tuple[int, int]
"""Microbatch and chunk."""


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


def stage_steps(num_microbatches: int, stage: int, num_stages: int, num_chunks: int) -> list[tuple[bool, ChunkPass]]:
    """Forward (True) and backward steps of a stage, in their order."""
    forward = forward_order(num_microbatches, num_stages, num_chunks)
    backward = backward_order(forward)
    num_warmup = num_warmup_steps(num_microbatches, stage, num_stages, num_chunks)
    steps = [(True, chunk_pass) for chunk_pass in forward[:num_warmup]]
    for ahead, behind in zip(forward[num_warmup:], backward, strict=False):
        steps += [(True, ahead), (False, behind)]
    return steps + [(False, turn) for turn in backward[len(forward) - num_warmup :]]


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
