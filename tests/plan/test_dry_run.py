"""The dry-run text: numbers computed by hand for small cases, stages, boundaries, and the cheapest flags that fit."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.config import args as arguments
from mm.config.args import Arguments
from mm.config.data import DataConfig
from mm.config.layers import RecomputeConfig
from mm.config.model import Rates, read_model
from mm.config.run import Run
from mm.cost.stage_memory import (
    TEXT,
    VISUAL,
    block_bytes,
    longest_microbatches,
    num_model_params,
    peaks,
    stage_memory,
    stage_sizes,
)
from mm.device.device import KNOWN_DEVICES
from mm.plan.dry_run import CHANGES, Change, changed, cheapest_fits, peak_of, stage_report
from tests.files import EXAMPLES

VISION_PADDING = 32 * 4 * (2 * (1280 + 1) + 1280)
"""In memory the ViT's ffn is 3424 wide instead of 3420 in all layers: gate and up with their biases, and down."""
NO_RECOMPUTE = RecomputeConfig()


def nested(lists: list) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, lists if isinstance(lists[0], list) else [lists]))


def run_of(size: str, vision: list, language: list, world_size: int, *, freeze: str = "",
           seq_length: int = 1024, recompute: RecomputeConfig = NO_RECOMPUTE, **flags) -> Run:
    """A run on the given lists, flat or one per chunk; ``freeze`` contains v, p, l for the frozen parts."""
    model = read_model(EXAMPLES / f"model_{size}.json").value
    model = replace(
        model, projector=replace(model.projector, freeze="p" in freeze),
        vision=replace(model.vision, pipeline_num_layers=nested(vision), freeze="v" in freeze, recompute=recompute),
        language=replace(
            model.language, pipeline_num_layers=nested(language), freeze="l" in freeze, recompute=recompute))
    args = Arguments(
        mm_model="m.json", mm_data="d.json", seq_length=seq_length, train_iters=1, lr=0.0,
        **{"micro_batch_size": 1, **flags})
    return Run(args, model, DataConfig("hf", ("d.json",)), world_size, ("a note",))


def sizes(run: Run):
    return stage_sizes(run, run.model.placement())


def test_parameters_of_the_3b_parts():
    """Patch embedding 1280 x 1176, 32 ViT layers and the merger: 668,684,288; the rest is the LLM."""
    (size,) = sizes(run_of("3b", [32], [36], 1, freeze="vp"))
    assert size.num_params == 3_754_622_976 + VISION_PADDING
    assert size.num_params - size.num_trainable_params == 668_684_288 + VISION_PADDING


@pytest.mark.parametrize(("precision", "weight", "optimizer"), [("fp32", 4, 8), ("bf16", 2, 12), ("fp16", 2, 12)])
def test_bytes(precision, weight, optimizer):
    flags = {} if precision == "fp32" else {precision: True}
    (whole,) = sizes(run_of("3b", [32], [36], 4, freeze="vp", **flags))
    assert whole.weight_bytes == weight * whole.num_params
    assert whole.gradient_bytes == 4 * whole.num_trainable_params
    assert whole.optimizer_bytes == optimizer * whole.num_trainable_params
    assert whole.total_bytes == whole.weight_bytes + whole.gradient_bytes + whole.optimizer_bytes
    (split,) = sizes(run_of("3b", [32], [36], 4, freeze="vp", use_distributed_optimizer=True, **flags))
    assert split.optimizer_bytes == whole.optimizer_bytes // 4


