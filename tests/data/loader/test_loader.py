"""The loader yields the same steps with any number of workers, and validation the same samples with any of replicas."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, count
from typing import Any

import psutil
import pytest
import torch

from mm.batch import Microbatch
from mm.config.run import Run
from mm.data.encode import SampleEncoder
from mm.data.index.dataset import Dataset
from mm.data.loader.loader import ReadStep, StepLoader, in_between, validation_order
from mm.data.sampler.sampler import shuffled
from mm.errors import UserError
from tests.data.loader.deadly import Crashing, Refusing
from tests.data.oracle import photo, plain_order
from tests.data.sampler import test_sampler
from tests.data.sampler.test_sampler import lengths
from tests.tiny import our_config


@pytest.fixture
def make_loader(write_dataset, model_config):
    """Builds loaders with defaults, and closes them."""
    loaders, usual = [], write_dataset()

    def make(records=None, encoder=None, skips_bad=False, num_workers=0, **changes):
        data = usual if records is None else write_dataset(records)
        dataset, encoder = Dataset(data), encoder or SampleEncoder.from_config(data, model_config, 4096)
        order = {"micro_batch_size": 2, "global_batch_size": 8, "dp_rank": 0, "dp_size": 2, "seed": 5, "shuffle": True}
        steps = map(plain_order(len(dataset), **order | changes).step, count())
        loaders.append(StepLoader(dataset, encoder, steps, num_workers, skips_bad=skips_bad))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def take(loader, num_steps):
    return [next(loader).microbatches for _ in range(num_steps)]


def assert_same(found, expected):
    assert [len(step) for step in found] == [len(step) for step in expected]
    for one, other in zip(chain(*found), chain(*expected), strict=True):
        for name in ("token_ids", "labels", "positions"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        assert one.segment_lengths == other.segment_lengths
        assert one.image_grids == other.image_grids
        assert (one.pixel_values is None) == (other.pixel_values is None)
        assert one.pixel_values is None or torch.equal(one.pixel_values, other.pixel_values)


def test_steps_hold_the_samplers_samples(make_loader, write_dataset, model_config):
    data = write_dataset()
    dataset, encoder = Dataset(data), SampleEncoder.from_config(data, model_config, 4096)
    stream = shuffled(len(dataset), 5).samples(0, 24).tolist()
    for dp_rank in range(2):
        steps = take(make_loader(dp_rank=dp_rank), 3)
        starts = [[step * 8 + microbatch * 4 + dp_rank * 2 for microbatch in range(2)] for step in range(3)]
        pairs = [[stream[start : start + 2] for start in some] for some in starts]
        assert_same(steps, [[Microbatch.join(encoder.encode(dataset[index]) for index in pair) for pair in some]
                            for some in pairs])
        in_batch = [one.samples for step in steps for one in step]
        by_length = [encoder.encode(dataset[index]).num_tokens for samples in in_batch for index in samples]
        assert by_length == [length for step in steps for one in step for length in one.segment_lengths]
        assert [sorted(samples) for samples in in_batch] == [sorted(pair) for some in pairs for pair in some]


def test_resume_continues_where_the_run_stopped(make_loader):
    loader = make_loader()
    before = take(loader, 2)
    after = take(loader, 2)
    assert_same(take(make_loader(consumed_samples=16), 2), after)
    assert not torch.equal(before[0][0].token_ids, after[0][0].token_ids)


def test_workers_keep_the_trainers_random_state_and_end_on_close(make_loader):
    random_state = torch.get_rng_state()
    loader = make_loader(num_workers=2)
    next(loader)
    assert torch.equal(torch.get_rng_state(), random_state)
    pids = [worker.process.pid for worker in loader._microbatches._workers._workers]
    assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
    loader.close()
    deadline = time.monotonic() + 20
    while (left := [*filter(psutil.pid_exists, pids)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    with pytest.raises(StopIteration):
        next(loader)


def test_a_deadly_file_costs_its_samples_and_no_step_changes(make_loader, write_dataset, model_config):
    """The order, and all other samples, are those of a run whose decoder only refuses the file; also after resuming."""
    good = SampleEncoder.from_config(write_dataset(), model_config, 4096)

    def taken(kind, num_workers, num_steps, consumed_samples=0):
        encoder = replace(good, images=kind(**vars(good.images)))
        loader = make_loader(encoder=encoder, num_workers=num_workers, skips_bad=True,
                             consumed_samples=consumed_samples)
        steps = [next(loader) for _ in range(num_steps)]
        return [one.microbatches for one in steps], [bad for one in steps for bad in one.bad]

    expected, refused = taken(Refusing, 0, 4)
    assert len(refused) > 1 and len({bad.index for bad in refused}) < len(refused), "over several epochs"
    found, bad = taken(Crashing, 2, 4)
    assert_same(found, expected)
    assert [(one.index, one.path) for one in bad] == [(one.index, one.path) for one in refused]
    assert all(one.reason.startswith(f"{one.path}: its decoder crashed (SIGSEGV)") for one in bad)
    assert_same(taken(Crashing, 1, 2, consumed_samples=16)[0], expected[2:])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_unusable_sample_is_raised_as_a_user_error(make_loader, tmp_path, num_workers):
    path = tmp_path / "short.png"
    photo(300, 300).save(path)
    path.write_bytes(path.read_bytes()[:3000])
    good = {"messages": [("user", "Hi"), ("assistant", "Hello")]}
    bad = {"messages": [("user", "<image>"), ("assistant", "x")], "images": [str(path)]}
    loader = make_loader([good] * 4 + [bad] + [good] * 3, shuffle=False, dp_size=1, global_batch_size=4,
                         num_workers=num_workers)  # fmt: skip
    next(loader)
    with pytest.raises(UserError) as error:
        next(loader)
    (problem,) = error.value.problems
    assert problem.startswith(f"{tmp_path}/data.json: record 4: {path}: the image is damaged")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bug_is_raised_with_the_sample(make_loader, write_dataset, model_config, num_workers):
    encoder = SampleEncoder.from_config(write_dataset(), model_config, 4096)
    broken = replace(encoder, images=None)
    loader = make_loader(encoder=broken, shuffle=False, num_workers=num_workers)
    with pytest.raises(AttributeError) as error:
        next(loader)
    described = str(error.value) + "".join(getattr(error.value, "__notes__", []))
    assert "while encoding sample" in described and "data.json: record 0" in described


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
