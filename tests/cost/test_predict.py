"""A predicted step is the simulated pipeline of its slowest replica, with messages, reduction and update."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.batch import BatchTotals
from mm.config.args import parse
from mm.config.data import DataConfig
from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.cost.calibration import BlockLaws, Calibration, Law, Network
from mm.cost.predict import Predictor, StepPrediction
from mm.cost.stage_memory import stage_sizes
from mm.cost.workload import Workload, counts_of
from mm.data.sampler.cost import pipeline_order
from mm.errors import UserError
from mm.model.flops import slot_flops
from mm.parallel.pipeline_schedule import step_cost
from mm.weights.table import VISION_PLACES
from tests.cost.test_costs import ALONE, TEXT, by_flops
from tests.cost.test_costs import TOTALS as LARGE
from tests.tiny import our_config

SMALL = replace(LARGE, num_tokens=100, num_target_tokens=40, num_causal_pairs=5_000)
STAGES = our_config(((4, 0),), ((1, 3),))


def run_of(model: ModelConfig, num_ranks: int, *flags: str) -> Run:
    args = parse(["--lr", "1e-5", "--train-iters", "1", "--seq-length", "512", "--micro-batch-size", "1", "--mm-model",
                  "model.json", "--mm-data", "data.json", *flags])  # fmt: skip
    return Run(args, model, DataConfig("hf", ("d.json",)), num_ranks)


def with_links(model: ModelConfig) -> Calibration:
    """Messages and collectives take no time."""
    return replace(by_flops(model), message=Law(0.0, 0.0), all_reduce={2: Law(0.0, 0.0)})


def prediction(model: ModelConfig, replicas: list[list[BatchTotals]], calibration: Calibration, num_ranks: int):
    run = run_of(model, num_ranks)
    return run, Predictor(run, calibration).predict(Workload((tuple(counts_of(one) for one in replicas),)))


def test_one_rank_does_all_work_one_after_the_other() -> None:
    _, found = prediction(ALONE, [[LARGE, SMALL]], by_flops(ALONE), 1)
    work = sum(cost.forward + cost.backward for slots in slot_flops(ALONE, [LARGE, SMALL]) for cost in slots)
    assert found.seconds == found.pipeline == pytest.approx(work)
    assert found.bubble == pytest.approx(0)
    assert found.interval == (found.seconds, found.seconds)  # the laws are exact, and there is one step


@given(seconds=st.floats(1e-3, 1e3), spread=st.floats(0.0, 5.0), error=st.floats(1e-3, 3.0))
def test_an_interval_never_reaches_zero(seconds: float, spread: float, error: float) -> None:
    found = StepPrediction(seconds, spread * seconds, seconds, seconds, seconds, 0.0, 0.0, error)
    low, high = found.interval
    assert 0 < low < seconds < high
    assert seconds / low == pytest.approx(high / seconds)


def test_stages_run_as_simulated_in_the_order_of_a_run() -> None:
    batch = [LARGE, SMALL, SMALL, LARGE, SMALL]
    _, found = prediction(STAGES, [batch], with_links(STAGES), 2)
    costs = slot_flops(STAGES, batch)
    assert found.pipeline == pytest.approx(step_cost([costs[one] for one in pipeline_order(costs, 2)], 2))
    assert 0 < found.bubble < 1
    assert found.even <= found.pipeline * (1 + 1e-9)


def test_the_slowest_replica_decides() -> None:
    _, one = prediction(STAGES, [[LARGE] * 3], with_links(STAGES), 2)
    _, two = prediction(STAGES, [[SMALL] * 3, [LARGE] * 3], with_links(STAGES), 4)
    assert two.pipeline == pytest.approx(one.pipeline)


def test_messages_reduction_and_update_add_to_a_step() -> None:
    free = with_links(STAGES)
    costly = replace(free, message=Law(1e6, 1.0), all_reduce={2: Law(10.0, 1.0)}, step=Law(5.0, 2.0))
    _, before = prediction(STAGES, [[LARGE] * 3] * 2, free, 4)
    run, after = prediction(STAGES, [[LARGE] * 3] * 2, costly, 4)
    sizes: list = stage_sizes(run, STAGES.placement())
    assert after.reduction == 10 + max(size.gradient_bytes for size in sizes)
    assert after.update == 5 + 2 * max(size.num_trainable_params for size in sizes)
    assert after.pipeline >= before.pipeline + 2e6  # the first message there and the last one back
    assert after.seconds == after.pipeline + after.reduction + after.update


def test_the_last_stage_of_a_chunk_sends_to_the_first_stage_of_the_next() -> None:
    """All messages of a pipeline on one node stay there; with a stage on each node, all cross."""
    model = our_config(((2, 2), (0, 0)), ((0, 0), (1, 3)))
    near = replace(with_links(model), message=Law(1.0, 0.0))
    of_nodes = {size: replace(near, network=Network(size, 5.0, 0.0)) for size in (2, 4)}
    placement = model.placement()

    def seconds(calibration: Calibration) -> list[float]:
        predictor = Predictor(run_of(model, 4), calibration)
        return predictor.messages(counts_of([LARGE]), [placement])[0, 0, :, 0].tolist()

    assert seconds(near) == seconds(of_nodes[4]) == [1.0, 1.0, 1.0]
    assert seconds(of_nodes[2]) == [5.0, 5.0, 5.0]


def test_a_run_of_several_ranks_needs_a_calibration_of_several() -> None:
    with pytest.raises(UserError, match="the run has 2 ranks, but the calibration was measured by one process"):
        Predictor(run_of(STAGES, 2), by_flops(STAGES))


def with_fixed(model: ModelConfig, fixed: float) -> Calibration:
    """Each block also costs ``fixed`` per pass."""
    found = with_links(model)
    return replace(found, blocks=tuple(replace(one, laws=BlockLaws(*(
        replace(law, fixed=fixed) for law in (one.laws.forward, one.laws.backward)))) for one in found.blocks))


def test_images_that_are_encoded_together_share_the_fixed_costs_of_the_vit() -> None:
    """One pass for three of four microbatches, in the first forward and the last backward pass of those with images."""
    alone = our_config(((4, 0),), ((0, 4),))
    together = replace(alone, encoder_batch_microbatches=4)
    counts = counts_of([TEXT, LARGE, SMALL, TEXT, LARGE])[:4]
    one, other = (Predictor(run_of(model, 2), with_fixed(alone, 1e9)) for model in (alone, together))
    placement = alone.placement()
    before, after = one.of_blocks(counts, placement), other.of_blocks(counts, placement)
    is_vision = [place in VISION_PLACES for place, _ in one.costs.places]
    num_blocks = sum(is_vision)
    assert np.array_equal(before[..., ~np.array(is_vision)], after[..., ~np.array(is_vision)])
    before, after = before[..., is_vision], after[..., is_vision]
    saved = (before.sum(axis=(1, 2)) - after.sum(axis=(1, 2))) / 1e9
    assert saved == pytest.approx([num_blocks, num_blocks])
    assert (after.sum(axis=2) > 0).tolist() == [[False, True, False, False], [False, False, True, False]]
    divided = our_config(((2, 2),), ((0, 4),)).placement()
    assert np.array_equal(one.of_blocks(counts, divided), other.of_blocks(counts, divided))


def test_a_bound_holds_with_images_that_are_encoded_together() -> None:
    model = replace(our_config(((4, 0),), ((0, 4),)), encoder_batch_microbatches=3)
    predictor = Predictor(run_of(model, 2), with_fixed(model, 1e9))
    workload, placements = Workload(((counts_of([LARGE, SMALL, TEXT, LARGE, SMALL, SMALL]),),)), [model.placement()]
    found = predictor.pipelines(workload, placements).seconds[0, 0]
    assert 0 < predictor.least(workload, placements)[0] <= found
    assert found < Predictor(run_of(replace(model, encoder_batch_microbatches=1), 2), predictor.calibration).pipelines(
        workload, placements).seconds[0, 0]


def test_context_parallel_ranks_share_a_microbatch() -> None:
    run, workload = run_of(ALONE, 2, "--context-parallel-size", "2"), Workload(((counts_of([LARGE]),),))
    whole = Predictor(run_of(ALONE, 1), by_flops(ALONE)).predict(workload)
    half = Predictor(run, with_links(ALONE)).predict(workload)
    assert whole.pipeline / 2 < half.pipeline < whole.pipeline  # three images on two ranks, and no image is cut