def test_optimizer_groups_are_shown_if_there_are_more_than_two():
    run = run_of("3b", [32], [36], 1, freeze="p")
    assert "Optimizer groups" not in stage_report(run)
    run = replace(run, model=replace(run.model, vision=replace(run.model.vision, rates=Rates(1e-6, 0.5))))
    vit = 32 * (4 * 1280 * 1280 + 3 * 1280 * 3420) + 1280 * 3 * 2 * 14 * 14
    lines = stage_report(run).split("Optimizer groups (maximum learning rates):\n")[1].splitlines()[:5]
    assert [line.split() for line in lines[1:]] == [
        ["1e-06", "0.5", "129", f"{vit:,}", "vision"],
        ["1e-06", "0", "192", f"{32 * (4 * 1280 + 3840 + 2 * 3420):,}", "vision"],
        ["0", "0.01", "145", "3,085,697,024", "language"],
        ["0", "0", "109", f"{36 * (3 * 2048 + 512) + 2048:,}", "language"],
    ]


def test_frozen_stage_has_weights_only():
    vit, llm = sizes(run_of("7b", [32, 0], [0, 28], 2, freeze="vp", bf16=True))
    assert (vit.num_trainable_params, vit.gradient_bytes, vit.optimizer_bytes) == (0, 0, 0)
    assert vit.total_bytes == 2 * vit.num_params
    assert llm.num_trainable_params == llm.num_params


def test_tensor_parallel_ranks_hold_parts():
    """Everything is halved except the norms, biases after row-parallel layers, and the patch embedding."""
    (whole,), (half,) = (sizes(run_of("7b", [32], [28], tp, tensor_model_parallel_size=tp)) for tp in (1, 2))
    replicated = (1280 * 1176 + 32 * 4 * 1280 + 1280 + 3584) + (28 * 2 * 3584 + 3584)
    assert 2 * half.num_params == whole.num_params + replicated


def test_a_whole_encoder_is_whole_on_every_rank_and_its_ranks_divide_the_images():
    cut = run_of("3b", [32], [36], 2, freeze="l", tensor_model_parallel_size=2, bf16=True)
    whole = replace(cut, model=replace(cut.model, encoder_placement="tensor_ranks"))
    (one,), (other,) = sizes(cut), sizes(whole)
    encoder = 668_684_288 + VISION_PADDING
    assert other.num_trainable_params == encoder and other.num_params - one.num_params == (
        encoder - one.num_trainable_params)
    assert "Encoder   ViT and projector whole on every tensor-parallel rank; 2 ranks divide the images of a" in (
        stage_report(whole))
    assert "Each tensor-parallel rank holds 1,024 of the tokens and at most 4,096 patches" in stage_report(whole)
    assert "Encoder " not in stage_report(cut)
    short, long = (longest_microbatches(replace(whole, args=replace(whole.args, seq_length=length)))[VISUAL].num_patches
                   for length in (100_000, 200_000))
    assert long - short == 4 * 100_000 // 2  # a share, and one image beside it


def test_tied_copy_counts_on_its_rank_but_not_in_the_model():
    run = run_of("3b", [32, 0], [18, 18], 2)
    assert num_model_params(run) == 3_754_622_976
    assert sum(size.num_params for size in sizes(run)) == 3_754_622_976 + VISION_PADDING + 151936 * 2048


def test_text_of_a_layout_with_every_kind_of_boundary():
    run = run_of("7b", [16, 16, 0, 0, 0], [0, 0, 0, 27, 1], 5, freeze="v", bf16=True)
    text = stage_report(run)
    assert "5 ranks = tensor 1 x pipeline 5 x data 1" in text
    assert "0      patch embedding (frozen), ViT 0-15 (frozen) " in text
    assert "1      ViT 16-31 (frozen), projector " in text
    assert "2      nothing (forwards what it receives) " in text
    assert "3      embedding, LLM 0-26 " in text
    assert "4      LLM 27, norm + head " in text
    assert "  0 -> 1: patches [patches, 1280] bf16; no gradient\n" in text
    visual = "visual tokens [patches / 4, 3584] bf16; gradient for microbatches with images only\n"
    assert f"  1 -> 2: {visual}" in text and f"  2 -> 3: {visual}" in text
    assert "  3 -> 4: hidden states [tokens, 3584] bf16; gradient always\n" in text
    assert text.endswith("Notes:\n  - a note")


