"""When ranks that keep shards reduce buckets of gradients (ZeRO-2), and gather and free buckets of weights (ZeRO-3): in
the same order on all ranks.

Replicas differ in images and numbers of microbatches, so the order follows from the plan, which all know: pass by pass,
and buckets of the ViT and the projector only in passes in which any replica has images.  A rank goes through this order
as its own passes proceed.  Where it lacks one, it takes part all the same: it reduces zeros, and drops the weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mm.batch import Images, StepPlan
from mm.parallel.activity import Journal, Work
from mm.parallel.pipeline_schedule import backward_order, forward_order
from mm.parallel.zero.gradient_buffers import forget_added
from mm.parallel.zero.gradient_shards import GradientBucket, ShardedGradients
from mm.parallel.zero.weight_shards import BucketSpec, TowerName, WeightBucket


class RunningReduction:
    """The reduction in progress: one at a time, in the background with overlapped reduction."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.bucket: GradientBucket | None = None

    def start(self, bucket: GradientBucket, overwrites: bool) -> None:
        """Reduce what the buffers of ``bucket`` hold, zeros if it has none, once the reduction before has ended."""
        self.finish()
        bucket.open(overwrites)
        with self._journal.during(Work.REDUCTION):
            bucket.start_reducing()
        self.bucket = bucket
        if bucket.group.grad_reduce_handle is None:
            self.finish()

    def finish(self) -> None:
        if self.bucket is not None:
            with self._journal.during(Work.REDUCTION):
                self.bucket.finish_reducing()
            self.bucket = None


class Zero2Schedule:
    """Reduces the gradients of one rank's chunks, in each pass from the last bucket to the first."""

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
        self._waiting: list[GradientBucket] = []
        """Buckets that the pass has still to reduce; the next one is last."""
        self._reduction = RunningReduction(self._journal)
        for chunk, model in enumerate(models):
            self._follow(chunk, model)

    def _follow(self, chunk: int, model: ShardedGradients) -> None:
        model.backward_begins = lambda microbatch: self._begin_backward(microbatch, chunk)
        model.backward_ends = self._reduce_waiting
        model.bucket_begins = lambda microbatch, place, is_last: self._begin_bucket(microbatch, chunk, place, is_last)

    def begin(self, plan: StepPlan, overwrites: bool) -> None:
        """Call before the passes of a step.  ``overwrites``: see ``reduction.begin``."""
        assert plan.image_passes is not None, "the data owner of a run that shards gradients makes them"
        self._overwrites = overwrites
        self._has_images = tuple(Images.BACKWARD in images for images in plan.image_passes)
        self._order = backward_order(forward_order(len(plan.image_passes), self._num_stages, len(self._models)))
        self._places = {one: place for place, one in enumerate(self._order)}
        for model in self._models:
            forget_added(model.params_with_grad)
            for bucket in model.gradient_buckets:
                bucket.begin_step()
        self._now = self._last_begun = -1
        self._enter(0)

    def end(self) -> None:
        """Call after the last pass: take part in what other ranks reduce in passes that this rank lacks, and finish."""
        self._enter(len(self._order))
        self._reduction.finish()
        for model in self._models:
            for bucket in model.gradient_buckets:
                bucket.end_step()

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
            self._reduction.finish()  # the last bucket of the pass before; a forward pass has run since

    def _begin_bucket(self, microbatch: int, chunk: int, place: int, is_last: bool) -> None:
        """The backward pass of a bucket begins, so that of the buckets after it has ended.

        ``microbatch`` is the one whose forward pass used the bucket.  Images of several microbatches pass the ViT
        together, in the forward pass of the first; their backward pass is part of a later one, and if no other rank
        has images in that, the bucket waits for a pass in which one has.
        """
        self._begin_backward(microbatch, chunk)
        bucket = self._models[chunk].gradient_buckets[place]
        if is_last:
            while bucket in self._waiting and self._waiting[-1] is not bucket:
                self._reduction.start(self._waiting.pop(), self._overwrites)
        assert bucket in self._waiting or not self._is_reduced_now(bucket), "it would be filled after its reduction"
        if bucket is self._reduction.bucket:  # of the pass before; this one fills it again
            self._reduction.finish()
        bucket.open(self._overwrites)

    def _is_reduced_now(self, bucket: GradientBucket) -> bool:
        microbatch, _ = self._order[self._now]
        return self._has_images[microbatch] or not bucket.spec.is_vision

    def _reduce_waiting(self) -> None:
        while self._waiting:
            self._reduction.start(self._waiting.pop(), self._overwrites)

    def _enter(self, place: int) -> None:
        """Reduce what the passes before ``place`` have not reduced yet, and go on with that one."""
        while self._now < place:
            self._reduce_waiting()
            self._now += 1
            if self._now < len(self._order):
                _, chunk = self._order[self._now]
                self._waiting = [one for one in self._models[chunk].gradient_buckets if self._is_reduced_now(one)]


# ZeRO-3: the order of a rank's work


@dataclass(frozen=True)
class Use:
    """A module that uses a bucket."""

    bucket: int
    """The index of the bucket that owns the module's weights."""
    tower: TowerName
    has_backward: bool
    """Whether gradients flow through it: its own weights, or those of an earlier module, are trained."""
    is_read_backward: bool
    is_reduced: bool
    """Whether the bucket's gradients are complete after its backward pass."""


class Task(NamedTuple):
    """One step in the order of a rank's work."""

    kind: Literal["gather", "use", "reduce"]
    """"use": the module's forward or backward pass begins.  Its bucket has been gathered."""
    use: int
    is_backward: bool


