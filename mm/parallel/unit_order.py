"""The order in which units are gathered, used and reduced in the passes of a microbatch, if ranks keep weight shards.

Pure functions: all ranks with the same weights derive the same order from the plan, as their collectives require.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mm.batch import Images
from mm.parallel.units import TowerName, Unit


@dataclass(frozen=True)
class Use:
    """A module that uses a unit."""

    unit: int
    """The index of the unit that owns the module's weights."""
    tower: TowerName
    has_backward: bool
    """Whether gradients flow through it: its own weights, or those of an earlier module, are trained."""
    is_read_backward: bool
    """Whether its backward pass reads the weights."""
    is_reduced: bool
    """Whether the unit's gradients are complete after its backward pass."""


class Task(NamedTuple):
    """One step in the order of a rank's work."""

    kind: Literal["gather", "use", "reduce"]
    """"use": the module's forward or backward pass begins.  Its unit has been gathered."""
    use: int
    is_backward: bool


def uses_of(units: Sequence[Unit], is_trained: Sequence[bool]) -> list[Use]:
    """The uses of ``units``, whose first modules run in this order; ``is_trained``: whether each unit owns trained
    weights.

    A unit that owns nothing stands for a module that uses the weights of an earlier unit: the last norm, or the output
    layer with a tied embedding.
    """
    owner = {}
    for place, unit in enumerate(units):
        for module in unit.modules:
            owner.setdefault(module, place)
    found, has_backward = list[Use](), False
    for unit in units:
        place = owner[unit.modules[0]]
        has_backward |= is_trained[place]
        is_first = unit is units[place]
        found.append(Use(place, unit.tower, has_backward, not (is_first and unit.is_table),
                         is_first and is_trained[place]))
    return found


def is_used(tower: TowerName, images: Images, is_backward: bool) -> bool:
    """Whether a microbatch with ``images`` uses the units of ``tower`` in this direction."""
    if tower == "language":
        return True
    if is_backward:
        return Images.BACKWARD in images
    return (Images.ENCODED if tower == "vision" else Images.PROJECTED) in images


def tasks_of(uses: Sequence[Use], images: Images, forward_only: bool, is_ahead: bool) -> list[Task]:
    """The tasks of a microbatch's forward pass and backward pass, in order.

    A unit stays open if the next use is of the same unit, such as the output layer between the two passes.
    ``images``: what images do in any replica.  ``is_ahead``: the next unit is gathered while one is used; otherwise
    each is gathered right before its use.
    """
    forward = [place for place, use in enumerate(uses) if is_used(use.tower, images, is_backward=False)]
    backward = [] if forward_only else [
        place for place, use in reversed([*enumerate(uses)])
        if use.has_backward and is_used(use.tower, images, is_backward=True)]
    visits = [(place, False) for place in forward] + [(place, True) for place in backward]
    gathers, now_open = list[Task](), None
    for place, is_backward in visits:
        use = uses[place]
        if use.unit == now_open:
            continue
        is_read = use.is_read_backward or not is_backward
        if is_read:
            gathers.append(Task("gather", place, is_backward))
        now_open = use.unit if is_read else None
    return [*_in_turn(uses, visits, gathers, is_ahead)]


def _in_turn(
    uses: Sequence[Use], visits: Sequence[tuple[int, bool]], gathers: list[Task], is_ahead: bool
) -> Iterator[Task]:
    """Place each gather before the visit that needs it, or one visit earlier, and each reduction after the visit that
    completes its gradients."""
    left, ahead, before = gathers[::-1], None, (0, False)
    for place, is_backward in visits:
        own = Task("gather", place, is_backward)
        if ahead is None and left and left[-1] == own:
            yield left.pop()
        if ahead in (None, own):
            ahead = left.pop() if is_ahead and left else None
            if ahead is not None:
                yield ahead
        yield from _reduced(uses, before)
        yield Task("use", place, is_backward)
        before = place, is_backward
    yield from _reduced(uses, before)


def _reduced(uses: Sequence[Use], visit: tuple[int, bool]) -> Iterator[Task]:
    place, is_backward = visit
    if is_backward and uses[place].is_reduced:
        yield Task("reduce", place, is_backward)
