"""The weight table against transformers' real model, and its algebra over random models, TP sizes and layouts."""

import math
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.checkpoint.mindspeed_layout import stage_local_name
from mm.config.model import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from mm.errors import UserError
from mm.placement import layout_problems
from mm.weights.fuse import fuse, fuse_pieces, hf_ranges, local_shape, shard, unshard
from mm.weights.table import (
    EMBEDDING_NAME,
    OUTPUT_LAYER_NAME,
    Fusion,
    Place,
    is_target,
    live_name,
    model_weights,
    published_name,
    stage_weights,
)
from tests.saved_hf import Spelling, spell
from tests.unfuse import unfuse

REAL_SIZES = {
    # hidden, layers, heads, kv heads, ffn, vocabulary, ViT ffn, tied, parameters (transformers' own count)
    "3b": (2048, 36, 16, 2, 11008, 151936, 3420, True, 3_754_622_976),
    "7b": (3584, 28, 28, 4, 18944, 152064, 3420, False, 8_292_166_656),
    "32b": (5120, 64, 40, 8, 27648, 152064, 3456, False, 33_452_718_336),
    "72b": (8192, 80, 64, 8, 29568, 152064, 3456, False, 73_410_777_344),
}


def real_model(size: str) -> ModelConfig:
    hidden, layers, heads, groups, ffn, vocabulary, vision_ffn, tied, _ = REAL_SIZES[size]
    return ModelConfig(
        vision=VisionConfig(32, ((32,),), 1280, vision_ffn, 16, 112, (7, 15, 23, 31)),
        projector=ProjectorConfig(1280, 5120, hidden),
        language=LanguageConfig(layers, ((layers,),), hidden, ffn, heads, groups, vocabulary, 32768, (16, 24, 24), 128,
                                untie_embeddings_and_output_weights=not tied),
    )


