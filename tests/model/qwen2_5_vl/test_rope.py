"""Tables and rotation against transformers' modeling_qwen2_5_vl, to the bit."""

import pytest
import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as hf

from mm.model.qwen2_5_vl.arithmetic import mrope_cos_sin, vision_cos_sin, vision_positions
from tests.devices import kernels_of

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


ROPE = kernels_of("cpu").rope


def rotation_inputs(groups, heads_per_group, head_dim, dtype):
    """A fused projection of 50 tokens; tables in float32."""
    qkv = torch.randn(50, groups, heads_per_group + 2, head_dim, dtype=dtype, requires_grad=True)
    angles = torch.randn(50, head_dim // 2).repeat(1, 2)
    return qkv, angles.cos(), angles.sin()


def parts(qkv):
    """Queries, keys and values of a fused projection, one after another and not yet rotated."""
    return qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_in_the_vit_equals_transformers(dtype):
    qkv, cos, sin = rotation_inputs(4, 1, 80, dtype)
    q, k, v = parts(qkv)
    expected = (*hf.apply_rotary_pos_emb_vision(q, k, cos, sin), v)
    assert_same_values_and_gradient(ROPE(qkv, cos, sin), expected, qkv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "heads_per_group"), [(4, 1), (2, 3), (1, 6)])
def test_rotation_in_the_language_model_equals_transformers(dtype, groups, heads_per_group):
    qkv, cos, sin = rotation_inputs(groups, heads_per_group, 128, dtype)
    cos, sin = cos.to(dtype), sin.to(dtype)
    q, k, v = parts(qkv)
    rotated = hf.apply_rotary_pos_emb(q[None], k[None], cos[None], sin[None], unsqueeze_dim=2)
    assert_same_values_and_gradient(ROPE(qkv, cos, sin), (rotated[0][0], rotated[1][0], v), qkv)


def assert_same_values_and_gradient(ours, expected, qkv):
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    upstream = [torch.randn_like(part) for part in expected]
    gradients = [torch.autograd.grad(outputs, qkv, upstream)[0] for outputs in (ours, expected)]
    assert torch.equal(*gradients)


def test_rotation_gradient_is_that_of_finite_differences():
    angles = torch.randn(5, 4, dtype=torch.float64).repeat(1, 2)
    qkv = torch.randn(5, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda qkv: ROPE(qkv, angles.cos(), angles.sin()), qkv)
