"""Decides when units are reduced if data-parallel ranks keep shards of the gradients: in the same order on all ranks.

Replicas differ in images and numbers of microbatches, so the order follows from the plan, which all know: pass by pass,
and in each pass from the last unit to the first, those of the ViT and the projector only if any replica has images
there.  A rank goes through this order as its backward passes proceed, and reduces zeros where it has no gradients.
"""

from collections.abc import Sequence
from typing import Any

from mm.batch import Images, StepPlan
from mm.parallel.activity import Journal, Work
from mm.parallel.order import backward_order, forward_order
from mm.parallel.zero.gradient_buffers import forget_added
from mm.parallel.zero.gradient_shards import ShardedGradients, UnitGradients


class RunningReduction:
    """The reduction in progress: one at a time, in the background with overlapped reduction."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.unit: UnitGradients | None = None
        """The unit that is being reduced."""

    def start(self, unit: UnitGradients, overwrites: bool) -> None:
        """Reduce what the buffers of ``unit`` hold, zeros if it has none, once the reduction before has ended."""
        self.finish()
        unit.open(overwrites)
        with self._journal.during(Work.REDUCTION):
            unit.start_reducing()
        self.unit = unit
        if unit.group.grad_reduce_handle is None:
            self.finish()

    def finish(self) -> None:
        """Wait for the reduction in progress, if any."""
        if self.unit is not None:
            with self._journal.during(Work.REDUCTION):
                self.unit.finish_reducing()
            self.unit = None


class Reductions:
    """The reductions of one rank's chunks."""

    def __init__(self, models: Sequence[ShardedGradients], num_stages: int) -> None:
        self._models, self._num_stages = models, num_stages
        chunk: Any = models[0].module
        self._journal: Journal = chunk.journal
        self._overwrites = False
        self._order: list[tuple[int, int]] = []
        """Passes of the step, as microbatch and chunk, in their order on the rank with the most microbatches."""
        self._places: dict[tuple[int, int], int] = {}
        self._has_images: tuple[bool, ...] = ()
        self._now = self._last_begun = 0
        """As indices of ``_order``: the pass that runs, and the last one whose backward pass has begun on this rank."""
        self._waiting: list[UnitGradients] = []
        """Units that the pass has still to reduce; the next one is last."""
        self._reduction = RunningReduction(self._journal)
        for number, model in enumerate(models):
            self._follow(number, model)

    def _follow(self, chunk: int, model: ShardedGradients) -> None:
        model.backward_begins = lambda microbatch: self._begin_backward(microbatch, chunk)
        model.backward_ends = self._reduce_waiting
        model.unit_begins = lambda microbatch, place, is_last: self._begin_unit(microbatch, chunk, place, is_last)

    def begin(self, plan: StepPlan, overwrites: bool) -> None:
        """Call before the passes of a step.  ``overwrites``: see ``mm.parallel.zero.reduction.begin``."""
        assert plan.image_passes is not None, "the data owner of a run that shards gradients makes them"
        self._overwrites = overwrites
        self._has_images = tuple(Images.BACKWARD in images for images in plan.image_passes)
        self._order = backward_order(forward_order(len(plan.image_passes), self._num_stages, len(self._models)))
        self._places = {one: place for place, one in enumerate(self._order)}
        for model in self._models:
            forget_added(model.params_with_grad)
            for unit in model.units:
                unit.begin_step()
        self._now = self._last_begun = -1
        self._enter(0)

    def end(self) -> None:
        """Call after the last pass: take part in what other ranks reduce in passes that this rank lacks, and finish."""
        self._enter(len(self._order))
        self._reduction.finish()
        for model in self._models:
            for unit in model.units:
                unit.end_step()

    def leave(self, microbatch: int, chunk: int) -> None:
        """Call when this backward pass is over, or when the schedule is past it because this rank has no such pass.

        Other ranks may reduce it during their backward pass and wait for this one, which must not wait first for
        something that they do later: a message between stages, or a collective of the next forward pass.
        """
        self._enter(self._places[microbatch, chunk] + 1)

    def _begin_backward(self, microbatch: int, chunk: int) -> None:
        """A backward pass begins; those before it have ended, or are not this rank's."""
        place = self._places[microbatch, chunk]
        if place > self._last_begun:
            self._last_begun = place
            self._enter(place)
            self._reduction.finish()  # the last unit of the pass before; a forward pass has run since

    def _begin_unit(self, microbatch: int, chunk: int, place: int, is_last: bool) -> None:
        """The backward pass of a unit begins, so that of the units after it has ended.

        ``microbatch`` is the one whose forward pass used the unit.  Images of several microbatches pass the ViT
        together, in the forward pass of the first; their backward pass is part of a later one, and if no other rank
        has images in that, the unit waits for a pass in which one has.
        """
        self._begin_backward(microbatch, chunk)
        unit = self._models[chunk].units[place]
        if is_last:
            while unit in self._waiting and self._waiting[-1] is not unit:
                self._reduction.start(self._waiting.pop(), self._overwrites)
        assert unit in self._waiting or not self._is_reduced_in(unit), "its gradients would come after their reduction"
        if unit is self._reduction.unit:  # of the pass before; this one fills it again
            self._reduction.finish()
        unit.open(self._overwrites)

    def _is_reduced_in(self, unit: UnitGradients) -> bool:
        """Whether the running pass reduces ``unit``."""
        microbatch, _ = self._order[self._now]
        return self._has_images[microbatch] or not unit.unit.is_vision

    def _reduce_waiting(self) -> None:
        """Reduce what the pass has not reduced yet."""
        while self._waiting:
            self._reduction.start(self._waiting.pop(), self._overwrites)

    def _enter(self, place: int) -> None:
        """Reduce what the passes before ``place`` have not reduced yet, and go on with that one."""
        while self._now < place:
            self._reduce_waiting()
            self._now += 1
            if self._now < len(self._order):
                _, chunk = self._order[self._now]
                self._waiting = [unit for unit in self._models[chunk].units if self._is_reduced_in(unit)]