@st.composite
def models(draw: st.DrawFn, tp_size: int = 1, num_slots: tuple[int, int] = (1, 1)) -> ModelConfig:
    """Small models that ``tp_size`` can cut, on a random legal layout of ``(chunks, stages)`` slots."""
    num_chunks, num_stages = num_slots
    total = num_chunks * num_stages
    last_vision = draw(st.integers(0, total - 1))
    vision_counts = [draw(st.integers(0, 2)) if slot <= last_vision else 0 for slot in range(total)]
    vision_counts[last_vision] = draw(st.integers(1, 2))
    language_counts = [draw(st.integers(0, 2)) if slot >= last_vision else 0 for slot in range(total)]
    language_counts[-1] += sum(language_counts) == 0

    def nested(counts: list[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(counts[chunk * num_stages : (chunk + 1) * num_stages]) for chunk in range(num_chunks))

    assert not layout_problems(nested(vision_counts), nested(language_counts), sum(vision_counts), sum(language_counts))
    vision_heads, groups = tp_size * draw(st.integers(1, 2)), tp_size * draw(st.integers(1, 2))
    vision_hidden, head_dim = vision_heads * draw(st.integers(1, 3)), draw(st.integers(1, 3))
    hidden, heads = draw(st.integers(1, 9)), groups * draw(st.integers(1, 4))
    return ModelConfig(
        vision=VisionConfig(sum(vision_counts), nested(vision_counts), vision_hidden, draw(st.integers(1, 21)),
                            vision_heads, 112, (), patch_size=2),
        projector=ProjectorConfig(vision_hidden, draw(st.integers(1, 21)), hidden),
        language=LanguageConfig(sum(language_counts), nested(language_counts), hidden, draw(st.integers(1, 21)), heads,
                                groups, tp_size * draw(st.integers(1, 4)), 64, (1, 1, 1), head_dim,
                                untie_embeddings_and_output_weights=draw(st.booleans())),
    )


def hf_tensors_of(weight) -> list[torch.Tensor]:
    """Distinct numbers, so that any misplaced row or column shows."""
    sizes = [math.prod(shape) for shape in weight.hf_shapes]
    numbers = (1 + torch.arange(sum(sizes), dtype=torch.float64)).split(sizes)
    return [part.reshape(shape) for part, shape in zip(numbers, weight.hf_shapes, strict=True)]


@pytest.mark.parametrize("size", REAL_SIZES)
def test_real_sizes_have_the_names_shapes_and_count_of_transformers(size):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    hidden, layers, heads, groups, ffn, vocabulary, vision_ffn, tied, count = REAL_SIZES[size]
    config = Qwen2_5_VLConfig(
        text_config={"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
                     "num_key_value_heads": groups, "intermediate_size": ffn, "vocab_size": vocabulary},
        vision_config={"intermediate_size": vision_ffn, "hidden_size": 1280, "out_hidden_size": hidden, "depth": 32},
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        reference = Qwen2_5_VLForConditionalGeneration(config)
    expected = {published_name(name): tuple(tensor.shape) for name, tensor in reference.named_parameters()}
    weights = model_weights(real_model(size))
    found = [pair for weight in weights for pair in zip(weight.hf_names, weight.hf_shapes, strict=True)]
    assert len(found) == len(dict(found))
    assert dict(found) == expected
    assert sum(math.prod(weight.shape) for weight in weights) == count == reference.num_parameters()


def test_names_follow_the_published_table():
    names = [weight.name for weight in model_weights(real_model("7b"))]
    assert len(names) == len(set(names))
    assert names[0] == "image_encoder.encoder.patch_embed.proj.weight"
    assert names[1:13] == [
        f"image_encoder.encoder.blocks.layers.0.{name}" for name in (
            "input_layernorm.weight", "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias",
            "self_attention.linear_proj.weight", "self_attention.linear_proj.bias", "pre_mlp_layernorm.weight",
            "mlp.linear_fc1.weight", "mlp.linear_fc1.bias", "mlp.linear_fc2.weight", "mlp.linear_fc2.bias",
        )
    ] + ["image_encoder.encoder.blocks.layers.1.input_layernorm.weight",
         "image_encoder.encoder.blocks.layers.1.self_attention.linear_qkv.weight"]
    projector = 1 + 32 * 10
    assert names[projector : projector + 6] == [f"image_encoder.projector.{name}" for name in (
        "layernorm.weight", "encoder.linear_fc1.weight", "encoder.linear_fc1.bias", "encoder.linear_fc2.weight",
        "encoder.linear_fc2.bias")] + ["text_decoder.embedding.word_embeddings.weight"]
    assert names[-9:] == [f"text_decoder.decoder.layers.27.{name}" for name in (
        "input_layernorm.weight", "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias",
        "self_attention.linear_proj.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight")] + ["text_decoder.decoder.final_layernorm.weight", "text_decoder.output_layer.weight"]


def test_tensor_parallel_rules_of_the_table():
    cuts = {weight.name.replace(".layers.0.", ".layers.N."): weight.tp_dim for weight in model_weights(real_model("7b"))
            if weight.layer in (None, 0)}
    rows = {name for name, dim in cuts.items() if dim == 0}
    columns = {name for name, dim in cuts.items() if dim == 1}
    vision, language = "image_encoder.encoder.blocks.layers.N.", "text_decoder.decoder.layers.N."
    projector = "image_encoder.projector.encoder."
    assert rows == {
        f"{vision}self_attention.linear_qkv.weight", f"{vision}self_attention.linear_qkv.bias",
        f"{vision}mlp.linear_fc1.weight", f"{vision}mlp.linear_fc1.bias",
        f"{projector}linear_fc1.weight", f"{projector}linear_fc1.bias",
        f"{language}self_attention.linear_qkv.weight", f"{language}self_attention.linear_qkv.bias",
        f"{language}mlp.linear_fc1.weight", EMBEDDING_NAME, OUTPUT_LAYER_NAME,
    }
    assert columns == {
        f"{vision}self_attention.linear_proj.weight", f"{vision}mlp.linear_fc2.weight", f"{projector}linear_fc2.weight",
        f"{language}self_attention.linear_proj.weight", f"{language}mlp.linear_fc2.weight",
    }


@settings(max_examples=40, deadline=None)
@given(data=st.data(), tp_size=st.sampled_from([1, 2, 4, 8]))
def test_fuse_and_shard_are_undone_exactly(data, tp_size):
    model = data.draw(models(tp_size))
    for weight in model_weights(model):
        hf_tensors = hf_tensors_of(weight)
        whole = fuse(weight, hf_tensors)
        assert tuple(whole.shape) == weight.shape
        for back, original in zip(unfuse(weight, whole), hf_tensors, strict=True):
            assert back.is_contiguous() and torch.equal(back, original)
        shards = [shard(weight, whole, tp_size, rank) for rank in range(tp_size)]
        assert {tuple(part.shape) for part in shards} == {local_shape(weight, tp_size)}
        assert torch.equal(unshard(weight, shards), whole)
        if weight.tp_dim is None:
            continue
        # Every number lies in exactly one shard, and all that is added is zeros.
        assert sum(int(part.count_nonzero()) for part in shards) == whole.numel()
        for rank, expected in enumerate(shards):
            parts = [
                torch.cat([tensor.narrow(weight.tp_dim, kept.start, len(kept)) for kept in ranges], dim=weight.tp_dim)
                for tensor, ranges in zip(hf_tensors, hf_ranges(weight, tp_size, rank), strict=True)
            ]
            assert torch.equal(fuse_pieces(weight, parts, tp_size), expected)


def weight_named(model: ModelConfig, name: str):
    return next(weight for weight in model_weights(model) if weight.name == name)


@pytest.fixture
def tiny() -> ModelConfig:
    """Heads of width 1: two ViT heads; four query heads in two groups; ffn 3 everywhere."""
    return ModelConfig(
        vision=VisionConfig(1, ((1,),), 2, 3, 2, 112, ()),
        projector=ProjectorConfig(2, 3, 4),
        language=LanguageConfig(1, ((1,),), 4, 3, 4, 2, 6, 64, (1, 1, 1), 1),
    )


@pytest.mark.parametrize(("layers", "fusion", "parts", "shards"), [
    # q0 q1 k0 k1 v0 v1 by head; four queries in two groups
    ("image_encoder.encoder.blocks", Fusion.PER_HEAD_QKV, [[10, 11, 20, 21, 30, 31]], [[10, 20, 30], [11, 21, 31]]),
    ("text_decoder.decoder", Fusion.GROUPED_QKV, [[10, 11, 12, 13], [20, 21], [30, 31]],
     [[10, 11, 20, 30], [12, 13, 21, 31]])])
def test_qkv_is_grouped_by_head_or_by_key_value_head(tiny, layers, fusion, parts, shards):
    weight = weight_named(tiny, f"{layers}.layers.0.self_attention.linear_qkv.bias")
    fused = fuse(weight, [*map(torch.tensor, parts)])
    assert weight.fusion is fusion and fused.tolist() == [*shards[0], *shards[1]]
    assert [shard(weight, fused, 2, rank).tolist() for rank in (0, 1)] == shards


def test_gate_and_up_are_cut_and_padded_each(tiny):
    weight = weight_named(tiny, "image_encoder.encoder.blocks.layers.0.mlp.linear_fc1.bias")
    fused = fuse(weight, [torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])])
    assert [shard(weight, fused, 2, rank).tolist() for rank in (0, 1)] == [[1, 2, 4, 5], [3, 0, 6, 0]]
    assert shard(weight, fused, 8, 7).tolist() == [0, 0]  # a rank wholly in the padding
    down = weight_named(tiny, "image_encoder.encoder.blocks.layers.0.mlp.linear_fc2.weight")
    whole = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert [shard(down, whole, 2, rank).tolist() for rank in (0, 1)] == [[[1, 2], [4, 5]], [[3, 0], [6, 0]]]