def uses_of(specs: Sequence[BucketSpec], is_trained: Sequence[bool]) -> list[Use]:
    """The uses of buckets, whose first modules run in this order; ``is_trained``: whether each owns trained weights.

    A bucket that owns nothing stands for a module that uses the weights of an earlier one: the last norm, or the output
    layer with a tied embedding.
    """
    owner = {}
    for place, spec in enumerate(specs):
        for module in spec.modules:
            owner.setdefault(module, place)
    found, has_backward = list[Use](), False
    for spec in specs:
        place = owner[spec.modules[0]]
        has_backward |= is_trained[place]
        is_first = spec is specs[place]
        found.append(Use(place, spec.tower, has_backward, not (is_first and spec.is_table),
                         is_first and is_trained[place]))
    return found


def is_used(tower: TowerName, images: Images, is_backward: bool) -> bool:
    """Whether a microbatch with ``images`` uses the buckets of ``tower`` in this direction."""
    if tower == "language":
        return True
    if is_backward:
        return Images.BACKWARD in images
    return (Images.ENCODED if tower == "vision" else Images.PROJECTED) in images


def tasks_of(uses: Sequence[Use], images: Images, forward_only: bool, is_ahead: bool) -> list[Task]:
    """The tasks of a microbatch's forward pass and backward pass, in order.

    A bucket stays open if the next use is of the same bucket, such as the output layer between the two passes.
    ``images``: what images do in any replica.  ``is_ahead``: the next bucket is gathered while one is used; otherwise
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
        if use.bucket == now_open:
            continue
        is_read = use.is_read_backward or not is_backward
        if is_read:
            gathers.append(Task("gather", place, is_backward))
        now_open = use.bucket if is_read else None
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


# ZeRO-3: the work itself


class Zero3Schedule:
    """Gathers, frees and reduces the buckets of one rank's only chunk.

    There is one stage: a forward pass and the backward pass of the same microbatch follow each other.  A rank takes
    part in gathers that it does not need at the beginning of a forward pass and the end of a backward pass: before any
    collective that ranks with images enter after their ViT, such as the exchange of visual tokens.
    """

    def __init__(self, model: ShardedGradients, journal: Journal, is_ahead: bool) -> None:
        shards = model.weight_shards
        assert shards is not None, "the ranks keep shards of weights"
        self._model, self._shards, self._journal, self._is_ahead = model, shards, journal, is_ahead
        weights = {one.spec: one for one in shards.buckets}
        gradients = {one.spec: one for one in model.gradient_buckets}
        self._uses: Sequence[Use] = uses_of(shards.specs, [spec in gradients for spec in shards.specs])
        self._weights: list[WeightBucket] = [weights[shards.specs[use.bucket]] for use in self._uses]
        self._gradients: list[GradientBucket | None] = [gradients.get(one.spec) for one in self._weights]
        self._reduction = RunningReduction(journal)
        self._images: tuple[Images, ...] = ()
        self._overwrites = self._is_forward_only = self._is_backward = False
        self._now = -1
        self._open: WeightBucket | None = None
        """The bucket that was used last."""
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
            forget_added(self._model.params_with_grad if self._model.gradient_buckets else ())
            for bucket in self._model.gradient_buckets:
                bucket.begin_step()

    def end(self) -> None:
        """Call after the last pass: take part in what other ranks do in passes that this rank lacks, and finish."""
        self._enter(len(self._images))
        self._reduction.finish()
        if not self._is_forward_only:
            for bucket in self._model.gradient_buckets:
                bucket.end_step()

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
        bucket = self._weights[use]
        if self._shards.are_held or (self._is_backward and not is_backward):
            assert bucket.is_open, "only a layer whose backward pass runs is computed again"
            return
        if is_backward:
            self._begin_backward(self._now)
        place = self._place(Task("use", use, is_backward))
        self._close_all_but(bucket)
        self._do_all_but(place + 1)
        self._left.pop()
        if not is_backward or self._uses[use].is_read_backward:
            with self._journal.during(Work.GATHER):
                bucket.open()
            self._open = bucket
        gradients = self._gradients[use]
        if is_backward and gradients is not None:
            if gradients is self._reduction.bucket:  # of the pass before; this one fills it again
                self._reduction.finish()
            gradients.open(self._overwrites)

    def _do_all_but(self, num_left: int) -> None:
        """Do what comes next, until so many tasks are left.  The uses among them are those of other ranks only."""
        while len(self._left) > num_left:
            self._do(self._left.pop())

    def _do(self, task: Task) -> None:
        bucket, gradients = self._weights[task.use], self._gradients[task.use]
        if task.kind == "gather":
            with self._journal.during(Work.GATHER):
                bucket.start_opening()
        elif task.kind == "reduce":
            assert gradients is not None, "only trained buckets are reduced"
            self._reduction.start(gradients, self._overwrites)
        else:
            with self._journal.during(Work.GATHER):
                bucket.close()

    def _place(self, task: Task) -> int:
        """Where it is in ``_left``: near the end."""
        for place in reversed(range(len(self._left))):
            if self._left[place] == task:
                return place
        raise AssertionError("a use that the plan does not have would gather weights or add gradients alone")

    def _close_all_but(self, bucket: WeightBucket | None) -> None:
        """Close the bucket that was used last unless it is ``bucket``; one that is arriving is left alone."""
        if self._open is not None and self._open is not bucket:
            self._open.close()
            self._open = None
