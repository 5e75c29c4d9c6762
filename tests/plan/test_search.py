"""The search for layouts, compared with every layout and every pair of its lists, and with limited memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.config.layers import OffloadConfig, RecomputeConfig
from mm.config.rules import parallel_problems
from mm.config.run import Run
from mm.cost.by_device import calibration_by_device
from mm.cost.calibration import BlockLaws, Calibration
from mm.cost.predict import Predictor
from mm.cost.stage_memory import PeakMemory
from mm.cost.workload import workload_of
from mm.device.device import KNOWN_DEVICES
from mm.errors import UserError
from mm.plan.layouts import llava, mixed
from mm.plan.lists import Lists
from mm.plan.search import AS_GIVEN, BALANCED, RECOMPUTE, Choice, LayoutSearch, Planned, choices, present_choice
from tests.cost.test_predict import run_of
from tests.tiny import our_config

H200 = next(one for one in KNOWN_DEVICES if one.label == "H200")
SLOW = replace(H200, peak_flops=1e12)
"""So slow that the tiny model takes longer to compute than to start kernels."""


def by_device(run: Run) -> Calibration:
    return calibration_by_device(run, SLOW, SLOW.links)


def tiny_run(world_size: int, freeze: tuple[str, ...] = (), *flags: str) -> Run:
    model = our_config(((2,),), ((3,),), freeze=freeze)
    return run_of(model, world_size, "--bf16", "--global-batch-size", "16", *flags)


FEW = {"num_chunks": [1, 2], "num_stages": [1, 2, 4], "micro_batch_size": [1, 4], "sampler": [BALANCED],
       "encoder": ["cut"]}  # fmt: skip


def found_by_all(run: Run, considered: list[Choice], lengths) -> float:
    """The seconds of the fastest layout with its best lists, found by trying all."""
    seconds = []
    for choice in considered:
        here = choice.applied(run)
        predictor, workload = Predictor(here, by_device(here)), workload_of(here, lengths, 1)
        for lists in Lists.of(here.model).possible():
            seconds.append(predictor.predict(workload, replace(here, model=lists.applied(here.model))).seconds)
    return min(seconds)


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 5), world_size=st.sampled_from([2, 4]), is_frozen=st.booleans(), is_mixed=st.booleans())
def test_the_best_of_all_layouts_is_found_within_a_hundredth(seed, world_size, is_frozen, is_mixed) -> None:
    run = tiny_run(world_size, ("vision", "projector") if is_frozen else ())
    lengths = mixed({"llava": 1, "text": 1}, 64, seed, 512) if is_mixed else llava(64, seed, 512)
    considered = list(choices(run, FEW, 8))
    found = LayoutSearch(run, by_device, lengths, None, 1).best(considered, 1)
    least = found_by_all(run, considered, lengths)
    assert found.least <= least * (1 + 1e-9)
    assert least * (1 - 1e-9) <= found.ranking[0].step.seconds <= 1.01 * least


def searched(run: Run, max_bytes: int | None, **fixed):
    return LayoutSearch(run, by_device, llava(64, 0, 512), max_bytes, 2).best(choices(run, {**FEW, **fixed}, 8), 3)


def test_layouts_that_do_not_fit_are_not_proposed() -> None:
    run = tiny_run(4, (), "--seq-length", "2048")
    free = searched(run, None)
    sizes = sorted(one.peak_bytes for one in free.ranking)
    limit = sizes[0] - 1
    found = searched(run, limit)
    assert all(one.peak_bytes <= limit for one in found.ranking)
    assert all(max(PeakMemory(one.run).of_stages(one.run.model.placement())) == one.peak_bytes for one in found.ranking)
    nothing = searched(run, 1000)
    assert not nothing.ranking and nothing.smallest is not None and nothing.smallest.peak_bytes > 1000
    assert nothing.smallest.choice.recompute == "full"


def test_one_tower_is_recomputed_if_that_is_enough() -> None:
    """With less memory from limit to limit, the kinds of recomputation come in their order, and each is applied."""
    run, found = replace(tiny_run(1, (), "--seq-length", "2048"), model=our_config(((8,),), ((8,),))), []
    for name in RECOMPUTE:
        one = replace(present_choice(run), recompute=name).applied(run)
        found.append(max(PeakMemory(one).of_stages(one.model.placement())))
        granularity = [tower.recompute.granularity for tower in (one.model.vision, one.model.language)]
        assert granularity == {"none": [None, None], "selective": ["selective"] * 2, "ViT full": ["full", "selective"],
                               "LLM full": ["selective", "full"], "full": ["full", "full"]}[name]
    assert found[0] >= found[1] > max(found[2:4]) >= min(found[2:4]) > found[4]
    search = LayoutSearch(run, by_device, llava(64, 0, 512), found[2], 1)
    (best,) = search.best(choices(run, {**FEW, "num_stages": [1], "micro_batch_size": [1]}, 8), 1).ranking
    assert best.choice.recompute == "ViT full" and best.peak_bytes == found[2]


@pytest.mark.parametrize("settings", [
    {"recompute": RecomputeConfig("full", "block", 1)}, {"offload": OffloadConfig(True, 1)}], ids=str)
def test_a_prediction_does_not_depend_on_those_before_it(settings: dict) -> None:
    """The first layer of each chunk is recomputed or offloaded, so two chunks have more such layers than one."""
    model = our_config(((4, 0),), ((0, 8),))
    model = replace(model, vision=replace(model.vision, **settings), language=replace(model.language, **settings))
    run, lengths = replace(tiny_run(2), model=model), llava(64, 0, 512)
    own = present_choice(run)
    chunks = replace(own, num_chunks=2)
    first, second = (LayoutSearch(run, by_device, lengths, None, 1) for _ in range(2))
    first.planned(own, run)
    found, expected = (one.planned(chunks, chunks.applied(run)).step.seconds for one in (first, second))
    assert found == expected


def test_the_ranking_has_one_layout_of_each_group_and_keeps_the_samples_of_a_step() -> None:
    found = searched(run := tiny_run(4), None)
    groups = [one.choice.group for one in found.ranking]
    assert len(set(groups)) == len(groups) == 3
    seconds = [one.step.seconds for one in found.ranking]
    assert seconds == sorted(seconds)
    for one in found.ranking:
        assert one.run.global_batch_size == run.global_batch_size
        assert not list(parallel_problems(one.run))
        assert one.workload.mean("num_tokens") == pytest.approx(found.ranking[0].workload.mean("num_tokens"))
        assert found.least <= one.step.pipeline + one.step.reduction + one.step.update


def test_images_are_encoded_together_where_that_gains_and_fits() -> None:
    """On one rank there is no pipeline to fill, so larger batches only save fixed costs of the ViT's layers.

    A step has four microbatches.
    """
    run, lengths = tiny_run(1), llava(64, 0, 512)

    def costly(one: Run) -> Calibration:
        found = by_device(one)
        return replace(found, blocks=tuple(replace(block, laws=BlockLaws(*(
            replace(law, fixed=10 * law.fixed) for law in (block.laws.forward, block.laws.backward))))
            for block in found.blocks))

    def best(max_bytes: int | None, *encoder_batch_sizes: int) -> Planned:
        search = LayoutSearch(run, costly, lengths, max_bytes, 2)
        (found,) = search.best(choices(run, FEW, 8), 1, encoder_batch_sizes=encoder_batch_sizes).ranking
        return found

    alone, together = best(None), best(None, 1, 2, 4, 8)
    assert (alone.choice.encoder_batch, together.run.model.encoder_batch_microbatches) == (1, 4)
    assert together.step.seconds < 0.99 * alone.step.seconds and together.peak_bytes > alone.peak_bytes
    limited = best(together.peak_bytes - 1, 1, 2, 4, 8)
    assert limited.choice.encoder_batch == 2 and limited.peak_bytes < together.peak_bytes
    assert LayoutSearch(run, costly, lengths, None, 2).best(choices(run, FEW, 8), 1).least <= together.step.seconds


def test_fixed_values_are_kept_and_the_loss_of_microbatches_fixes_them() -> None:
    run = tiny_run(4)
    assert {(one.num_stages, one.micro_batch_size) for one in choices(run, {"num_stages": [2], "micro_batch_size": [2]},
                                                                      8)} == {(2, 2)}
    whole = {"tp_size": [1, 2], "encoder": ["tensor_ranks"]}
    assert {(one.tp_size, one.encoder) for one in choices(run, whole, 8)} == {(1, "tensor_ranks"), (2, "tensor_ranks")}
    own = tiny_run(4, (), "--calculate-per-microbatch-loss")
    assert {(one.micro_batch_size, one.sampler) for one in choices(own, {}, 8)} == {(1, AS_GIVEN)}
    assert present_choice(run).applied(run).model == run.model


def test_only_context_parallelism_uses_the_network_between_two_nodes_of_tensor_ranks() -> None:
    """Two tensor-parallel ranks fill a node, and two context-parallel ranks lie on two nodes."""
    run = tiny_run(4, (), "--tensor-model-parallel-size", "2", "--sequence-parallel", "--context-parallel-size", "2")
    links = replace(SLOW.links, node_size=2)
    slow, fast = ({one.key: one.laws for one in calibration_by_device(run, SLOW, replace(
        links, between=between)).blocks} for between in (1e3, links.within))
    assert {key.kind for key in slow if slow[key] != fast[key]} == {"LLM layer"}


def test_fp32_has_no_published_peak() -> None:
    run = run_of(our_config(((2,),), ((3,),)), 1)
    with pytest.raises(UserError, match="in fp32, but the published peak of H200 is for 16 bits; add --bf16"):
        calibration_by_device(run, H200, H200.links)


@pytest.mark.parametrize("world_size", [1, 4, 6])
def test_no_legal_layout_is_left_out(world_size: int) -> None:
    """The quick filter agrees with the trainer's own rules."""
    run = tiny_run(world_size)
    found = set(choices(run, {}, 8))
    assert found
    for one in found:
        for field, values in (("num_stages", (1, 2, 3, 4)), ("num_chunks", (1, 2)), ("micro_batch_size", (1, 2, 4, 8))):
            for value in values:
                other = replace(one, **{field: value})
                is_legal = not list(parallel_problems(other.applied(run)))
                has_layers = other.num_stages * other.num_chunks <= 5 or other.num_chunks == 1
                assert (other in found) == (is_legal and has_layers and world_size % other.num_stages == 0)
