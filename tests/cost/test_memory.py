"""The memory formulas, computed by hand for one layer of 3B and for several settings.

``tests/test_budgets.py`` compares them with what a traced step keeps.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.config.layers import RecomputeConfig
from mm.config.model import read_model
from mm.cost.layer_memory import ALL, INPUT, NOTHING, Keeps, layer_bytes
from mm.cost.memory import ChunkMemory, MicrobatchSizes
from mm.cost.stage_memory import StageMemory, offloaded, stage_memory
from mm.model.layers.loss import MAX_LOGIT_ROWS
from mm.parallel.pipeline_schedule import stage_steps
from tests.plan.test_dry_run import EXAMPLES, FULL, run_of

TOKENS = MicrobatchSizes(num_tokens=100, num_patches=0, num_targets=0)
PATCHES = MicrobatchSizes(num_tokens=0, num_patches=100, num_targets=0)
MODEL_3B = read_model(EXAMPLES / "model_3b.json").value
NO_OUTPUTS = Keeps(False, 2, 0, True, True, False)
"""Everything except outputs of norms and SwiGLU: selective recompute, or a frozen layer that a gradient passes."""


def stages(vision: list[int], language: list[int], freeze: str = "", recompute: RecomputeConfig | None = None,
           tp_size: int = 1) -> list[ChunkMemory]:  # fmt: skip
    model = run_of("3b", vision, language, len(vision), freeze=freeze).model
    if recompute is not None:
        model = replace(model, **{part: replace(getattr(model, part), recompute=recompute)
                                  for part in ("vision", "language")})  # fmt: skip
    placement = model.placement()
    return [ChunkMemory(model, placement, spec, tp_size, "bf16") for spec in placement.slots]


def test_a_layer_of_the_llm() -> None:
    """hidden 2048, 16 heads and 2 groups of 128, ffn 11008, in bf16; log-sum-exp and the norms' factors in fp32."""
    layer = layer_bytes(MODEL_3B.language, 11008, tp_size=1, width=2)
    assert layer.residuals == 2 * (2048 * 2 + 4)
    assert layer.norm_outputs == 2 * 2048 * 2
    assert layer.attention == (2048 + 256 + 256) * 2 + 2048 * 2 + 16 * 4
    assert (layer.swiglu_input, layer.swiglu_output) == (2 * 11008 * 2, 11008 * 2)
    others = layer.input + layer.adapter_number
    assert layer.kept(ALL) == sum(vars(layer).values()) - others and layer.gathered == 0
    assert layer.kept(replace(ALL, adapter_numbers=24)) == layer.kept(ALL) + 24 * 2
    assert layer.kept(ALL) - layer.kept(NO_OUTPUTS) == layer.norm_outputs + layer.swiglu_output
    assert (layer.kept(INPUT), layer.kept(NOTHING)) == (2048 * 2, 0)


