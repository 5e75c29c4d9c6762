"""Rules between flags of a training; ``tests/config/test_run.py`` has those that files take part in."""

import pytest

from mm.config.flag_rules import flag_problems
from mm.config.flags import Arguments

NEEDED: dict = {"mm_model": "m.json", "mm_data": "d.json", "micro_batch_size": 1, "seq_length": 8, "train_iters": 1,
                "lr": 0.1}  # fmt: skip


def problems(**flags: object) -> list[str]:
    return list(flag_problems(Arguments(**NEEDED, **flags)))


@pytest.mark.parametrize(("flags", "sharding"), [
    ({}, "no_shard"), ({"use_distributed_optimizer": True}, "optim"),
    ({"data_parallel_sharding_strategy": "optim"}, "optim"),
    ({"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim_grads"}, "optim_grads"),
])  # fmt: skip
def test_a_strategy_includes_the_distributed_optimizer(flags: dict, sharding: str) -> None:
    args = Arguments(**NEEDED, **flags)
    assert args.sharding == sharding and not list(flag_problems(args))
    assert (args.splits_optimizer, args.shards_gradients) == (sharding != "no_shard", sharding == "optim_grads")


def test_a_share_in_host_memory_needs_the_offload() -> None:
    (found,) = problems(optimizer_offload_fraction=0.5)
    assert found.startswith("--optimizer-offload-fraction is 0.5, but --optimizer-cpu-offload is missing")
    args = Arguments(**NEEDED, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert not list(flag_problems(args)) and args.host_share == 0.5
    assert Arguments(**NEEDED, optimizer_cpu_offload=True).host_share == 1.0 and Arguments(**NEEDED).host_share == 0.0


def test_strategies_that_contradict_other_flags_are_refused() -> None:
    (found,) = problems(use_distributed_optimizer=True, data_parallel_sharding_strategy="no_shard")
    assert "contradict each other" in found and "write optim for no_shard" in found
    overlap = {"overlap_param_gather": True, "overlap_grad_reduce": True}
    (found,) = problems(**overlap, data_parallel_sharding_strategy="no_shard")
    assert "needs --overlap-grad-reduce and split optimizer state" in found
    assert not problems(**overlap, data_parallel_sharding_strategy="optim_grads")
