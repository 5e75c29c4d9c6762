"""What makes a run fit: flags that do what they are said to do, and no cheaper ones would."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.config import args as arguments
from mm.config.layers import RecomputeConfig
from mm.config.run import Run
from mm.plan.dry_run import CHANGES, Change, changed, cheapest_fits, peak_of, stage_report
from tests.plan.test_dry_run import run_of

GIB = 2**30
BASE = ("--lr", "0", "--train-iters", "1", "--seq-length", "1024", "--micro-batch-size", "1", "--mm-model", "m.json",
        "--mm-data", "d.json", "--bf16")


OFFLOAD, FULL = "--cpu-offload-activations", RecomputeConfig("full", "uniform", 1)
"""The change that is offered only for recomputed layers, and their recomputation."""


def before(change: Change) -> Run:
    """A run to which ``change`` applies."""
    return run_of("3b", [32], [36], 2, bf16=True, **({"recompute": FULL} if change.flags == OFFLOAD else {}))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.flags)
def test_the_flags_of_a_change_do_what_it_does(change: Change) -> None:
    run = before(change)
    changed, parsed = change.applied(run), arguments.parse([*BASE, *change.flags.split()])
    assert changed is not None and changed != run
    assert changed.args.sharding == parsed.sharding and changed.args.kept_copy == parsed.kept_copy
    assert changed.args.host_share == parsed.host_share
    names = ("exp_avg_dtype", "exp_avg_sq_dtype", "grad_reduce_in_bf16")
    assert all(getattr(changed.args, name) == getattr(parsed, name) for name in names)
    for tower in (changed.model.vision, changed.model.language):
        assert tower.recompute == (FULL if change.flags == OFFLOAD else parsed.recompute)
        assert tower.offload.is_on is parsed.offload.is_on and tower.offload.num_layers == parsed.offload.num_layers


def test_flags_that_a_run_has_in_part_are_overridden() -> None:
    """Half of the optimizer states are in host memory; the flags of the change put the rest there."""
    own = [*BASE, "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5"]
    run = replace(run_of("3b", [32], [36], 2, bf16=True), args=arguments.parse(own))
    (change,) = (one for one in CHANGES if "--optimizer-cpu-offload" in one.flags)
    changed, parsed = change.applied(run), arguments.parse([*own, *change.flags.split()])
    assert changed is not None and changed.args.host_share == parsed.host_share == 1.0


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.flags)
def test_a_change_that_a_run_has_is_not_offered(change: Change) -> None:
    run = change.applied(before(change))
    assert run is not None and change.applied(run) is None


def test_a_change_that_does_not_apply_is_not_offered() -> None:
    alone, fp32 = run_of("3b", [32], [36], 1, bf16=True), run_of("3b", [32], [36], 2)
    found = {change.flags for change in CHANGES if change.applied(alone) is None}
    strategies = ("optim", "optim_grads", "optim_grads_params")
    assert found == {OFFLOAD, *(f"--data-parallel-sharding-strategy {one}" for one in strategies)}
    staged = run_of("3b", [32, 0], [0, 36], 4, bf16=True)
    found = {change.flags for change in CHANGES if change.applied(staged) is None}
    assert "--data-parallel-sharding-strategy optim_grads_params" in found, "it needs one stage"
    found = {change.flags.partition(" ")[0] for change in CHANGES if change.applied(fp32) is None}
    assert found == {OFFLOAD, "--store-param-remainders", "--exp-avg-dtype", "--grad-reduce-in-bf16",
                     "--main-params-dtype"}
    fixed = run_of("3b", [32], [36], 1, bf16=True, recompute=RecomputeConfig("selective"))
    assert all(change.applied(fixed) is None for change in CHANGES if "recompute" in change.flags)


@settings(max_examples=4, deadline=None)
@given(size=st.sampled_from(("3b", "7b")), world_size=st.sampled_from((1, 2, 8)), share=st.floats(0.2, 1.2),
       freeze=st.sampled_from(("", "v", "vp")))
def test_no_cheaper_changes_fit(size: str, world_size: int, share: float, freeze: str) -> None:
    run = run_of(size, [32], [{"3b": 36, "7b": 28}[size]], world_size, freeze=freeze, bf16=True, seq_length=4096)
    limit = int(share * peak_of(run))
    found = cheapest_fits(run, [limit])
    if limit >= peak_of(run):
        assert found == []
        return
    (fit,) = found
    order = {change.flags: 1 << bit for bit, change in enumerate(CHANGES)}
    chosen = sum(order[flags] for flags in fit.flags)
    every = {bits: changed(run, bits) for bits in range(1 << len(CHANGES))}
    peaks = {bits: peak_of(one) for bits, one in every.items() if one is not None}
    if chosen:
        assert peaks[chosen] == fit.peak_bytes <= limit
        assert all(peak > limit for bits, peak in peaks.items() if bits < chosen)
    else:
        assert fit.peak_bytes == min(peaks.values()) > limit


def test_of_nearly_equal_memories_only_the_smallest_is_answered() -> None:
    run = run_of("7b", [32], [28], 1, bf16=True, seq_length=8192)
    assert [fit.max_bytes for fit in cheapest_fits(run, [1000 * GIB, 80 * GIB, 79 * GIB, 64 * GIB])] == [
        79 * GIB, 64 * GIB]


def test_the_report_says_it() -> None:
    run = run_of("7b", [32], [28], 8, bf16=True, seq_length=8192)
    lines = [line for line in stage_report(run).splitlines() if line.startswith("To fit")]
    assert lines[1] == "To fit    140.40 GiB: add --data-parallel-sharding-strategy optim; the peak is then 133.34"
    assert "--data-parallel-sharding-strategy optim_grads" in lines[2]
    large = stage_report(replace(run_of("72b", [32], [80], 1, bf16=True, seq_length=8192)))
    assert "flags are not enough" in large and "as mm-plan suggests" in large