def test_layers_are_named_with_what_is_frozen_of_them():
    run = run_of("7b", [16, 16, 0], [0, 14, 14], 3, freeze="p", bf16=True)
    run = replace(run, model=replace(
        run.model, vision=replace(run.model.vision, freeze_layers="0-15,20"),
        freeze_modules=("patch_embed", "blocks.layers.3?.mlp", "final_layernorm")))
    text = stage_report(run)
    assert "0      patch embedding (frozen), ViT 0-15 (frozen) " in text
    assert ("1      ViT 16-19, ViT 20 (frozen), ViT 21-29, ViT 30-31 (partly frozen), projector (frozen), embedding, "
            "LLM 0-13 ") in text
    assert "2      LLM 14-27, norm + head (partly frozen) " in text
    assert "  0 -> 1: patches [patches, 1280] bf16; no gradient\n" in text
    assert sizes(run)[0].num_trainable_params == 0


def test_frozen_llm_sends_gradients_for_images_only_and_a_single_stage_has_no_boundaries():
    text = stage_report(run_of("7b", [32, 0], [14, 14], 2, freeze="l"))
    assert "  0 -> 1: hidden states [tokens, 3584] fp32; gradient for microbatches with images only\n" in text
    assert "Boundaries" not in stage_report(run_of("3b", [32], [36], 1))


def test_largest_stage_and_total():
    run = run_of("7b", [32, 0], [12, 16], 8, freeze="vp", bf16=True, use_distributed_optimizer=True)
    first, second = sizes(run)
    text = stage_report(run)
    assert f"Largest   stage 1 with {second.total_bytes / 2**30:.2f} GiB on each rank" in text
    assert f"Total     {4 * (first.total_bytes + second.total_bytes) / 2**30:.2f} GiB on 8 ranks" in text
    assert "Batch     4 samples per step = micro 1 x 1 microbatch x data 4" in text


def test_memory_of_each_stage():
    run = run_of("7b", [32, 0], [12, 16], 2, bf16=True, global_batch_size=8)
    placement = run.model.placement()
    text = stage_report(run)
    for spec, size in zip(placement.slots, sizes(run), strict=True):
        memory = stage_memory(run, placement, spec.stage)
        num_in_flight = 2 - spec.stage
        for kind, rows in longest_microbatches(run).items():
            numbers = (size.total_bytes, memory.kept_bytes(rows, 8), memory.ahead_bytes(rows, 8),
                       memory.logit_bytes(rows), memory.working_bytes(rows),
                       memory.peak_bytes(rows, 8, size.total_bytes))
            (line,) = [line for line in text.splitlines() if line.split()[:2] == [str(spec.stage), kind]]
            assert line.split()[2:] == [str(num_in_flight), *(f"{number / 2**30:.2f}" for number in numbers)]
    assert "have 1,024 tokens (--seq-length x --micro-batch-size):\nall text" in text
    assert "or all visual (4,096 patches)" in text


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_the_peak_has_the_units_that_are_open_then(strategy: str):
    run = run_of("7b", [32], [28], 4, bf16=True, data_parallel_sharding_strategy=strategy)
    text = stage_report(run)
    assert "a layer's work  open buckets " in text and "Open buckets: gradients, and weights" in text
    for kind in longest_microbatches(run):
        (line,) = [line for line in text.splitlines() if line.split()[:2] == ["0", kind]]
        states, kept, ahead, *work, units, peak = map(float, line.split()[3:])
        assert min(abs(peak - states - kept - ahead - units - one) for one in (*work, 0.0)) <= 0.04 and units > 0.4


def test_packing_assumes_the_worst_number_of_packs_in_flight():
    """As many as in any step of plain microbatches: after warm-up, a stage frees one for each new one."""
    lists = ([16, 16, 0, 0], [0, 0, 18, 18])
    plain = run_of("3b", *lists, 8, global_batch_size=64)
    packed = replace(plain, data=replace(plain.data, packing=True, packing_max_patches=999))
    report = stage_report(packed)
    packs = "64 samples per step = packs of at most 1024 tokens and 999 patches, as many as it takes, over data 2"
    assert packs in report
    tables = [text.partition("Peak memory")[2].partition("Peak  ")[0] for text in (report, stage_report(plain))]
    assert tables[0] == tables[1] and "in flight" in tables[0]


