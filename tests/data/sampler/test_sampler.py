"""Every sampler: each epoch contains each sample once, with equal global batches for all layouts and exact resume."""

import dataclasses
import itertools
import json
from collections import Counter
from functools import cache
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.config.data import PriorityMode, SamplerType
from mm.config.run import Run, load_run
from mm.data.sample import Lengths
from mm.data.sampler.cost import SampleSizes
from mm.data.sampler.sampler import (
    BLOCK_SAMPLES,
    NUM_BUCKETS,
    SAMPLERS,
    _random,
    bucket_stream,
    chosen,
    order_of,
    sampler_name,
    shuffled,
    split_off,
)
from tests.config.test_model import changed
from tests.data.oracle import plain_order
from tests.tiny import our_config

sizes = st.integers(1, 60)
seeds = st.integers(0, 2**63 - 1)


def stream(num_samples, seed, first, count, shuffle=True):
    return shuffled(num_samples, seed, shuffle).samples(first, count).tolist()


@given(sizes, seeds, st.integers(0, 5), st.booleans())
def test_each_epoch_of_a_stream_holds_each_sample_once(num_samples, seed, epoch, shuffle):
    samples = stream(num_samples, seed, epoch * num_samples, num_samples, shuffle)
    assert sorted(samples) == list(range(num_samples))


@given(sizes, seeds, st.integers(0, 200), st.integers(0, 100), st.integers(0, 100))
def test_a_stream_does_not_depend_on_the_pieces_it_is_read_in(num_samples, seed, first, count, more):
    whole = stream(num_samples, seed, first, count + more) if count + more else []
    one = stream(num_samples, seed, first, count) if count else []
    assert one + (stream(num_samples, seed, first + count, more) if more else []) == whole


def test_without_shuffle_the_order_is_the_files():
    assert stream(3, 7, 0, 7, shuffle=False) == [0, 1, 2, 0, 1, 2, 0]


