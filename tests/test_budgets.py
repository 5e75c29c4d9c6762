"""What one training step may cost on a CUDA device: kernels, bytes, host reads and memory, counted on the meta device.

The budgets hold the present code: whoever makes a step leaner lowers them, and nobody raises one without a reason
beside it.  Before gradients were added by the products, pointwise work was fused and Adam clipped, the whole step of
``WHOLE`` took 7029 kernels, 824 GB and 3 host reads, both passes 5272 kernels and 606 GB.

All steps are traced in one process of their own, because tracing patches it.  Those of sharded and offloaded states are
in tests/test_shard_budgets.py.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest

from mm.cost.by_device import rounding_bytes
from mm.cost.memory import ChunkMemory, MicrobatchSizes
from mm.cost.stage_memory import StageMemory
from mm.model.layers.loss import max_logit_rows
from mm.weights.shard import memory_shape
from mm.weights.table import model_weights
from tests.meta.step import Case, Trace
from tests.workload import NO_COPIES, REMAINDERS, ROUNDED_MOMENTS


class Budget(NamedTuple):
    """Most kernels, and most bytes read and written, in GB."""

    kernels: int
    gigabytes: float


WHOLE = Case("3b")
"""12 samples of 689 tokens in one microbatch, everything trained."""

STEP_BUDGET = Budget(kernels=2242, gigabytes=347.8)
"""Both passes of ``WHOLE``; the goal is 2300 kernels and 350 GB."""
STAGE = Case("7b", 4, num_microbatches=2, layers=((32, 0), (12, 16)), tp_size=2, sequence_parallel=True)
"""The first of two stages, with two microbatches of 2756 tokens."""
STAGE_BUDGET = Budget(kernels=3057, gigabytes=124.7)
"""Both passes of ``STAGE``; the goal is 3100 kernels and 120 GB, out of reach while SwiGLU is no part of the products
beside it."""
UPDATE_BUDGET = Budget(kernels=30, gigabytes=142.7)
"""What follows: norm, clipping, Adam, copies to the weights.  One operator over all tensors counts as one kernel."""
SCHEDULE_HOST_READS = 0
"""In both passes and what prepares them: one would empty the queue of the device."""
STEP_HOST_READS = 1
"""In the whole step: the loss and the norm, in one."""

LAYER_BUDGETS = {
    # size, layer: forward and backward of one more layer over 8268 tokens or 15120 patches
    ("3b", "ViT, windows"): (Budget(9, 1.678), Budget(26, 2.772)),
    ("3b", "ViT, whole images"): (Budget(10, 1.756), Budget(28, 2.927)),
    ("3b", "LLM"): (Budget(9, 1.895), Budget(20, 3.409)),
    ("7b", "LLM"): (Budget(9, 3.486), Budget(20, 6.506)),  # its ViT is that of 3B
}

FROZEN_VIT = ("vision", "projector")
FEW_LAYERS = ((4,), (4,))
FULL = (1, 3)
MEMORY_CASES = {
    "3B": WHOLE,
    "7B, frozen ViT, full recompute": Case("7b", freeze=FROZEN_VIT, recompute="full"),
    "3B, few layers, selective": Case("3b", layers=FEW_LAYERS, full_attention=FULL, recompute="selective"),
    "3B, few layers, full recompute": Case("3b", layers=FEW_LAYERS, full_attention=FULL, recompute="full"),
    "3B, few layers, frozen ViT": Case("3b", layers=FEW_LAYERS, full_attention=FULL, freeze=FROZEN_VIT),
    "3B, few layers, first of both frozen": Case(
        "3b", layers=FEW_LAYERS, full_attention=FULL, freeze=FROZEN_VIT, freeze_layers=("", "0-1"),
        freeze_modules=("embedding",)),
    "3B, few layers, norms recomputed, fc1 alone trained": Case(
        "3b", layers=FEW_LAYERS, full_attention=FULL, freeze=FROZEN_VIT, recompute="layernorm",
        freeze_modules=("embedding", "attention", "norm", "fc2", "output_layer")),
    "3B, few layers, adapters": Case("3b", layers=FEW_LAYERS, full_attention=FULL, lora_rank=64),
    "3B, few layers, frozen ViT, adapters, selective": Case(
        "3b", layers=FEW_LAYERS, full_attention=FULL, freeze=FROZEN_VIT, lora_rank=64, recompute="selective"),
    "3B, few layers, TP 2, sequence, adapters": Case("3b", layers=FEW_LAYERS, full_attention=FULL, tp_size=2,
                                                     sequence_parallel=True, lora_rank=64),
    "7B, few layers": Case("7b", layers=FEW_LAYERS, full_attention=FULL),
    "3B, first of two stages": Case("3b", 4, num_microbatches=4, layers=((4, 0), (1, 3)), full_attention=FULL),
    "3B, last of two stages": Case("3b", 4, num_microbatches=4, layers=((4, 0), (1, 3)), full_attention=FULL, stage=1),
    "3B, last of two stages, after part of the ViT": Case(
        "3b", 4, num_microbatches=4, layers=((2, 2), (0, 4)), full_attention=(1, 2), stage=1),
    "3B, few layers, TP 2, sequence": Case("3b", layers=FEW_LAYERS, full_attention=FULL, tp_size=2,
                                           sequence_parallel=True),
    "3B, few layers, TP 2, sequence, full recompute": Case("3b", layers=FEW_LAYERS, full_attention=FULL, tp_size=2,
                                                           recompute="full", sequence_parallel=True),
    "3B, few layers, TP 2, sequence, whole encoder": Case(
        "3b", layers=FEW_LAYERS, full_attention=FULL, tp_size=2, sequence_parallel=True, whole_encoder=True),
    "3B, few layers, four encoded together": Case("3b", 3, num_microbatches=4, layers=FEW_LAYERS, full_attention=FULL,
                                                  encoder_batch=4),
    "3B, few layers, three of four encoded together, TP 2, sequence": Case(
        "3b", 3, num_microbatches=4, layers=FEW_LAYERS, full_attention=FULL, encoder_batch=3, tp_size=2,
        sequence_parallel=True),
    **{f"{name}, offloaded": case for name, case in {
        "3B": Case("3b", offload=36),
        "3B, few layers": Case("3b", layers=FEW_LAYERS, full_attention=FULL, offload=4),
        "3B, last of two stages": Case("3b", 4, num_microbatches=4, layers=((4, 0), (1, 3)), full_attention=FULL,
                                       stage=1, offload=4),
        "3B, few layers, TP 2, sequence, full recompute": Case(
            "3b", layers=FEW_LAYERS, full_attention=FULL, tp_size=2, recompute="full", sequence_parallel=True,
            offload=4),
        "3B, few layers, four encoded together": Case("3b", 3, num_microbatches=4, layers=FEW_LAYERS,
                                                      full_attention=FULL, encoder_batch=4, offload=4),
        "3B, few layers, ring of 2": Case("3b", layers=FEW_LAYERS, full_attention=FULL, cp_size=2, is_ring=True,
                                          offload=4),
    }.items()},
    "3B, few layers, Ulysses 2": Case("3b", layers=FEW_LAYERS, full_attention=FULL, cp_size=2),
    "3B, few layers, ring of 2": Case("3b", layers=FEW_LAYERS, full_attention=FULL, cp_size=2, is_ring=True),
    "7B, few layers, TP 2, sequence, ring of 2": Case("7b", layers=FEW_LAYERS, full_attention=FULL, tp_size=2,
                                                      cp_size=2, is_ring=True, sequence_parallel=True),
}


def assert_within(found: Budget, budget: Budget) -> None:
    assert found.kernels <= budget.kernels and found.gigabytes <= budget.gigabytes, (found, budget)


def cost(traced_step: Trace, *phases: str) -> Budget:
    total = traced_step.total(*phases)
    return Budget(total.kernels, total.num_bytes / 1e9)


def test_kernels_bytes_and_host_reads_of_a_step(traced) -> None:
    step = traced(WHOLE)
    reads = step.host_reads
    assert sum(reads.get(phase, 0) for phase in ("prepare", "forward", "backward")) <= SCHEDULE_HOST_READS, reads
    assert sum(reads.values()) <= STEP_HOST_READS, reads
    assert (step.num_tokens, step.num_patches, step.num_targets) == (8268, 15120, 2220)
    assert_within(cost(step, "forward", "backward"), STEP_BUDGET)
    assert_within(cost(step, "update"), UPDATE_BUDGET)
    assert_within(cost(traced(STAGE), "forward", "backward"), STAGE_BUDGET)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_whole_encoder_has_no_collectives_but_one_exchange(traced, sequence_parallel: bool) -> None:
    """7B at TP 2: the ViT's 32 layers and the projector no longer wait for the other rank, and move fewer bytes.

    Measured: 250 and 124 collectives, with sequence parallelism 619 and 294; both passes move 266 and 250 GB, or 242
    and 236.
    """
    cut = Case("7b", tp_size=2, sequence_parallel=sequence_parallel)
    before, after = traced(cut), traced(replace(cut, whole_encoder=True))
    assert 2 * after.num_patches == before.num_patches
    assert after.collectives["alltoall_base_"] == 2 * cut.num_microbatches  # visual tokens, and their gradients
    assert sum(after.collectives.values()) < 0.55 * sum(before.collectives.values())
    kernels, gigabytes = cost(before, "forward", "backward")
    assert_within(cost(after, "forward", "backward"), Budget(kernels + 2, 0.98 * gigabytes))
    assert after.total("forward", "backward").flops == pytest.approx(before.total("forward", "backward").flops, 1e-3)


def test_flops_are_those_of_the_model(traced) -> None:
    """Measured 0.96% more: five products in attention's backward where the model's count has four, logits of 2,048
    of the 2,220 targets a second time, and columns that pad the ViT's ffn."""
    step = traced(WHOLE)
    assert step.total("forward", "backward").flops == pytest.approx(step.model_flops, rel=0.012)


