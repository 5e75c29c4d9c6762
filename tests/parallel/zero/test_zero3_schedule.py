"""Ranks that keep shards of weights gather and reduce the same buckets in the same order, and none waits for ever.

Each rank's collectives are noted as it goes through a step without processes, together with exchanges among the ranks
of its replica; then all are played against each other.  ``tests/test_parity.py`` gathers real weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mm.batch import Images, passes_of_any
from mm.parallel.activity import Journal
from mm.parallel.zero.bucket_schedule import Task, Zero3Schedule, is_used, tasks_of, uses_of
from mm.parallel.zero.weight_shards import BucketSpec
from tests.parallel.zero.fake_gradients import FakeGradients

Event = tuple[str, Any]
"""A collective of the ranks with the same weights, or an "exchange" of the ranks of one replica."""
FORWARD = st.sampled_from((Images.NONE, Images.PROJECTED, Images.PROJECTED | Images.ENCODED))
BOTH = st.builds(or_, FORWARD, st.sampled_from((Images.NONE, Images.BACKWARD)))
"""Images that pass the ViT together flow back in another microbatch, so the two do not depend on each other."""


class FakeWeights:
    """Notes what happens to it."""

    def __init__(self, spec: BucketSpec, log: list[Event]) -> None:
        self.spec, self.log, self.is_open, self.is_arriving = spec, log, False, False

    def start_opening(self) -> None:
        assert not self.is_open and not self.is_arriving
        self.log.append(("gather", self.spec.modules[0]))
        self.is_arriving = True

    def open(self) -> None:
        assert self.is_open or self.is_arriving
        self.is_open, self.is_arriving = True, False

    def close(self) -> None:
        self.is_open = self.is_arriving = False


@dataclass(frozen=True)
class Training:
    trained: frozenset[str]
    """Towers."""
    is_tied: bool
    is_ahead: bool

    def specs(self) -> list[BucketSpec]:
        def spec(*names: Any, **more: Any) -> BucketSpec:
            return BucketSpec(names, **more)

        return [spec("patches", tower="vision"), spec("block", tower="vision"), spec("projector", tower="projector"),
                spec("embedding", *["head"] * self.is_tied, is_table=True), spec("first"), spec("second", "norm"),
                spec("norm"), spec("head")]

    def is_trained(self) -> list[bool]:
        return [spec.tower in self.trained and self.owns(spec) for spec in self.specs()]

    def owns(self, spec: BucketSpec) -> bool:
        return spec.modules != ("norm",) and not (self.is_tied and spec.modules == ("head",))


def events_of(own: Sequence[Images], every: tuple[Images, ...], training: Training, exchanges: bool) -> list[Event]:
    """What one rank does in a step, whose own microbatches have these images."""
    log: list[Event] = []
    specs, is_trained = training.specs(), training.is_trained()
    owned = [spec for spec in specs if training.owns(spec)]
    shards: Any = SimpleNamespace(specs=specs, buckets=[FakeWeights(spec, log) for spec in owned], are_held=False)
    gradients = [FakeGradients(spec, ("reduce", spec.modules[0]), training.is_ahead, log)
                 for spec, trained in zip(specs, is_trained, strict=True) if trained]
    model: Any = SimpleNamespace(weight_shards=shards, gradient_buckets=gradients, params_with_grad=[])
    passes, uses = Zero3Schedule(model, Journal(), training.is_ahead), uses_of(specs, is_trained)
    of_spec = {one.spec: one for one in shards.buckets}
    weights = [of_spec[specs[use.bucket]] for use in uses]
    first = next(place for place, use in enumerate(uses) if use.tower == "language")
    plan: Any = SimpleNamespace(image_passes=every)
    passes.begin(plan, True)
    for number, images in enumerate(own):
        model.forward_begins(number, images)
        for place, use in enumerate(uses):
            if exchanges and place == first:
                log.append(("exchange", (number, "forward")))
            if is_used(use.tower, images, is_backward=False):
                model.use_begins(place, False)
                assert weights[place].is_open
                assert sum(one.is_open or one.is_arriving for one in shards.buckets) <= 2
        if "language" not in training.trained and Images.BACKWARD not in images:
            continue
        model.backward_begins(number)
        for place, use in reversed([*enumerate(uses)]):
            if use.has_backward and is_used(use.tower, images, is_backward=True):
                model.use_begins(place, True)
                assert weights[place].is_open or not use.is_read_backward
                if weights[place].is_open:
                    model.use_begins(place, False)  # as if its forward pass were computed again
            if exchanges and place == first and place:
                log.append(("exchange", (number, "backward")))
        model.backward_ends()
    passes.end()
    assert not any(one.is_open or one.is_arriving for one in shards.buckets)
    assert not any(one.is_open for one in gradients)
    return log


def play(ranks: dict[tuple[int, int], list[Event]]) -> None:
    """Let all ranks, by replica and number in it, go on as far as they can.  Fails if they differ, or wait for ever."""
    done = dict.fromkeys(ranks, 0)

    def peers(rank: tuple[int, int]) -> list[tuple[int, int]]:
        is_exchange = ranks[rank][done[rank]][0] == "exchange"
        return [other for other in ranks if not is_exchange or other[0] == rank[0]]

    while left := [rank for rank in ranks if done[rank] < len(ranks[rank])]:
        ready = [rank for rank in left if all(
            done[other] < len(ranks[other]) and ranks[other][done[other]] == ranks[rank][done[rank]]
            for other in peers(rank))]
        assert ready, f"deadlock: {({rank: ranks[rank][done[rank]] for rank in left})}"
        for rank in ready:
            done[rank] += 1


@settings(max_examples=200, deadline=None)
@given(data=st.data(), trained=st.sets(st.sampled_from(("vision", "projector", "language"))), is_tied=st.booleans(),
       is_ahead=st.booleans(), num_inside=st.integers(1, 2))
def test_ranks_agree_and_none_waits_for_ever(
    data: st.DataObject, trained: set[str], is_tied: bool, is_ahead: bool, num_inside: int
) -> None:
    training = Training(frozenset(trained), is_tied, is_ahead)
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    ranks = {(replica, inside): data.draw(st.lists(BOTH, min_size=size, max_size=size))
             for replica, size in enumerate(sizes) for inside in range(num_inside)}
    # whether gradients of images flow back is the same for all ranks of a replica: they exchange them
    flows = {replica: [reduce(or_, one) & Images.BACKWARD for one in zip(
        *(ranks[replica, inside] for inside in range(num_inside)), strict=True)] for replica in range(len(sizes))}
    ranks = {(replica, inside): [one | flow for one, flow in zip(images, flows[replica], strict=True)]
             for (replica, inside), images in ranks.items()}
    every = passes_of_any(ranks.values())
    play({rank: events_of(images, every, training, num_inside > 1) for rank, images in ranks.items()})


def test_a_rank_without_images_gathers_the_vit_before_it_exchanges_visual_tokens() -> None:
    images, training = Images.PROJECTED | Images.ENCODED | Images.BACKWARD, Training(frozenset(), False, False)
    events = events_of([Images.NONE], (images,), training, exchanges=True)
    assert events[:4] == [("gather", "patches"), ("gather", "block"), ("gather", "projector"),
                          ("exchange", (0, "forward"))]


@given(trained=st.sets(st.sampled_from(("vision", "projector", "language"))), images=BOTH, is_tied=st.booleans(),
       is_ahead=st.booleans(), forward_only=st.booleans())
def test_each_use_is_gathered_before_it_and_reduced_after_it(
    trained: set[str], images: Images, is_tied: bool, is_ahead: bool, forward_only: bool
) -> None:
    training = Training(frozenset(trained), is_tied, is_ahead)
    uses = uses_of(training.specs(), training.is_trained())
    tasks = tasks_of(uses, images, forward_only, is_ahead)
    assert len({*tasks}) == len(tasks)
    assert not forward_only or not any(one.is_backward for one in tasks)
    for place, task in enumerate(tasks):
        if task.kind == "gather":
            use = tasks.index(task._replace(kind="use"))
            between = [one.use for one in tasks[place:use] if one.kind == "use"]
            assert place < use and len(between) <= (2 if is_ahead else 0)
        elif task.kind == "reduce":
            assert tasks.index(task._replace(kind="use")) < place and uses[task.use].is_reduced
    reduced = {one.use for one in tasks if one.kind == "reduce"}
    assert reduced == {one.use for one in tasks if one.kind == "use" and one.is_backward and uses[one.use].is_reduced}


def test_buckets_stay_open_between_two_uses_and_the_word_embedding_is_not_gathered_again() -> None:
    training = Training(frozenset({"language"}), False, False)
    uses = uses_of(training.specs(), training.is_trained())
    tasks = tasks_of(uses, Images.NONE, False, False)
    names = [spec.modules[0] for spec in training.specs()]
    gathered = [names[one.use] for one in tasks if one.kind == "gather"]
    assert gathered == ["embedding", "first", "second", "head", "norm", "first"]
    assert [names[one.use] for one in tasks if one.kind == "reduce"] == ["head", "second", "first", "embedding"]
    assert tasks[-1] == Task("reduce", 3, True)
