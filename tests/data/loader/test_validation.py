"""The samples of a validation: each once, in the same microbatches for any number of ranks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from mm.config.run import Run
from mm.data.loader.loader import ReadStep
from mm.data.loader.validation import in_between, validation_order
from tests.data.sampler import test_sampler
from tests.data.sampler.test_sampler import lengths
from tests.tiny import our_config

COUNTS = (1, 7, 8, 13, 100)
run_of = test_sampler.run_of  # the fixture


def with_iters(run: Run, eval_iters: int | None) -> Run:
    return replace(run, args=replace(run.args, eval_iters=eval_iters))


def microbatches_of(run: Run, num_samples: int) -> list[tuple[int, ...]]:
    order = validation_order(run, lengths(num_samples))
    assert order.num_samples == len({one for step in order.steps for rank in step for m in rank for one in m})
    return sorted(tuple(m) for step in order.steps for rank in step for m in rank if m)


@pytest.mark.parametrize("kind", ["random", "balanced", "packed", "packed evenly, few patches"])
@pytest.mark.parametrize("num_samples", COUNTS)
def test_every_sample_once_in_the_same_microbatches_for_any_replicas(
    run_of: Callable[..., Run], kind: str, num_samples: int
) -> None:
    expected = microbatches_of(run_of(kind), num_samples)
    assert sorted(one for m in expected for one in m) == list(range(num_samples))
    for dp_size in (2, 3, 4):
        run = run_of(kind, dp_size)
        assert microbatches_of(run, num_samples) == expected
        steps = validation_order(run, lengths(num_samples)).steps
        assert all(len(step) == dp_size and all(step) for step in steps)  # nobody is without a microbatch
        most = dp_size * run.held_microbatches
        assert all(sum(bool(m) for rank in step for m in rank) <= most for step in steps)


def test_chunks_have_a_microbatch_for_each_stage(run_of: Callable[..., Run]) -> None:
    run = replace(run_of("random", 2), model=our_config(((3, 1), (0, 0)), ((0, 0), (1, 3))))
    (step,) = validation_order(run, lengths(3)).steps  # two microbatches
    assert sorted(map(tuple, (m for rank in step for m in rank))) == [(), (), (0, 1), (2,)]
    assert [len(rank) for rank in step] == [2, 2]


def test_fewer_batches_are_the_same_random_subset_each_time(run_of: Callable[..., Run]) -> None:
    run = with_iters(run_of("random"), 2)
    taken = [one for m in microbatches_of(run, 100) for one in m]
    assert len(taken) == len(set(taken)) == 48 and sorted(taken) == taken != list(range(48))
    assert [one for m in microbatches_of(with_iters(run_of("random", 4), 2), 100) for one in m] == taken
    other = with_iters(run_of("random", seed=6), 2)
    assert [one for m in microbatches_of(other, 100) for one in m] != taken
    assert microbatches_of(with_iters(run, 3), 72) == microbatches_of(with_iters(run, None), 72)


class Loader(Iterator[ReadStep]):
    """Empty steps, labelled by their origin."""

    def __init__(self, name: str, num_steps: int) -> None:
        self.name, self.left, self.is_open = name, num_steps, True

    def __next__(self) -> ReadStep:
        if not self.left:
            raise StopIteration
        self.left -= 1
        reported: Any = [self.name]
        return ReadStep(reported)

    def close(self) -> None:
        self.is_open = False


def test_validations_run_between_steps_and_are_closed() -> None:
    opened: list[Loader] = []

    def open_loader() -> Any:
        opened.append(Loader(f"v{len(opened)}", 2))
        return opened[-1]

    training = Loader("t", 100)
    found = list(in_between(training, [False, True, False, True], open_loader))
    assert [(*step.microbatches, step.is_validation) for step in found] == [
        ("t", False), ("t", False), ("v0", True), ("v0", True), ("t", False), ("t", False), ("v1", True), ("v1", True)]
    assert training.left == 96 and not any(one.is_open for one in opened)
    steps = in_between(training, [True], open_loader)
    next(steps)
    next(steps)
    steps.close()  # a run that ends in the middle
    assert not opened[-1].is_open