LAYERS = {
    # name: layers of both towers and ViT layers over whole images, without and with one more layer of this kind
    "ViT, windows": (((2,), (2,)), (0,), ((3,), (2,)), (0,)),
    "ViT, whole images": (((2,), (2,)), (0,), ((3,), (2,)), (0, 2)),
    "LLM": (((2,), (2,)), (0,), ((2,), (3,)), (0,)),
}


@pytest.mark.parametrize(("size", "layer"), LAYER_BUDGETS)
def test_kernels_and_bytes_of_a_layer(traced, size: str, layer: str) -> None:
    before_layers, before_full, after_layers, after_full = LAYERS[layer]
    before = traced(Case(size, layers=before_layers, full_attention=before_full))
    after = traced(Case(size, layers=after_layers, full_attention=after_full))
    for phase, budget in zip(("forward", "backward"), LAYER_BUDGETS[size, layer], strict=True):
        one, two = cost(before, phase), cost(after, phase)
        assert_within(Budget(two.kernels - one.kernels, two.gigabytes - one.gigabytes), budget)


def formulas(case: Case) -> StageMemory:
    model = case.model()
    placement = model.placement()
    return StageMemory(tuple(ChunkMemory(
        model, placement, placement[case.stage, chunk], case.tp_size, "bf16",
        case.tp_size if case.sequence_parallel else 1, 1 if case.is_ring else case.cp_size)
        for chunk in range(placement.num_chunks)))


