"""The timeline of a step: each stage runs its forward and backward steps in the order of ``mm.parallel.order``.

A message leaves when its step ends, follows the one before it on its link, and takes no time of the stages: the engine
starts sends and receives ahead.
"""

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
class MessageCost:
    """How long the messages of one microbatch across one boundary are on their way, in the unit of the slots' costs."""

    forward: float
    backward: float


FREE = MessageCost(0.0, 0.0)


@dataclass(frozen=True)
class TimedStep:
    """One step of a stage."""

    is_forward: bool
    microbatch: int
    chunk: int
    start: float
    end: float


def simulate(
    costs: Sequence[Sequence[SlotCost]], num_stages: int, messages: Sequence[Sequence[MessageCost]] | None = None,
) -> list[list[TimedStep]]:  # fmt: skip
    """The timeline of each stage.

    ``costs[m][s]`` is the cost of microbatch m in slot s, in forward order of slots; ``messages[m][s]`` that of its
    messages between slots s and s + 1, None if they take no time.
    """
    num_slots = len(costs[0])
    queues = [stage_steps(len(costs), stage, num_stages, num_slots // num_stages) for stage in range(num_stages)]
    arrivals = _Arrivals(costs, num_stages, messages)
    timeline: list[list[TimedStep]] = [[] for _ in range(num_stages)]
    while any(len(steps) < len(queue) for steps, queue in zip(timeline, queues, strict=True)):
        for stage, (steps, queue) in enumerate(zip(timeline, queues, strict=True)):
            for is_forward, (microbatch, chunk) in queue[len(steps) :]:
                slot = chunk * num_stages + stage
                ready = arrivals.ready(is_forward, microbatch, slot)
                if ready is None:
                    break
                start = max(ready, steps[-1].end if steps else 0.0)
                cost = costs[microbatch][slot]
                end = start + (cost.forward if is_forward else cost.backward)
                arrivals.add(is_forward, microbatch, slot, end)
                steps.append(TimedStep(is_forward, microbatch, chunk, start, end))
    return timeline


class _Arrivals:
    """When the input of each step is there."""

    def __init__(
        self, costs: Sequence[Sequence[SlotCost]], num_stages: int, messages: Sequence[Sequence[MessageCost]] | None,
    ) -> None:  # fmt: skip
        self._costs, self._num_stages, self._last = costs, num_stages, len(costs[0]) - 1
        self._messages = messages if num_stages > 1 else None
        self._done: dict[tuple[bool, int, int], float] = {}
        self._arrived: dict[tuple[bool, int, int], float] = {}
        """By the slot that receives."""
        self._links = {is_forward: [0.0] * num_stages for is_forward in (True, False)}
        """When the latest message of each stage has arrived."""

    def add(self, is_forward: bool, microbatch: int, slot: int, end: float) -> None:
        """A step has ended: its message leaves."""
        self._done[is_forward, microbatch, slot] = end
        target = slot + 1 if is_forward else slot - 1
        if not 0 <= target <= self._last:
            return
        if self._messages is None:
            self._arrived[is_forward, microbatch, target] = end
            return
        cost, links = self._messages[microbatch][min(slot, target)], self._links[is_forward]
        stage = slot % self._num_stages
        links[stage] = arrived = max(end, links[stage]) + (cost.forward if is_forward else cost.backward)
        self._arrived[is_forward, microbatch, target] = arrived

    def ready(self, is_forward: bool, microbatch: int, slot: int) -> float | None:
        """When the step's input is ready; None if not known yet."""
        if is_forward:
            return 0.0 if slot == 0 else self._arrived.get((True, microbatch, slot))
        if self._costs[microbatch][slot].backward == 0 or slot == self._last:
            return self._done.get((True, microbatch, slot))
        return self._arrived.get((False, microbatch, slot))


def step_cost(
    costs: Sequence[Sequence[SlotCost]], num_stages: int, messages: Sequence[Sequence[MessageCost]] | None = None,
) -> float:  # fmt: skip
    """From the first stage's start to the last stage's end."""
    return max(steps[-1].end for steps in simulate(costs, num_stages, messages))
