"""The dry-run text: numbers by hand for small cases, and what it says of stages and boundaries."""

import dataclasses
from pathlib import Path

import pytest

from mm.config.data import DataConfig
from mm.config.flags import Arguments
from mm.config.model import read_model
from mm.config.run import Run
from mm.plan.stages import num_model_params, stage_report, stage_size

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "qwen2.5vl"
VISION_PADDING = 32 * 4 * (2 * (1280 + 1) + 1280)
"""In memory the ViT's ffn is 3424 wide instead of 3420, in all layers: gate and up with their biases, and down."""


def run_of(size: str, vision: list[int], language: list[int], world_size: int, *, freeze: str = "",
           **flags) -> Run:
    """A run on the given lists; ``freeze`` has v, p, l for the frozen parts."""
    model = read_model(EXAMPLES / f"model_{size}.json").value
    model = dataclasses.replace(
        model,
        vision=dataclasses.replace(model.vision, pipeline_num_layers=(tuple(vision),), freeze="v" in freeze),
        projector=dataclasses.replace(model.projector, freeze="p" in freeze),
        language=dataclasses.replace(model.language, pipeline_num_layers=(tuple(language),), freeze="l" in freeze),
    )
    args = Arguments(
        mm_model="m.json", mm_data="d.json", micro_batch_size=1, seq_length=1024, train_iters=1, lr=0.0, **flags)
    return Run(args, model, DataConfig("hf", ("d.json",)), world_size, ("a note",))


def sizes(run: Run):
    placement = run.model.placement()
    return [stage_size(run, placement, spec) for spec in placement.slots]


def test_parameters_of_the_3b_parts():
    """Patch embedding 1280 x 1176 and 32 ViT layers and the merger: 668,684,288; the rest is the LLM."""
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


def test_frozen_stage_has_weights_only():
    vit, llm = sizes(run_of("7b", [32, 0], [0, 28], 2, freeze="vp", bf16=True))
    assert (vit.num_trainable_params, vit.gradient_bytes, vit.optimizer_bytes) == (0, 0, 0)
    assert vit.total_bytes == 2 * vit.num_params
    assert llm.num_trainable_params == llm.num_params


def test_tensor_parallel_ranks_hold_parts():
    """Everything is halved but the norms, biases after row-parallel layers, and the patch embedding."""
    (whole,), (half,) = sizes(run_of("7b", [32], [28], 1)), sizes(run_of("7b", [32], [28], 2,
                                                                         tensor_model_parallel_size=2))
    replicated = (1280 * 1176 + 32 * 4 * 1280 + 1280 + 3584) + (28 * 2 * 3584 + 3584)
    assert 2 * half.num_params == whole.num_params + replicated


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
    assert "2      nothing (hands on what it receives) " in text
    assert "3      embedding, LLM 0-26 " in text
    assert "4      LLM 27, norm + head " in text
    assert "  0 -> 1: patches [patches, 1280] bf16; no gradient\n" in text
    for boundary in ("1 -> 2", "2 -> 3"):
        assert (f"  {boundary}: visual tokens [patches / 4, 3584] bf16; gradient for microbatches with images only\n"
                in text)
    assert "  3 -> 4: hidden states [tokens, 3584] bf16; gradient always\n" in text
    assert text.endswith("Notes:\n  - a note")


def test_frozen_llm_sends_gradients_for_images_only():
    text = stage_report(run_of("7b", [32, 0], [14, 14], 2, freeze="l"))
    assert "  0 -> 1: hidden states [tokens, 3584] fp32; gradient for microbatches with images only\n" in text


def test_largest_stage_and_total():
    run = run_of("7b", [32, 0], [12, 16], 8, freeze="vp", bf16=True, use_distributed_optimizer=True)
    first, second = sizes(run)
    text = stage_report(run)
    assert f"Largest   stage 1 with {second.total_bytes / 2**30:.2f} GiB on each rank" in text
    assert f"In all    {4 * (first.total_bytes + second.total_bytes) / 2**30:.2f} GiB on 8 ranks" in text
    assert "Batch     4 samples per step = micro 1 x 1 microbatches x data 4" in text


def test_single_stage_has_no_boundaries():
    assert "Boundaries" not in stage_report(run_of("3b", [32], [36], 1))
