"""The microbatches of a workload are those of the run, with the counts that training gives them."""

import numpy as np

from mm.config.args import parse
from mm.config.data import DataConfig
from mm.config.run import Run
from mm.cost.workload import COUNTS, sample_counts, workload_of
from mm.data.sampler.sampler import order_of
from mm.plan.layouts import llava
from tests.tiny import our_config

LENGTHS = llava(64)


def run_of(dp_size: int, *flags: str, **data: object) -> Run:
    args = parse(["--lr", "1e-5", "--train-iters", "9", "--seq-length", "8192", "--micro-batch-size", "1", "--mm-model",
                  "model.json", "--mm-data", "data.json", *flags])  # fmt: skip
    return Run(args, our_config(((4,),), ((4,),)), DataConfig("hf", ("d.json",), **data), dp_size)


def test_microbatches_are_those_of_the_samplers() -> None:
    for flags, data in ((("--micro-batch-size", "2"), {}), ((), {"packing": True}),
                        ((), {"packing": True, "sampler_type": "BalancedBatchSampler"})):
        run = run_of(2, "--global-batch-size", "16", *flags, **data)
        found = workload_of(run, LENGTHS, num_steps=3)
        order, num_tokens = order_of(run, LENGTHS, 0, 0), 0
        for number, step in enumerate(found.steps):
            for counts, microbatches in zip(step, order.of_ranks(number), strict=True):
                expected = np.stack([sample_counts(LENGTHS.of(one)).sum(axis=0) for one in microbatches])
                assert np.array_equal(counts, expected)
                num_tokens += counts[:, COUNTS.index("num_tokens")].sum()
        assert found.mean("num_tokens") == num_tokens / 3