def rows_of(step: Trace) -> MicrobatchSizes:
    return MicrobatchSizes(step.num_tokens, step.num_patches, step.num_targets)


def kept_logit_bytes(chunk: ChunkMemory, rows: MicrobatchSizes) -> int:
    """Logits of a microbatch's last block, which CUDA's kernels keep too."""
    if not rows.num_targets or not chunk.spec.has_head:
        return 0
    num_rows = (rows.num_targets - 1) % max_logit_rows(chunk.width, is_fused=True) + 1
    return num_rows * (chunk.model.language.vocab_size // chunk.tp_size) * chunk.width


@pytest.mark.parametrize("name", [
    name for name, case in MEMORY_CASES.items() if case.encoder_batch in (1, case.num_microbatches)])
def test_kept_bytes_are_those_of_the_formula(traced, name: str) -> None:
    """When the first backward pass begins, which is the peak unless passes of the ViT for several microbatches overlap
    later.  Measured at most 0.7% off, but for a message on its way, 22.7 MB."""
    case, step, memory = MEMORY_CASES[name], traced(MEMORY_CASES[name]), formulas(MEMORY_CASES[name])
    (chunk,), rows = memory.chunks, rows_of(step)
    (num_in_flight,) = memory.in_flight(rows, case.num_microbatches)
    expected = memory.kept_bytes(rows, case.num_microbatches) + num_in_flight * kept_logit_bytes(chunk, rows)
    expected += chunk.passing_bytes(rows) * chunk.spec.has_head  # on other stages it has left
    message = 23e6 if case.model().num_stages > 1 else 0
    assert expected == pytest.approx(step.in_flight_bytes, rel=0.008, abs=message)


@pytest.mark.parametrize("name", MEMORY_CASES)
def test_peak_is_that_of_the_formula(traced, name: str) -> None:
    """Measured 0.3% below to 2.9% above, where a few recomputed layers work on little else: it counts all that such
    a layer makes as alive at once.  The same is up to 6.7% where activations are offloaded and few layers have small
    states, and 0.5% for a model of real size."""
    case, step = MEMORY_CASES[name], traced(MEMORY_CASES[name])
    peak = formulas(case).peak_bytes(rows_of(step), case.num_microbatches, step.state_bytes)
    assert 0.995 <= peak / step.peak_bytes <= (1.07 if case.offload and case.layers else 1.03)


@pytest.mark.parametrize("name", [
    "3B, few layers, selective", "3B, first of two stages", "3B, last of two stages", "3B, few layers, TP 2, sequence"])
def test_a_validation_needs_no_more_memory_than_a_step(traced, name: str) -> None:
    """By the formula.  Measured: the peak beside the states is 9% (first of two stages) to 49% of the formula's."""
    case = replace(MEMORY_CASES[name], forward_only=True)
    found = traced(case)
    assert found.peak_bytes <= formulas(case).peak_bytes(rows_of(found), case.num_microbatches, found.state_bytes)
    assert found.peak_bytes < traced(MEMORY_CASES[name]).peak_bytes
    assert cost(found, "backward") == Budget(0, 0.0)


def test_states_are_those_of_the_dry_run(traced) -> None:
    """18 bytes a trained parameter in bf16; 3 kB are step counts and other scalars."""
    from tests.plan.test_dry_run import run_of, sizes

    (size,) = sizes(run_of("3b", [32], [36], 1, bf16=True))
    assert size.total_bytes == pytest.approx(traced(WHOLE).state_bytes, abs=1e5)


@pytest.mark.parametrize(("flags", "num_bytes"), [
    (REMAINDERS, 16), ((*REMAINDERS, *ROUNDED_MOMENTS), 12), ((*NO_COPIES, *ROUNDED_MOMENTS), 10)], ids=str)
def test_states_in_16_bits_take_less_and_are_widened_by_the_block(traced, flags, num_bytes: int) -> None:
    """Instead of 18 bytes a trained parameter; the update moves more for each, as ``mm.cost.by_device`` assumes."""
    from tests.plan.test_dry_run import run_of, sizes

    plain, names = Case("3b", layers=FEW_LAYERS, full_attention=FULL), [one for one in flags if one.startswith("--")]
    case = replace(plain, flags=flags)
    given = {name.lstrip("-").replace("-", "_"): True if name in REMAINDERS else "bf16" for name in names}
    run = replace(run_of("3b", [4], [4], 1, bf16=True, **given), model=case.model())
    (size,) = sizes(run)
    assert size.total_bytes == num_bytes * size.num_params == pytest.approx(traced(case).state_bytes, abs=1e5)
    more = cost(traced(case), "update").gigabytes - cost(traced(plain), "update").gigabytes
    assert 1e9 * more / size.num_params == pytest.approx(rounding_bytes(run.args), rel=0.02)


def test_frozen_weights_beside_adapters_cost_their_bytes_only(traced) -> None:
    """In bf16: 2 bytes each, where a trained one costs 18 (fp32 gradient, copy and moments); the rest are scalars."""
    case = MEMORY_CASES["3B, few layers, adapters"]
    sizes = [(math.prod(memory_shape(one, 1)), one.is_adapter) for one in model_weights(case.model())]
    frozen, adapters = (sum(size for size, is_adapter in sizes if is_adapter == kind) for kind in (False, True))
    assert 0 < adapters < frozen / 20
    assert traced(case).state_bytes == pytest.approx(2 * frozen + 18 * adapters, abs=1e5)
