"""What a step costs whose gradients and weights are sharded, or whose optimizer states are in host memory; see
tests/test_budgets.py."""

from dataclasses import replace

import pytest

from mm.config.run import Run
from mm.cost.stage_memory import BucketBuffers, build_bytes
from tests.meta.step import Case
from tests.test_budgets import FEW_LAYERS, FROZEN_VIT, FULL, STEP_HOST_READS, formulas, rows_of
from tests.workload import OFFLOADED


def test_states_in_host_memory_are_not_on_the_device(traced) -> None:
    """Only the attention of four layers is trained: the states are in real memory here."""
    from tests.plan.test_dry_run import run_of, sizes

    case = Case("3b", layers=FEW_LAYERS, full_attention=FULL, freeze=FROZEN_VIT,
                freeze_modules=("embedding", "output_layer", "mlp", "norm"), flags=OFFLOADED)
    run = replace(run_of("3b", [4], [4], 1, bf16=True, optimizer_cpu_offload=True), model=case.model())
    (size,) = sizes(run)
    assert size.optimizer_bytes == 0 and size.host_bytes == 12 * size.num_trainable_params > 4e8
    assert size.total_bytes == pytest.approx(traced(case).state_bytes, abs=1e5)
    assert sum(traced(case).host_reads.values()) <= STEP_HOST_READS
    run = replace(run, args=replace(run.args, use_distributed_optimizer=True))
    assert traced(case).built_peak_bytes == pytest.approx(build_bytes(run, size), rel=1e-3)


SHARDS = ("--data-parallel-sharding-strategy", "optim_grads")
WEIGHT_SHARDS = ("--data-parallel-sharding-strategy", "optim_grads_params")
OVERLAPPED = ("--overlap-grad-reduce", "--overlap-param-gather")

SHARDED = {
    "3B": Case("3b", 6, num_microbatches=2, layers=FEW_LAYERS, full_attention=FULL),
    # the last unit of a pass is the embedding, whose buffer must be gone when logits are made
    "7B, frozen ViT": Case("7b", 6, num_microbatches=2, layers=FEW_LAYERS, full_attention=FULL, freeze=FROZEN_VIT),
    "7B, first of two stages": Case("7b", 3, num_microbatches=4, layers=((4, 0), (2, 2)), full_attention=FULL),
}


def sharded(case: Case, *more: str, strategy: tuple[str, str] = SHARDS) -> tuple[Case, Run]:
    """``case`` on four replicas whose gradients are sharded, and its run."""
    from tests.plan.test_dry_run import run_of

    given = {name.lstrip("-").replace("-", "_"): True for name in more}
    model = case.model()
    run = run_of("3b", [32], [36], 4 * model.num_stages, bf16=True, data_parallel_sharding_strategy=strategy[1],
                 **given)
    return replace(case, dp_size=4, flags=(*strategy, *more)), replace(run, model=model)


@pytest.mark.parametrize(("name", "more"), [
    ("3B", ()), ("7B, frozen ViT", ("--overlap-grad-reduce",)), ("7B, first of two stages", ())], ids=str)
def test_the_memory_of_gradients_in_shards_is_that_of_the_dry_run(traced, name: str, more: tuple[str, ...]) -> None:
    """States to some padding; the formula measured 0.3% below to 2.8% above the peak, and 5.2% on the first of two
    stages, whose activations are gone when the word embedding's gradient is made."""
    from tests.plan.test_dry_run import sizes

    case, run = sharded(SHARDED[name], *more)
    step, size = traced(case), sizes(run)[case.stage]
    assert size.gradient_bytes == size.num_trainable_params
    assert step.state_bytes == pytest.approx(size.total_bytes, rel=1e-5)
    peak = formulas(case).peak_bytes(rows_of(step), case.num_microbatches, step.state_bytes, BucketBuffers.of(run))
    assert 0.995 <= peak / step.peak_bytes <= (1.055 if case.model().num_stages > 1 else 1.03)


@pytest.mark.parametrize("more", [(), ("--grad-reduce-in-bf16",)], ids=str)
def test_gradients_in_shards(traced, more: tuple[str, ...]) -> None:
    """Each unit is reduced in each backward pass, and the host waits for none."""
    from tests.plan.test_dry_run import sizes

    case, run = sharded(SHARDED["3B"], *more)
    step, whole, (size,) = traced(case), traced(replace(case, flags=())), sizes(run)
    assert step.state_bytes == pytest.approx(size.total_bytes + size.update_bytes, rel=1e-5)
    assert step.peak_bytes < whole.peak_bytes
    num_units, passes = 4 + 4 + 3, case.num_microbatches  # layers, and patch and word embedding, projector
    assert step.collectives["_reduce_scatter_base_"] == num_units * passes
    reduced = passes * whole.collective_bytes["_reduce_scatter_base_"] / (2 if more else 1)
    assert step.collective_bytes["_reduce_scatter_base_"] == pytest.approx(reduced, rel=0.001)
    assert step.host_reads == whole.host_reads
    kernels, before = (one.total("forward", "backward").kernels for one in (step, whole))
    assert kernels <= before + 2 * num_units * passes  # zeroing norms and biases, adding the shard


@pytest.mark.parametrize(("name", "more"), [("3B", OVERLAPPED), ("7B, frozen ViT", ())], ids=str)
def test_the_memory_of_weights_in_shards_is_that_of_the_dry_run(traced, name: str, more: tuple[str, ...]) -> None:
    """States exactly, but for norms and biases, which are also kept whole; the formula measured 1.5 to 2.9% above the
    peak."""
    from tests.plan.test_dry_run import sizes

    case, run = sharded(SHARDED[name], *more, strategy=WEIGHT_SHARDS)
    step, (size,) = traced(case), sizes(run)
    assert size.weight_bytes == size.num_params / 2
    assert step.state_bytes == pytest.approx(size.total_bytes, rel=1e-4)
    peak = formulas(case).peak_bytes(rows_of(step), case.num_microbatches, step.state_bytes, BucketBuffers.of(run))
    assert peak == pytest.approx(step.peak_bytes, rel=0.03)


@pytest.mark.parametrize("more", [(), OVERLAPPED], ids=str)
def test_weights_in_shards(traced, more: tuple[str, ...]) -> None:
    """Each unit is gathered in each forward and backward pass, the output layer once for both, and the word embedding
    in forward passes only; the host waits for none."""
    case, _ = sharded(SHARDED["3B"], *more, strategy=WEIGHT_SHARDS)
    gradients, _ = sharded(SHARDED["3B"], *more)
    step, before = traced(case), traced(gradients)
    assert step.peak_bytes < before.peak_bytes
    num_units = 4 + 4 + 3  # layers, and patch and word embedding, projector; the output layer is tied
    assert step.collectives["_allgather_base_"] == case.num_microbatches * (num_units + 1 + num_units - 1)
    gathered = 2 * case.num_microbatches * before.collective_bytes["_allgather_base_"]
    assert step.collective_bytes["_allgather_base_"] == gathered
    assert step.collectives["_reduce_scatter_base_"] == before.collectives["_reduce_scatter_base_"]
    assert step.host_reads == before.host_reads
