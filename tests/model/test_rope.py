"""Tables and rotation against transformers' modeling_qwen2_5_vl, to the bit."""

import pytest
import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as hf

from mm.model.positions import vision_positions
from mm.model.rope import apply_rope, mrope_cos_sin, vision_cos_sin

MERGE = 2


@pytest.fixture(scope="module")
def hf_config():
    text = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1,
            "intermediate_size": 8, "vocab_size": 100,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 160, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 8}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision)


def test_mrope_tables_equal_transformers(hf_config):
    positions = torch.randint(0, 30_000, (3, 200))
    text = hf_config.text_config
    cos, sin = hf.Qwen2_5_VLRotaryEmbedding(text)(torch.zeros(1), positions[:, None])
    ours = mrope_cos_sin(positions, 32, text.rope_parameters["rope_theta"], text.rope_parameters["mrope_section"])
    assert torch.equal(ours[0], cos[0]) and torch.equal(ours[1], sin[0])
    assert ours[0].dtype == torch.float32


def test_a_section_that_does_not_fill_the_head_is_refused():
    with pytest.raises(ValueError, match="sum to 64"):
        mrope_cos_sin(torch.zeros(3, 1), 128, 1e6, (16, 24, 23))


def test_vision_tables_without_images():
    assert vision_cos_sin(vision_positions([], MERGE), 80)[0].shape == (0, 80)


def test_vision_tables_equal_transformers(hf_config):
    positions = vision_positions([(1, 60, 44)], MERGE)
    cos, sin = hf.Qwen2_5_VLVisionRotaryEmbedding(hf_config.vision_config)(torch.zeros(1), positions)
    ours = vision_cos_sin(positions, 80)
    assert torch.equal(ours[0], cos) and torch.equal(ours[1], sin)


def rotation_inputs(num_tokens, heads, head_dim, dtype):
    """Heads that are a strided slice of a fused projection, as in the model; tables in float32."""
    fused = torch.randn(num_tokens, 3 * heads, head_dim, dtype=dtype)
    angles = torch.randn(num_tokens, head_dim // 2).repeat(1, 2)
    return fused[:, heads : 2 * heads].requires_grad_(), angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_in_the_vit_equals_transformers(dtype):
    x, cos, sin = rotation_inputs(50, 4, 80, dtype)
    expected = hf.apply_rotary_pos_emb_vision(x, x, cos, sin)[0]
    assert_same_value_and_gradient(apply_rope(x, cos, sin), expected, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_in_the_language_model_equals_transformers(dtype):
    x, cos, sin = rotation_inputs(50, 4, 128, dtype)
    cos, sin = cos.to(dtype), sin.to(dtype)
    expected = hf.apply_rotary_pos_emb(x[None], x[None], cos[None], sin[None], unsqueeze_dim=2)[0][0]
    assert_same_value_and_gradient(apply_rope(x, cos, sin), expected, x)


def assert_same_value_and_gradient(ours, expected, x):
    upstream = torch.randn_like(expected)
    assert ours.dtype == expected.dtype and torch.equal(ours, expected)
    gradients = [torch.autograd.grad(y, x, upstream)[0] for y in (ours, expected)]
    assert torch.equal(*gradients)


def test_rotation_gradient_is_that_of_finite_differences():
    angles = torch.randn(5, 4, dtype=torch.float64).repeat(1, 2)
    x = torch.randn(5, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, angles.cos(), angles.sin()), x)
