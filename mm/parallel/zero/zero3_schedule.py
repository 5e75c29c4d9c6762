"""When a rank that keeps shards of weights (ZeRO-3) gathers and frees units, and reduces their gradients.

All ranks with the same weights derive the same order from the plan (``tasks_of``), although they have images in
different microbatches and different numbers of microbatches.  Where a rank does not use a unit itself, it takes part in
the collectives all the same, and drops the weights.  It must do so before any other collective that ranks with images
enter after their ViT, such as the exchange of visual tokens.  So it does it at the beginning of a forward pass and at
the end of a backward pass.

There is one stage: a forward pass and the backward pass of the same microbatch follow each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mm.batch import Images, StepPlan
from mm.parallel.activity import Journal, Work
from mm.parallel.zero.gradient_buffers import forget_added
from mm.parallel.zero.gradient_shards import ShardedGradients, UnitGradients
from mm.parallel.zero.weight_shards import TowerName, Unit, UnitWeights
from mm.parallel.zero.zero2_schedule import RunningReduction

# The order of a rank's work


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


# The work itself


class UnitPasses:
    """The units of one rank's only chunk."""

    def __init__(self, model: ShardedGradients, journal: Journal, is_ahead: bool) -> None:
        """``is_ahead``: see ``tasks_of``."""
        shards = model.weight_shards
        assert shards is not None, "the ranks keep shards of weights"
        self._model, self._shards, self._journal, self._is_ahead = model, shards, journal, is_ahead
        weights = {one.unit: one for one in shards.units}
        gradients = {one.unit: one for one in model.units}
        self._uses: Sequence[Use] = uses_of(shards.all_units, [unit in gradients for unit in shards.all_units])
        self._weights: list[UnitWeights] = [weights[shards.all_units[use.unit]] for use in self._uses]
        self._gradients: list[UnitGradients | None] = [gradients.get(one.unit) for one in self._weights]
        self._reduction = RunningReduction(journal)
        self._images: tuple[Images, ...] = ()
        self._overwrites = self._is_forward_only = self._is_backward = False
        self._now = -1
        """The microbatch."""
        self._open: UnitWeights | None = None
        """The unit that was used last."""
        self._left: list[Task] = []
        """Tasks of its passes that are still to be done; the next one is last."""
        model.forward_begins, model.use_begins = self._begin_forward, self._begin_use
        model.backward_begins, model.backward_ends = self._begin_backward, self._end_backward

    def begin(self, plan: StepPlan, overwrites: bool, forward_only: bool = False) -> None:
        """Call before the passes of a step, or of a validation.  ``overwrites``: see ``reduction.begin``."""
        assert plan.image_passes is not None, "the data owner of a run that shards weights makes them"
        self._images, self._overwrites, self._is_forward_only = plan.image_passes, overwrites, forward_only
        self._now, self._left = -1, []
        if not forward_only:
            forget_added(self._model.params_with_grad if self._model.units else ())
            for unit in self._model.units:
                unit.begin_step()

    def end(self) -> None:
        """Call after the last pass: take part in what other ranks do in passes that this rank lacks, and finish."""
        self._enter(len(self._images))
        self._reduction.finish()
        if not self._is_forward_only:
            for unit in self._model.units:
                unit.end_step()

    def _enter(self, microbatch: int) -> None:
        """Do what is left of the microbatches before this one, and go on with it."""
        while self._now < microbatch:
            self._close_all_but(None)
            self._do_all_but(0)
            self._now += 1
            if self._now < len(self._images):
                tasks = tasks_of(self._uses, self._images[self._now], self._is_forward_only, self._is_ahead)
                self._left = tasks[::-1]

    def _begin_forward(self, microbatch: int, images: Images) -> None:
        self._enter(microbatch)
        skipped = [place for place, task in enumerate(self._left) if task.kind == "use" and not task.is_backward
                   and not is_used(self._uses[task.use].tower, images, is_backward=False)]
        if skipped:
            self._do_all_but(skipped[0])

    def _begin_backward(self, microbatch: int) -> None:
        assert microbatch == self._now, "it follows its own forward pass"
        if not self._is_backward:
            self._is_backward = True
            self._reduction.finish()  # of the pass before; a forward pass has run since

    def _end_backward(self) -> None:
        self._is_backward = False
        self._close_all_but(None)
        self._do_all_but(0)

    def _begin_use(self, use: int, is_backward: bool) -> None:
        """The forward or backward pass of a module begins: make its weights whole, and in a backward pass give it
        buffers for their gradients."""
        unit = self._weights[use]
        if self._shards.are_held or (self._is_backward and not is_backward):
            assert unit.is_open, "only a layer whose backward pass runs is computed again"
            return
        if is_backward:
            self._begin_backward(self._now)
        place = self._place(Task("use", use, is_backward))
        self._close_all_but(unit)
        self._do_all_but(place + 1)
        self._left.pop()
        if not is_backward or self._uses[use].is_read_backward:
            with self._journal.during(Work.GATHER):
                unit.open()
            self._open = unit
        gradients = self._gradients[use]
        if is_backward and gradients is not None:
            if gradients is self._reduction.unit:  # of the pass before; this one fills it again
                self._reduction.finish()
            gradients.open(self._overwrites)

    def _do_all_but(self, num_left: int) -> None:
        """Do what comes next, until so many tasks are left.  The uses among them are those of other ranks only."""
        while len(self._left) > num_left:
            self._do(self._left.pop())

    def _do(self, task: Task) -> None:
        unit, gradients = self._weights[task.use], self._gradients[task.use]
        if task.kind == "gather":
            with self._journal.during(Work.GATHER):
                unit.start_opening()
        elif task.kind == "reduce":
            assert gradients is not None, "only trained units are reduced"
            self._reduction.start(gradients, self._overwrites)
        else:
            with self._journal.during(Work.GATHER):
                unit.close()

    def _place(self, task: Task) -> int:
        """Where it is in ``_left``: near the end."""
        for place in reversed(range(len(self._left))):
            if self._left[place] == task:
                return place
        raise AssertionError("a use that the plan does not have would gather weights or add gradients alone")

    def _close_all_but(self, unit: UnitWeights | None) -> None:
        """Close the unit that was used last unless it is ``unit``; one that is arriving is left alone."""
        if self._open is not None and self._open is not unit:
            self._open.close()
            self._open = None