def test_tensor_parallel_ranks_share_heads_and_ffn_but_not_rows() -> None:
    whole, half = (layer_bytes(MODEL_3B.vision, 3420 // tp, tp, width=2) for tp in (1, 2))
    assert (half.residuals, half.norm_outputs, half.input) == (whole.residuals, whole.norm_outputs, whole.input)
    assert 2 * half.attention == whole.attention and 2 * half.swiglu_input == whole.swiglu_input


@pytest.mark.parametrize(("freeze", "recompute", "layers_kept"), [
    ("", None, ALL), ("v", None, ALL),
    ("l", None, NO_OUTPUTS),  # the gradient of the visual tokens passes through
    ("", FULL, INPUT), ("l", FULL, INPUT), ("", RecomputeConfig("selective"), NO_OUTPUTS),
    ("", RecomputeConfig("selective", modules=("core_attn",)), ALL),
    ("", RecomputeConfig("selective", modules=("layernorm",)), Keeps(False, 2, 0, True, True, True)),
    ("", RecomputeConfig("selective", modules=("mlp_act",)), Keeps(False, 2, 2, True, True, False)),
    ("", RecomputeConfig("selective", modules=("mlp",)), Keeps(False, 2, 1, True, False, False)),
    ("", RecomputeConfig("selective", modules=("mlp", "mlp_act")), Keeps(False, 2, 1, True, False, False)),
    ("", RecomputeConfig("selective", modules=("layernorm", "mlp")), Keeps(False, 2, 0, True, False, False)),
])
def test_what_llm_layers_keep(freeze: str, recompute: RecomputeConfig | None, layers_kept: Keeps) -> None:
    _, stage = stages([32, 0], [18, 18], freeze, recompute)
    layer = layer_bytes(stage.model.language, 11008, 1, 2)
    assert stage.kept_bytes(TOKENS) == 100 * (18 * layer.kept(layers_kept) + 2 * 128 * 2)  # and the tables


def test_block_recompute_applies_to_the_first_layers_of_a_stage() -> None:
    _, stage = stages([32, 0], [18, 18], recompute=RecomputeConfig("full", "block", 5))
    layer = layer_bytes(stage.model.language, 11008, 1, 2)
    kept = 5 * layer.kept(INPUT) + 13 * layer.kept(ALL) + 2 * 128 * 2
    assert stage.kept_bytes(TOKENS) == 100 * kept
    assert stage.working_bytes(TOKENS) == 100 * layer.working(INPUT)


def test_a_frozen_prefix_keeps_nothing_but_needs_working_memory() -> None:
    stage, _ = stages([32, 0], [0, 36], "vp")
    assert stage.kept_bytes(PATCHES) == 0
    layer = layer_bytes(stage.model.vision, 3424, 1, 2)
    assert stage.working_bytes(PATCHES) == 100 * layer.kept(ALL)


def test_a_whole_encoder_keeps_whole_layers_of_its_own_images() -> None:
    """Nothing of the ViT is cut, not even with sequence parallelism: a patch costs what it costs on one rank."""
    alone = stages([16, 16, 0], [0, 0, 36])
    whole = [replace(one, tp_size=2, num_pieces=2, model=replace(one.model, encoder_placement="tensor_ranks"))
             for one in alone]
    rows = MicrobatchSizes(0, 400, 0)
    for one, other in zip(alone[:2], whole[:2], strict=True):
        assert other.kept_bytes(rows) == one.kept_bytes(rows) > 0
        assert other.coming_bytes(rows) == one.coming_bytes(rows)
        assert other.working_bytes(rows) == one.working_bytes(rows)
    text = MicrobatchSizes(400, 0, 0)
    assert whole[2].kept_bytes(text) < alone[2].kept_bytes(text)


def test_microbatches_in_flight_under_1f1b() -> None:
    found = [StageMemory((chunk,)).in_flight(TOKENS, 3) for chunk in stages([32, 0, 0, 0], [0, 12, 12, 12])]
    assert found == [(3,), (3,), (2,), (1,)]


def test_logits_of_one_chunk() -> None:
    first, last = stages([32, 0], [18, 18], tp_size=2)
    rows, logits = MicrobatchSizes(4000, 0, 2 * 1536 + 52), 151936 // 2
    assert last.logit_bytes(rows) == MAX_LOGIT_ROWS * logits * (4 + 2)
    assert last.logit_bytes(MicrobatchSizes(4000, 0, 100)) == 100 * logits * (4 + 2)
    assert first.logit_bytes(rows) == 0


def test_the_peak_includes_logits_or_a_running_layer() -> None:
    (stage,) = stages([32], [36])
    few, many = MicrobatchSizes(1000, 0, 1), MicrobatchSizes(1000, 0, 1000)
    assert stage.working_bytes(few) > stage.logit_bytes(few) and stage.working_bytes(many) < stage.logit_bytes(many)
    whole = StageMemory((stage,))
    assert whole.peak_bytes(few, 1, 7) == 7 + stage.kept_bytes(few) + stage.working_bytes(few)
    assert whole.peak_bytes(many, 1, 7) == 7 + stage.kept_bytes(many) + stage.logit_bytes(many)


def test_chunks_of_a_stage_share_its_memory() -> None:
    """3B on two stages of two chunks, 4 microbatches: stage 0 runs five forward passes before a backward pass."""
    run = run_of("3b", [[32, 0], [0, 0]], [[0, 12], [12, 12]], 2, global_batch_size=4, bf16=True)
    first, last = (stage_memory(run, run.model.placement(), stage) for stage in range(2))
    assert first.in_flight(TOKENS, 4) == (3, 2)  # chunk 0 is the ViT, which keeps nothing for text
    assert last.in_flight(TOKENS, 4) == (3, 0)  # its second chunk runs the backward pass at once
    kept = [chunk.kept_bytes(TOKENS) for chunk in last.chunks]
    coming = 100 * (2 * 128 * 2 + 2048 * 2)  # cos and sin tables, and the hidden states being received
    assert last.kept_bytes(TOKENS, 4) == 3 * kept[0] + coming and kept[0] > kept[1]


def test_cached_vit_features_arrive_in_whole_rows() -> None:
    """In place of pixels (1176 elements each) or of a message cut over tensor-parallel ranks; for the projector alone.
    """
    first, second = (replace(chunk, tp_size=2, num_pieces=2) for chunk in stages([16, 16], [0, 36]))
    (alone,) = stages([32], [36])
    rows = MicrobatchSizes(100, 400, 0)

    def more(chunk: ChunkMemory) -> int:
        return replace(chunk, keeps_features=True).coming_bytes(rows) - chunk.coming_bytes(rows)

    assert more(first) == 0
    assert more(second) == 400 * 1280 * 2 // 2
    assert more(alone) == 400 * (1280 - 1176) * 2


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 12))
def test_microbatches_that_are_encoded_together_are_kept_together(
    num_stages: int, encoder_batch: int, num_microbatches: int
) -> None:
    """As many as the schedule of the first stage keeps, counted one by one; exactly if there are enough to reach it."""
    chunk, *_ = stages([32, *[0] * (num_stages - 1)], [*[0] * (num_stages - 1), 36])
    together = replace(chunk, model=replace(chunk.model, encoder_batch_microbatches=encoder_batch))
    rows = MicrobatchSizes(0, 400, 0)
    of_one = together.kept_bytes(rows)
    most, forward, backward = 0, 0, 0
    for is_forward, _ in stage_steps(num_microbatches, 0, num_stages, 1):
        forward, backward = forward + is_forward, backward + (not is_forward)
        if forward > backward:
            start = backward // encoder_batch * encoder_batch
            stop = min(num_microbatches, -(-forward // encoder_batch) * encoder_batch)
            most = max(most, stop - start)
    (count,) = StageMemory((together,)).in_flight(rows, num_microbatches)
    found = together.kept_bytes(rows, count, num_microbatches)
    assert found >= most * of_one
    if num_microbatches >= encoder_batch * (num_stages + 1):
        assert found == most * of_one
    assert together.working_bytes(rows) > encoder_batch * chunk.working_bytes(rows) * (encoder_batch > 1)


def test_messages_that_a_frozen_prefix_sends_ahead_count() -> None:
    """Up to 4 x stages + 1 messages, at most one per microbatch; none if a gradient comes back."""
    lists, rows, patches = ([16, 16, 0], [0, 0, 36]), MicrobatchSizes(100, 400, 0), 400 * 1280 * 2
    first, second, last = (StageMemory((chunk,)) for chunk in stages(*lists, freeze="vp"))
    assert [first.ahead_bytes(rows, count) for count in (2, 13, 99)] == [2 * patches, 13 * patches, 13 * patches]
    assert second.ahead_bytes(rows, 5) == 5 * 100 * 2048 * 2 and last.ahead_bytes(rows, 5) == 0
    assert first.ahead_bytes(TOKENS, 5) == 0
    peak = 7 + first.kept_bytes(rows, 5) + first.working_bytes(rows)
    assert first.peak_bytes(rows, 5, 7) == peak + 5 * patches
    trained, halves = stages(*lists), stages(*lists, freeze="v", tp_size=2)
    assert not any(chunk.ahead_bytes(rows) for chunk in (*trained, halves[1]))  # the projector of the second is trained
    assert replace(halves[0], num_pieces=2).ahead_bytes(rows) == patches // 2


def test_the_next_microbatch_is_already_allocated() -> None:
    """Its pixels, indices and tables, and its message; there is none after the last microbatch."""
    first, second, last = (StageMemory((chunk,)) for chunk in stages([16, 16, 0], [0, 0, 36]))
    tables, rows = 2 * 2 * 80 * 4 + 2 * 8, MicrobatchSizes(100, 400, 0)
    kept = [one.chunks[0].kept_bytes(rows) for one in (first, second, last)]
    assert first.kept_bytes(rows, 4) == 3 * kept[0] + 400 * (1176 * 2 + tables)
    assert second.kept_bytes(rows, 4) == 2 * kept[1] + 400 * (tables + 1280 * 2)
    assert last.kept_bytes(rows, 4) == kept[2] + 100 * (2 * 128 * 2 + 8) + 100 * 2048 * 2
    assert first.kept_bytes(rows, 3) == 3 * kept[0] and last.kept_bytes(rows, 1) == kept[2]
    assert last.working_bytes(TOKENS) == max(chunk.working_bytes(TOKENS) for chunk in last.chunks)


@given(st.lists(st.integers(1, 1000), max_size=20), st.floats(0, 1))
def test_host_memory_has_the_share_that_was_asked_for_but_for_a_part_of_the_smallest_other(sizes, share: float) -> None:
    chosen = offloaded(sizes, share)
    left = round(share * sum(sizes)) - sum(sizes[index] for index in chosen)
    assert chosen == sorted(set(chosen)) and left >= 0
    assert all(left < size for index, size in enumerate(sizes) if index not in chosen)
