"""How long a step would take if messages took no time: each stage runs its steps in the schedule's order.

Pure arithmetic; the schedule's order is that of ``mm.parallel.order``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mm.parallel.order import stage_steps


@dataclass(frozen=True)
class SlotSeconds:
    """What one microbatch takes in one slot."""

    forward: float
    backward: float
    """0 where no gradient comes back: then nothing is waited for either."""


@dataclass(frozen=True)
class TimedStep:
    """One step of a stage."""

    is_forward: bool
    microbatch: int
    chunk: int
    start: float
    end: float


def simulate(slots: Sequence[SlotSeconds], num_microbatches: int, num_stages: int) -> list[list[TimedStep]]:
    """What each stage does when.  ``slots`` are in the order in which a microbatch passes them."""
    num_chunks = len(slots) // num_stages
    queues = [stage_steps(num_microbatches, stage, num_stages, num_chunks) for stage in range(num_stages)]
    done: dict[tuple[bool, int, int], float] = {}
    timeline: list[list[TimedStep]] = [[] for _ in range(num_stages)]
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                is_forward, (microbatch, chunk) = queue[0]
                slot = chunk * num_stages + stage
                ready = _ready(done, slots, is_forward, microbatch, slot)
                if ready is None:
                    break
                queue.pop(0)
                start = max(ready, timeline[stage][-1].end if timeline[stage] else 0.0)
                seconds = slots[slot].forward if is_forward else slots[slot].backward
                done[is_forward, microbatch, slot] = start + seconds
                timeline[stage].append(TimedStep(is_forward, microbatch, chunk, start, start + seconds))
    return timeline


def _ready(
    done: dict[tuple[bool, int, int], float], slots: Sequence[SlotSeconds], is_forward: bool, microbatch: int, slot: int
) -> float | None:
    """When what the step waits for is there; None: not known yet."""
    if is_forward:
        return 0.0 if slot == 0 else done.get((True, microbatch, slot - 1))
    if slots[slot].backward == 0 or slot == len(slots) - 1:
        return done.get((True, microbatch, slot))
    return done.get((False, microbatch, slot + 1))


def step_seconds(slots: Sequence[SlotSeconds], num_microbatches: int, num_stages: int) -> float:
    """From the first stage's start to the last stage's end."""
    return max(step.end for stage in simulate(slots, num_microbatches, num_stages) for step in stage)
