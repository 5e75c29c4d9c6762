"""The microbatches of a workload are those of the run, with the counts that training gives them."""

from dataclasses import replace

import numpy as np

from mm.cost.workload import COUNTS, sample_counts, workload_of
from mm.data.sampler.sampler import order_of
from mm.plan.layouts import llava
from tests.cost.test_costs import ALONE
from tests.cost.test_predict import run_of

LENGTHS = llava(64)


def test_microbatches_are_those_of_the_samplers() -> None:
    for flags, data in ((("--micro-batch-size", "2"), {}), ((), {"packing": True}),
                        ((), {"packing": True, "sampler_type": "BalancedBatchSampler"})):
        run = run_of(ALONE, 2, "--train-iters", "9", "--seq-length", "8192", "--global-batch-size", "16", *flags)
        run = replace(run, data=replace(run.data, **data))
        found = workload_of(run, LENGTHS, num_steps=3)
        order, num_tokens = order_of(run, LENGTHS, 0, 0), 0
        for number, step in enumerate(found.steps):
            for counts, microbatches in zip(step, order.of_ranks(number), strict=True):
                expected = np.stack([sample_counts(LENGTHS.of(one)).sum(axis=0) for one in microbatches])
                assert np.array_equal(counts, expected)
                num_tokens += counts[:, COUNTS.index("num_tokens")].sum()
        assert found.mean("num_tokens") == num_tokens / 3