def test_with_virtual_chunks_packs_take_the_worst_of_all_microbatch_counts():
    run = run_of("3b", [[16, 16], [0, 0]], [[0, 0], [18, 18]], 4)
    placement, model_sizes = run.model.placement(), sizes(run)

    def found(num_samples: int, packing: bool) -> dict[str, int]:
        args = replace(run.args, global_batch_size=num_samples * run.dp_size)
        data = replace(run.data, packing=packing)
        return peaks(replace(run, args=args, data=data), placement, model_sizes)

    plain = [found(count, packing=False) for count in (2, 4, 6, 8, 10)]
    assert found(10, packing=True) == {kind: max(one[kind] for one in plain) for kind in (TEXT, VISUAL)}


def test_a_stated_number_of_patches():
    run = run_of("3b", [32], [36], 1, dry_run_patches=1000)
    (rows,) = longest_microbatches(run).values()
    assert (rows.num_tokens, rows.num_patches, rows.num_targets) == (1024, 1000, 1024 - 250)
    assert "1,000 patches (--dry-run-patches), the rest text" in stage_report(run)


def test_a_context_parallel_rank_holds_its_share_and_one_more_image():
    run = run_of("3b", [32], [36], 4, context_parallel_size=4, micro_batch_size=10)
    visual = longest_microbatches(run)[VISUAL]
    assert (visual.num_tokens, visual.num_patches) == (2560, 10240 + 768 * 768 // 14**2)
    text = stage_report(run)
    assert "4 ranks = tensor 1 x context 4 (Ulysses) x pipeline 1 x data 1" in text
    assert "rank holds 2,560 of the tokens and at most 13,249 patches: its share, and one\nimage of image" in text


def test_chunks_are_listed_and_count_for_their_stage():
    run = run_of("3b", [[16, 16], [0, 0]], [[0, 4], [16, 16]], 2, bf16=True, global_batch_size=4)
    found, (first, last) = stage_report(run), sizes(run)
    for line in ("  0, chunk 0 -> 1, chunk 0: patches", "  1, chunk 0 -> 0, chunk 1: hidden states",
                 "  0, chunk 1 -> 1, chunk 1: hidden states"):
        assert line in found
    assert "0, chunk 1  LLM 4-19 " in found and "1, chunk 0  ViT 16-31, projector, embedding, LLM 0-3 " in found
    assert first.num_params + last.num_params == num_model_params(run) + VISION_PADDING + 151936 * 2048  # tied
    assert f"Total     {(first.total_bytes + last.total_bytes) / 2**30:.2f} GiB on 2 ranks" in found


@pytest.mark.parametrize(
    ("world_size", "verdict"), [(8, "Fits      A40, L40, L40S (44.99 GiB, "), (1, "Too small RTX A6000")])
def test_every_known_device_has_one_verdict(world_size, verdict):
    run = run_of("3b", [32], [36], world_size, freeze="vp", bf16=True, use_distributed_optimizer=True)
    lines = stage_report(run).splitlines()
    verdicts = [line for line in lines if line.startswith(("Fits ", "In part ", "Too small "))]
    lists = [re.sub(r" \([^)]*\)", "", line[10:]).partition(":")[0] for line in verdicts]
    labels = [label for line in lists for label in line.split(", ")]
    assert sorted(labels) == sorted(one.label for one in KNOWN_DEVICES if one.memory_bytes is not None)
    assert any(line.startswith(verdict) for line in verdicts)


@pytest.mark.parametrize(("flags", "num_bytes", "of_block", "said"), [
    ({}, 12, 0, ""), ({"exp_avg_dtype": "bf16"}, 10, 4 << 24, ""),
    ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 8, 10 << 24, ""),
    ({"store_param_remainders": True}, 10, 12 << 24, "16 bits beside each weight in place of an fp32 copy"),
    ({"main_params_dtype": "bf16"}, 8, 10 << 24, "no fp32 copies of weights")])