@pytest.mark.parametrize("name", [EMBEDDING_NAME, "text_decoder.decoder.layers.0.self_attention.linear_qkv.weight",
                                  "text_decoder.decoder.layers.0.self_attention.linear_proj.weight"])
def test_what_must_not_be_padded_is_refused(tiny, name):
    with pytest.raises(UserError, match=f"{name} .*tensor parallel size 4"):
        local_shape(weight_named(tiny, name), 4)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_slots=st.tuples(st.integers(1, 3), st.integers(1, 4)))
def test_slots_partition_the_model(data, num_slots):
    model = data.draw(models(num_slots=num_slots))
    placement = model.placement()
    owned = list(chain.from_iterable(stage_weights(model, spec) for spec in placement.slots))
    copies = [weight for weight in owned if model.language.tied and weight.name == OUTPUT_LAYER_NAME]
    assert sorted(w.name for w in owned if w not in copies) == sorted(w.name for w in model_weights(model))
    expects_copy = model.language.tied and placement.embedding_slot != placement.head_slot
    assert len(copies) == expects_copy
    for copy in copies:
        assert copy.hf_names == ("model.embed_tokens.weight",) and copy.place is Place.HEAD
        assert copy.shape == weight_named(model, EMBEDDING_NAME).shape
        (spec,) = (spec for spec in placement.slots if copy in stage_weights(model, spec))
        assert spec.has_head


def test_stage_local_names_count_from_zero_in_each_slot():
    vision, language = ((1, 2, 0),), ((0, 1, 2),)
    model = ModelConfig(VisionConfig(3, vision, 2, 3, 2, 112, ()), ProjectorConfig(2, 3, 4),
                        LanguageConfig(3, language, 4, 3, 4, 2, 6, 64, (1, 1, 1), 1))
    placement = model.placement()
    names = {(stage, weight.name): stage_local_name(weight, placement[stage])
             for stage in range(3) for weight in stage_weights(model, placement[stage])}
    norm = "image_encoder.encoder.blocks.layers.{}.input_layernorm.weight"
    assert names[1, norm.format(2)] == norm.format(1)
    norm = "text_decoder.decoder.layers.{}.input_layernorm.weight"
    assert [names[2, norm.format(layer)] for layer in (1, 2)] == [norm.format(0), norm.format(1)]
    assert names[1, EMBEDDING_NAME] == EMBEDDING_NAME


@pytest.mark.parametrize(("published", "module"), [
    ("visual.merger.mlp.0.weight", "model.visual.merger.mlp.0.weight"),
    ("model.layers.3.mlp.up_proj.weight", "model.language_model.layers.3.mlp.up_proj.weight"),
    ("model.norm.weight", "model.language_model.norm.weight"),
    ("lm_head.weight", "lm_head.weight"),
])
def test_both_spellings(published, module):
    assert published_name(published) == published_name(module) == published
    assert live_name(published) == module
    assert spell(published, Spelling.PUBLISHED) == published
    assert spell(published, Spelling.MODULE) == module


def test_spans_of_layers() -> None:
    assert is_target("layers.0-15.mlp", ["model.layers.7.mlp"]) and not is_target("layers.0-5.mlp", ["layers.7.mlp"])
    assert not is_target("layers.0-99999999999.mlp", ["model.layers.7.mlp"])  # is no span, and would fill the memory