def test_order_differs_between_epochs_and_between_seeds():
    orders = [tuple(stream(50, seed, epoch * 50, 50)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16


def test_the_order_of_a_seed_is_that_of_earlier_versions():
    """Otherwise a run resumed with a new version would repeat some samples and skip others."""
    for epoch in (0, 3):
        expected = np.random.default_rng(np.random.SeedSequence([5, epoch])).permutation(20).tolist()
        assert stream(20, 5, epoch * 20, 20) == expected


def global_batch(step, dp_size, micro_batch_size, num_samples, seed, global_batch_size, consumed_samples=0):
    """Indices of all ranks, microbatch by microbatch."""
    steps = [plain_order(num_samples, seed, True, global_batch_size, micro_batch_size, dp_rank, dp_size,
                         consumed_samples).step(step) for dp_rank in range(dp_size)]
    assert {len(one) for one in steps} == {global_batch_size // (micro_batch_size * dp_size)}
    return [index for turn in zip(*steps, strict=True) for indices in turn for index in indices]


@pytest.mark.parametrize("global_batch_size", [4, 8])
def test_resume_with_another_global_batch_size_skips_and_repeats_nothing(global_batch_size):
    before = [index for step in range(2) for index in global_batch(step, 1, 1, 28, 3, 6)]
    after = [index for step in range((28 - len(before)) // global_batch_size)
             for index in global_batch(step, 2, 2, 28, 3, global_batch_size, consumed_samples=len(before))]
    assert sorted(before + after) == list(range(28))


counts = st.integers(0, 200)


@given(counts, st.floats(0, 500), st.none() | st.integers(1, 300), seeds)
def test_rates(num, rate, wanted, seed):
    found = chosen(num, rate, wanted, seed, "a")
    if num:
        assert len(found) == round((wanted or num) * rate / 100)
        times = np.bincount(found, minlength=num)
        assert times.max() - times.min() <= 1 and len(times) == num
    else:
        assert len(found) == 0
    assert (found == chosen(num, rate, wanted, seed, "a")).all()


def test_a_rate_of_100_takes_the_file_unchanged_and_others_are_drawn():
    assert chosen(5, 100, None, 1, "a").tolist() == [0, 1, 2, 3, 4]
    half = chosen(1000, 50, None, 1, "a")
    assert (np.diff(half) > 0).all()
    for other in (chosen(1000, 50, None, 2, "a"), chosen(1000, 50, None, 1, "b")):
        assert 200 < len(np.intersect1d(half, other)) < 300  # by chance 250


@given(st.lists(st.integers(0, 50), min_size=1), st.floats(0, 0.99), seeds)
def test_no_sample_is_on_both_sides(samples, rate, seed):
    samples = np.array(samples, dtype=np.int64)
    training, validation = split_off(samples, rate, seed)
    assert not np.isin(training, validation).any()
    assert len(np.unique(validation)) == len(validation) == round(len(np.unique(samples)) * rate)
    assert sorted([*training, *samples[np.isin(samples, validation)]]) == sorted(samples)
    again = split_off(samples, rate, seed)
    assert (again[0] == training).all() and (again[1] == validation).all()


@given(st.integers(0, 2000), st.integers(1, 4), st.floats(0, 1), st.integers(0, 9))
def test_the_validation_samples_come_from_a_permutation(count: int, step: int, rate: float, seed: int) -> None:
    """With several chunks and repeats too: resumed runs must find the same samples."""
    samples = np.concatenate([np.arange(0, count, step, dtype=np.uint32), np.arange(count, dtype=np.uint32)])
    different = np.unique(samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mm.data.sampler.sampler._BATCH_SAMPLES", 256)
        training, validation = split_off(samples, rate, seed)
    expected = np.sort(_random(seed, "validation").permutation(different)[: round(len(different) * rate)])
    assert np.array_equal(validation, expected) and validation.dtype == np.uint32
    assert np.array_equal(training, samples[~np.isin(samples, expected)]) and training.dtype == np.uint32


SEQ_LENGTH = 512
MODEL = our_config(((4,),), ((4,),))
PACKING = {"dataset_param.basic_parameters.packing": True}


def sampler(name: str, **more) -> dict:
    return {"dataloader_param.sampler_type": name} | more


KINDS = {
    "random": sampler("BaseRandomBatchSampler"),
    "stateful": sampler("stateful_distributed_sampler"),
    "sequential": sampler("SequentialSampler"),
    "bucketing": sampler("BucketBatchSampler"),
    "reordering": sampler("BucketBatchSampler", **{"dataloader_param.priority_mode": "data_reordering_img"}),
    "balanced": sampler("BalancedBatchSampler"),
    "packed": PACKING,
    "packed, few patches": PACKING | {"dataset_param.basic_parameters.packing_max_patches": 700},
    "packed evenly": sampler("BalancedBatchSampler") | PACKING,
    "packed evenly, few patches": sampler("BalancedBatchSampler") | PACKING | {
        "dataset_param.basic_parameters.packing_max_patches": 700},
}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Settings that select a sampler; the model is small."""
    directory = tmp_path_factory.mktemp("runs")

    @cache
    def make(kind: str, dp_size: int = 1, micro_batch_size: int = 2, batch: int = 24, seed: int = 5) -> Run:
        paths = []
        for name, changes in (("model_7b.json", {}), ("data_7b.json", KINDS[kind])):
            paths.append(directory / name)
            paths[-1].write_text(json.dumps(changed(name, changes)))
        run = load_run([
            "--mm-model", str(paths[0]), "--mm-data", str(paths[1]), "--micro-batch-size", str(micro_batch_size),
            "--global-batch-size", str(batch), "--seq-length", str(SEQ_LENGTH), "--train-iters", "9", "--lr", "1e-5",
            "--seed", str(seed), "--bf16", "--dry-run",
        ], 2 * dp_size, {})  # fmt: skip
        return dataclasses.replace(run, model=our_config(((4, 0),), ((0, 4),)))

    return make


@cache
def lengths(num_samples: int = 100) -> Lengths:
    """A third is text; the rest has pictures of very different sizes."""
    rng = np.random.default_rng(num_samples)
    sides = 2 * rng.integers(1, 11, num_samples) * (rng.random(num_samples) < 0.67)
    patches = sides**2
    tokens = np.minimum(SEQ_LENGTH, patches // 4 + np.clip(rng.lognormal(4, 1, num_samples), 1, 400).astype(int))
    return Lengths(tokens, tokens // 2, (sides > 0).astype(int), patches, patches**2, patches * 16)


def steps(run: Run, numbers, consumed: int = 0, num_samples: int = 100):
    """What each rank takes in each of these steps."""
    orders = [order_of(run, lengths(num_samples), rank, consumed) for rank in range(run.dp_size)]
    return [[order.step(number) for order in orders] for number in numbers]


def samples_in(step) -> list[int]:
    return sorted(one for rank in step for microbatch in rank for one in microbatch)


def test_the_table_has_a_sampler_for_every_setting_and_no_other(run_of):
    """Packs in buckets are refused (``mm.config.data``)."""
    data = run_of("random").data
    found = {
        sampler_name(dataclasses.replace(data, sampler_type=kind, priority_mode=mode, packing=packing))
        for kind, mode, packing in itertools.product(get_args(SamplerType), get_args(PriorityMode), (False, True))
        if not (packing and kind == "BucketBatchSampler")
    }
    assert found == set(SAMPLERS)


@pytest.mark.parametrize("kind", KINDS)
def test_each_epoch_holds_each_sample_once(run_of, kind):
    """100 samples and batches of 24: most global batches at the end of an epoch span two."""
    found = Counter()
    for step in steps(run_of(kind), range(25)):  # six epochs
        found.update(samples_in(step))
    assert found == Counter(dict.fromkeys(range(100), 6))


@pytest.mark.parametrize("kind", KINDS)
def test_global_batches_are_the_same_for_every_layout(run_of, kind):
    expected = [samples_in(step) for step in steps(run_of(kind), range(5))]
    for dp_size, micro_batch_size in ((2, 2), (3, 4), (4, 1), (4, 3), (12, 2)):
        run = run_of(kind, dp_size, micro_batch_size)
        found = steps(run, range(5))
        assert [samples_in(step) for step in found] == expected
        assert all(rank for step in found for rank in step)
        if not run.data.packs:
            assert {len(one) for step in found for rank in step for one in rank} == {micro_batch_size}
            assert {len(rank) for step in found for rank in step} == {run.num_microbatches}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_mid_epoch_under_another_layout(run_of, kind):
    whole = [samples_in(step) for step in steps(run_of(kind, 4), range(6))]
    resumed = [samples_in(step) for step in steps(run_of(kind, 2), range(3), consumed=72)]
    assert resumed == whole[3:]
    same = steps(run_of(kind, 4), range(3), consumed=72)
    assert same == steps(run_of(kind, 4), range(3, 6))  # to each microbatch


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_changes_the_order(run_of, kind):
    found = {tuple(map(tuple, steps(run_of(kind, seed=seed), [0])[0][0])) for seed in (5, 6)}
    assert len(found) == (1 if kind == "sequential" else 2)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("bucketing", "sequential")])
def test_the_global_batch_equals_a_plain_shuffles(run_of, kind):
    plain = shuffled(100, 5)
    for number, step in enumerate(steps(run_of(kind, 2), range(6))):
        assert samples_in(step) == sorted(plain.samples(24 * number, 24).tolist())


@pytest.mark.parametrize(("kind", "most"), [("balanced", 1.01), ("packed evenly", 1.01)])
def test_balanced_ranks_cost_the_same(run_of, kind, most):
    """32 samples for each of 4 ranks; plain sampling differs by more."""
    costs, excess = SampleSizes(MODEL, lengths(1000)).all_costs(), {}
    for one in ("random", kind):
        found = steps(run_of(one, 4, batch=128), range(7), num_samples=1000)
        of_ranks = [[sum(costs[pack].sum() for pack in rank) for rank in step] for step in found]
        excess[one] = [max(ranks) / np.mean(ranks) for ranks in of_ranks]
    assert max(excess[kind]) <= most < min(excess["random"])  # measured: 1.0019, and 1.0910 of plain


def test_reordering_makes_costly_microbatches_coincide(run_of):
    costs = SampleSizes(MODEL, lengths()).all_costs()
    (step,) = steps(run_of("reordering", 4, 1), [0])
    of_turns = np.array([[costs[one].sum() for one in rank] for rank in step]).T
    assert (of_turns.max(axis=1)[:-1] <= of_turns.min(axis=1)[1:]).all()


def test_buckets_follow_one_another_in_runs():
    costs = np.random.default_rng(0).permutation(4100)
    first, second = (bucket_stream(costs, 7, True).samples(epoch * 4100, 4100) for epoch in range(2))
    for order in (first, second):
        assert sorted(order.tolist()) == list(range(4100))
        rank = np.argsort(np.argsort(costs))[order] * NUM_BUCKETS // 4100
        changes = np.count_nonzero(np.diff(rank))
        assert changes < 4100 // BLOCK_SAMPLES + 4100 % BLOCK_SAMPLES + NUM_BUCKETS * BLOCK_SAMPLES // 2
    assert (first != second).any()


def test_virtual_chunks_get_a_microbatch_for_each_stage(run_of):
    """And a multiple of that number: otherwise a chunk would have more in flight in some steps."""
    chunks = our_config(((2, 1), (1, 0)), ((0, 0), (2, 2)))
    for kind in ("packed", "packed evenly"):
        for micro_batch_size in (1, 8):  # many packs and few
            run = dataclasses.replace(run_of(kind, 3, micro_batch_size), model=chunks)
            counts = {len(rank) for step in steps(run, range(6)) for rank in step}
            assert all(count % 2 == 0 for count in counts)
            assert max(counts) == (8 if kind == "packed evenly" else 2 if micro_batch_size == 8 else 4)
