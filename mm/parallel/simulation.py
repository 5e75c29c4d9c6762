"""The duration of a step if messages took no time: each stage runs its steps in the order of ``mm.parallel.order``."""

from collections.abc import Sequence
from dataclasses import dataclass

from mm.parallel.order import stage_steps


@dataclass(frozen=True)
class SlotCost:
    """The cost of one microbatch in one slot: seconds, FLOPs, or any other measure of time."""

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


def simulate(costs: Sequence[Sequence[SlotCost]], num_stages: int) -> list[list[TimedStep]]:
    """The timeline of each stage.  ``costs[m][s]`` is the cost of microbatch m in slot s, in forward order of slots."""
    num_slots = len(costs[0])
    queues = [stage_steps(len(costs), stage, num_stages, num_slots // num_stages) for stage in range(num_stages)]
    done: dict[tuple[bool, int, int], float] = {}
    timeline: list[list[TimedStep]] = [[] for _ in range(num_stages)]
    while any(len(steps) < len(queue) for steps, queue in zip(timeline, queues, strict=True)):
        for stage, (steps, queue) in enumerate(zip(timeline, queues, strict=True)):
            for is_forward, (microbatch, chunk) in queue[len(steps) :]:
                slot = chunk * num_stages + stage
                ready = _ready(done, costs[microbatch], is_forward, microbatch, slot)
                if ready is None:
                    break
                start = max(ready, steps[-1].end if steps else 0.0)
                cost = costs[microbatch][slot]
                done[is_forward, microbatch, slot] = end = start + (cost.forward if is_forward else cost.backward)
                steps.append(TimedStep(is_forward, microbatch, chunk, start, end))
    return timeline


def _ready(
    done: dict[tuple[bool, int, int], float], slots: Sequence[SlotCost], is_forward: bool, microbatch: int, slot: int
) -> float | None:
    """When the step's input is ready; None if not known yet."""
    if is_forward:
        return 0.0 if slot == 0 else done.get((True, microbatch, slot - 1))
    if slots[slot].backward == 0 or slot == len(slots) - 1:
        return done.get((True, microbatch, slot))
    return done.get((False, microbatch, slot + 1))


def step_cost(costs: Sequence[Sequence[SlotCost]], num_stages: int) -> float:
    """From the first stage's start to the last stage's end."""
    return max(steps[-1].end for steps in simulate(costs, num_stages))