def test_moments_in_bf16_and_weights_without_fp32_copies_take_less(flags, num_bytes: int, of_block: int, said: str):
    run = run_of("3b", [32], [36], 8, bf16=True, use_distributed_optimizer=True, **flags)
    (size,) = sizes(run)
    assert size.optimizer_bytes / (size.num_trainable_params / 8) == pytest.approx(num_bytes)
    assert block_bytes(run, size) == of_block and said in stage_report(run)


@pytest.mark.parametrize(("fraction", "flags", "num_bytes"), [
    (1.0, {}, 12), (0.25, {}, 12), (1.0, {"store_param_remainders": True, "exp_avg_dtype": "bf16"}, 8)])
def test_states_in_host_memory_take_none_on_the_device_but_two_blocks(fraction: float, flags, num_bytes: int):
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    runs = [run_of("3b", [32], [36], 8, bf16=True, use_distributed_optimizer=True, **flags, **more)
            for more in ({}, offload)]
    (plain,), (size,) = map(sizes, runs)
    shard = plain.num_trainable_params / 8
    assert size.host_bytes / shard == pytest.approx(fraction * num_bytes)
    assert size.optimizer_bytes / shard == pytest.approx((1 - fraction) * num_bytes)
    assert plain.host_bytes == 0 and size.weight_bytes == plain.weight_bytes
    assert block_bytes(runs[1], size) - block_bytes(runs[0], plain) == 2 * num_bytes << 24
    assert f"{fraction:.0%} of the optimizer states in host memory" in stage_report(runs[1])
    assert "on the host" in stage_report(runs[1]) and "on the host" not in stage_report(runs[0])


def test_gradients_reduced_in_bf16_take_half_and_need_fp32_copies_in_the_update():
    plain, reduced = (run_of("3b", [32], [36], 8, bf16=True, use_distributed_optimizer=True, grad_reduce_in_bf16=flag)
                      for flag in (False, True))
    (before,), (now,) = sizes(plain), sizes(reduced)
    assert now.gradient_bytes == before.num_trainable_params * 2 == before.gradient_bytes // 2
    assert now.update_bytes == -(-before.num_trainable_params * 4 // 8) and before.update_bytes == 0
    assert now.total_bytes == before.total_bytes - now.gradient_bytes
    assert max(peaks(reduced, reduced.model.placement(), [now]).values()) < max(
        peaks(plain, plain.model.placement(), [before]).values())
    alone = run_of("3b", [32], [36], 1, bf16=True, grad_reduce_in_bf16=True, seq_length=64)
    (size,) = sizes(alone)
    assert max(peaks(alone, alone.model.placement(), [size]).values()) == size.total_bytes + size.update_bytes


GIB = 2**30
BASE = ("--lr", "0", "--train-iters", "1", "--seq-length", "1024", "--micro-batch-size", "1", "--mm-model", "m.json",
        "--mm-data", "d.json", "--bf16")
OFFLOAD, FULL = "--cpu-offload-activations", RecomputeConfig("full", "uniform", 1)
"""The change that is offered only for recomputed layers, and their recomputation."""


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.flags)
def test_the_flags_of_a_change_do_what_it_does_and_it_is_not_offered_again(change: Change) -> None:
    run = run_of("3b", [32], [36], 2, bf16=True, **({"recompute": FULL} if change.flags == OFFLOAD else {}))
    changed, parsed = change.applied(run), arguments.parse([*BASE, *change.flags.split()])
    assert changed is not None and changed != run and change.applied(changed) is None
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
    large = stage_report(run_of("72b", [32], [80], 1, bf16=True, seq_length=8192))
    assert "flags are not enough" in large and "as mm-plan suggests" in large
