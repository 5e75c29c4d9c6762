"""All ranks with the same weights reduce the same buckets in the same order, whatever their microbatches hold.

Ranks are simulated event by event, without processes: a reduction waits until every replica has started as many, a
forward pass for that of the slot before, a backward pass for that of the slot behind.  ``tests/test_parity.py`` reduces
real gradients.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.batch import Images, passes_of_any
from mm.parallel.activity import Journal
from mm.parallel.pipeline_schedule import stage_steps
from mm.parallel.zero.bucket_schedule import Zero2Schedule
from tests.parallel.zero.fake_gradients import FakeGradients

NUM_VISION, NUM_LANGUAGE = 2, 2
"""Trained buckets of a slot with such."""


@dataclass(frozen=True)
class Training:
    """What is trained, and how."""

    num_stages: int
    num_chunks: int
    first_trained: int
    """The LLM is trained in this slot and those behind it; buckets of the ViT are in all slots before the last."""
    is_overlapped: bool

    @property
    def num_slots(self) -> int:
        return self.num_stages * self.num_chunks

    def buckets(self, slot: int) -> list[bool]:
        """Whether each bucket of the slot is one of the ViT."""
        has_vision = slot == 0 or slot < self.num_slots - 1
        return [True] * NUM_VISION * has_vision + [False] * NUM_LANGUAGE * (slot >= self.first_trained)

    def flows_back(self, slot: int, has_images: bool) -> bool:
        return has_images or slot >= self.first_trained


Events = Generator[tuple[str, Any], None, list[tuple[int, int]]]


def rank_of(images: list[bool], all_images: tuple[Images, ...], stage: int, training: Training) -> Events:
    """What one rank waits for in a step: a slot's forward or backward pass, or a reduction.  At the end, its log."""
    log: list[tuple[int, int]] = []
    buckets = [[FakeGradients(SimpleNamespace(is_vision=is_vision), (chunk, place), training.is_overlapped, log)
              for place, is_vision in enumerate(training.buckets(chunk * training.num_stages + stage))]
             for chunk in range(training.num_chunks)]
    chunk = SimpleNamespace(journal=Journal())
    models: list[Any] = [SimpleNamespace(gradient_buckets=of, params_with_grad=[], module=chunk) for of in buckets]
    schedule, num_done = Zero2Schedule(models, training.num_stages), 0

    def reduced() -> Iterator[tuple[str, Any]]:
        nonlocal num_done
        while num_done < len(log):
            num_done += 1
            yield "reduction", log[num_done - 1]

    plan: Any = SimpleNamespace(microbatches=images, image_passes=all_images)
    schedule.begin(plan, True)
    for is_forward, (microbatch, chunk) in stage_steps(len(images), stage, training.num_stages, training.num_chunks):
        model, slot = models[chunk], chunk * training.num_stages + stage
        if is_forward:
            yield from reduced()
            yield "forward", (microbatch, slot)
            continue
        if training.flows_back(slot, images[microbatch]):
            yield "backward", (microbatch, slot)
            model.backward_begins(microbatch)
            for place, bucket in reversed(list(enumerate(buckets[chunk]))):
                if images[microbatch] or not bucket.spec.is_vision:
                    model.bucket_begins(microbatch, place, True)
                    assert bucket.is_open
                    yield from reduced()
            model.backward_ends()
        schedule.leave(microbatch, chunk)
        yield from reduced()
        yield "sent", (microbatch, slot)
    schedule.end()
    yield from reduced()
    assert not any(bucket.is_open for of in buckets for bucket in of)
    return log


def images_of(has_images: bool) -> Images:
    return Images.BACKWARD if has_images else Images.NONE


def run(replicas: list[list[bool]], training: Training) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Run all ranks until each is done; what each reduces, by replica and stage.  Fails if none can go on."""
    all_images = passes_of_any([images_of(one) for one in images] for images in replicas)
    ranks = {(replica, stage): rank_of(images, all_images, stage, training)
             for replica, images in enumerate(replicas) for stage in range(training.num_stages)}
    waiting, found = {key: next(rank) for key, rank in ranks.items()}, dict[tuple[int, int], list]()
    passed, num_reduced = set[tuple[str, int, int, int]](), dict.fromkeys(ranks, 0)

    def can_go_on(key: tuple[int, int]) -> bool:
        (kind, what), (replica, stage) = waiting[key], key
        if kind == "reduction":  # every replica has started as many
            peers = [(other, stage) for other in range(len(replicas))]
            return all(num_reduced[one] > num_reduced[key] or waiting.get(one, ("",))[0] == "reduction"
                       for one in peers)
        microbatch, slot = what
        if kind == "forward":
            return slot == 0 or ("forward", replica, microbatch, slot - 1) in passed
        return kind == "sent" or slot == training.num_slots - 1 or ("sent", replica, microbatch, slot + 1) in passed

    while waiting:
        ready = [key for key in waiting if can_go_on(key)]
        assert ready, f"deadlock: {waiting}"
        for key in ready:
            kind, what = waiting.pop(key)
            num_reduced[key] += kind == "reduction"
            if kind != "reduction":
                passed.add((kind, key[0], *what))
            try:
                waiting[key] = next(ranks[key])
            except StopIteration as end:
                found[key] = end.value
    return found


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_stages=st.sampled_from((1, 2, 4)), num_chunks=st.sampled_from((1, 1, 2)),
       is_overlapped=st.booleans())
def test_ranks_agree_and_none_waits_for_ever(
    data: st.DataObject, num_stages: int, num_chunks: int, is_overlapped: bool
) -> None:
    num_chunks = num_chunks if num_stages > 1 else 1
    first_trained = data.draw(st.integers(0, num_stages * num_chunks))
    training = Training(num_stages, num_chunks, first_trained, is_overlapped)
    multiple = num_stages if num_chunks > 1 else 1  # packs on virtual chunks come in multiples of the stages
    sizes = data.draw(st.lists(st.integers(1, 8).map(lambda count: count * multiple), min_size=2, max_size=3))
    replicas = [data.draw(st.lists(st.booleans(), min_size=size, max_size=size)) for size in sizes]
    found = run(replicas, training)
    with_images, num_passes = sum(map(any, zip_longest(*replicas, fillvalue=False))), max(sizes)
    for stage in range(num_stages):
        logs = [found[replica, stage] for replica in range(len(replicas))]
        assert all(log == logs[0] for log in logs)
        slots = range(stage, num_stages * num_chunks, num_stages)
        buckets = [is_vision for slot in slots for is_vision in training.buckets(slot)]
        assert len(logs[0]) == sum(with_images if is_vision else num_passes for is_vision in buckets)


def test_a_rank_that_lacks_a_backward_pass_does_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replica has images in its first microbatch, the second in its last."""
    replicas = [[True, *[False] * 7], [*[False] * 7, True]]
    run(replicas, Training(2, 1, 1, False))
    monkeypatch.setattr(Zero2Schedule, "leave", lambda *_: None)
    with pytest.raises(AssertionError, match="deadlock"):
        run(replicas, Training(2, 1, 1, False))
