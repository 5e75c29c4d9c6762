"""FLOPs are those that torch counts on the Hugging Face model; positions, windows and rope equal transformers' to the
bit.
"""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as hf
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from mm.batch import BatchTotals
from mm.model.qwen2_5_vl.positions import (
    VideoTimes,
    mrope_cos_sin,
    mrope_positions,
    plan_vision,
    vision_cos_sin,
    vision_positions,
)
from tests.devices import kernels_of
from tests.forward_flops import forward_flops
from tests.tiny import hf_logits, hf_model, microbatch, our_config, random_sample

GRIDS = ((1, 8, 12), (1, 4, 6))


@pytest.fixture(scope="module")
def counted() -> tuple[BatchTotals, dict[str, int]]:
    sample = random_sample(torch.Generator().manual_seed(0), GRIDS, 12)
    model = hf_model()
    model.set_attn_implementation("eager")  # SDPA's CPU kernel is not in torch's FLOP table
    with FlopCounterMode(display=False, depth=4) as counter, torch.no_grad():
        hf_logits(model, sample)
    counts = {name: sum(by_operator.values()) for name, by_operator in counter.get_flop_counts().items()}
    return BatchTotals.of([microbatch([sample])], our_config(((4,),), ((4,),)).vision), counts


def test_linear_flops_equal_torchs(counted) -> None:
    totals, counts = counted
    config = our_config(((4,),), ((4,),))
    (visual,) = [flops for name, flops in counts.items() if name.endswith(".visual")]
    (merger,) = [flops for name, flops in counts.items() if name.endswith("visual.merger")]
    assert forward_flops(config, totals).projector == merger
    assert forward_flops(config, totals).vision == visual - merger


# Positions and windows

IMAGE, START, END, VIDEO = 90, 91, 92, 93
PATCH, MERGE, WINDOW = 14, 2, 112
grids = st.tuples(st.integers(1, 3), st.integers(1, 13), st.integers(1, 13)).map(lambda g: (g[0], g[1] * 2, g[2] * 2))
some_images = st.lists(grids, min_size=1, max_size=5)
fast = settings(max_examples=50, deadline=None)


def sample(images, text_lengths, tokens=None):
    """Token ids with some text before each image and at the end."""
    ids = []
    for grid, length, token in zip(images, text_lengths, tokens or [IMAGE] * len(images), strict=False):
        ids += [1] * length + [START] + [token] * (grid[0] * grid[1] * grid[2] // MERGE**2) + [END]
    return torch.tensor(ids + [2] * text_lengths[-1])


@pytest.fixture(scope="module")
def hf_config():
    text = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1,
            "intermediate_size": 8, "vocab_size": 100,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 160, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 8}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision)


@pytest.fixture(scope="module")
def empty_model(hf_config):
    with torch.device("meta"):
        return hf.Qwen2_5_VLModel(copy.deepcopy(hf_config))


def hf_positions(empty_model, ids, images):
    positions, _ = empty_model.get_rope_index(
        ids[None], (ids == IMAGE).int()[None], image_grid_thw=torch.tensor(images) if images else None
    )
    return positions[:, 0]


@fast
@given(data=st.data(), images=st.lists(grids, max_size=4))
def test_mrope_positions_equal_transformers(empty_model, data, images):
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=len(images) + 1, max_size=len(images) + 1))
    ids = sample(images, lengths)
    if not ids.numel():
        return
    ours = mrope_positions(ids, images, IMAGE, START, MERGE)
    assert ours.dtype == torch.int64
    assert torch.equal(ours, hf_positions(empty_model, ids, images))


@fast
@given(data=st.data(), media=st.lists(st.tuples(grids, st.one_of(st.none(), st.floats(0.001, 300))), max_size=5),
       tokens_per_second=st.integers(1, 30))
def test_positions_of_pictures_and_videos_in_any_order_equal_transformers(empty_model, data, media, tokens_per_second):
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=len(media) + 1, max_size=len(media) + 1))
    seconds = tuple(one for _, one in media)
    tokens = [IMAGE if one is None else VIDEO for one in seconds]
    shapes = [grid for grid, _ in media]
    ids = sample(shapes, lengths, tokens)
    if not ids.numel():
        return
    empty_model.config.vision_config.tokens_per_second = tokens_per_second
    pictures, videos = ([grid for grid, one in media if (one is None) == is_picture] for is_picture in (True, False))
    expected, _ = empty_model.get_rope_index(
        ids[None], ((ids == IMAGE) + 2 * (ids == VIDEO)).int()[None],
        image_grid_thw=torch.tensor(pictures) if pictures else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
        second_per_grid_ts=torch.tensor([one for one in seconds if one is not None]),
    )
    ours = mrope_positions(ids, shapes, IMAGE, START, MERGE, VideoTimes(VIDEO, tokens_per_second, seconds))
    assert ours.dtype == torch.int64 and torch.equal(ours, expected[:, 0])


@fast
@given(images=st.lists(grids, min_size=1, max_size=4))
def test_vision_positions_equal_transformers(images):
    assert torch.equal(vision_positions(images, MERGE), get_vision_position_ids(torch.tensor(images), MERGE))


# Windows


def plan(images, window=WINDOW):
    return plan_vision(images, PATCH, MERGE, window)


def hf_windows(images, window=WINDOW):
    """Patches of each of transformers' windows, in the processor's numbering."""
    units, ends = get_vision_window_index(torch.tensor(images), MERGE, window, PATCH)
    patches = (units[:, None] * MERGE**2 + torch.arange(MERGE**2)).flatten()
    return [part.tolist() for part in patches.tensor_split(ends[1:-1].long())]


@fast
@given(images=some_images, window=st.sampled_from([28, 56, 112, 196]))
def test_windows_are_those_of_transformers(images, window):
    ours = plan(images, window)
    windows = ours.patch_order.index.split(ours.window_lengths)
    assert sorted(part.tolist() for part in windows) == sorted(hf_windows(images, window))


@fast
@given(images=some_images)
def test_tokens_come_back_in_reading_order(images):
    ours = plan(images)
    tokens = ours.patch_order.index[:: MERGE**2] // MERGE**2  # which unit the projector makes of each four rows
    assert torch.equal(ours.patch_order.index.view(-1, MERGE**2) // MERGE**2, tokens[:, None].expand(-1, MERGE**2))
    assert torch.equal(tokens[ours.token_restore.index], torch.arange(tokens.numel()))


@fast
@given(images=some_images)
def test_image_order_gathers_frames(images):
    ours = plan(images)
    ends = get_vision_cu_seqlens(torch.tensor(images))
    assert ours.image_lengths == tuple(ends.diff().tolist())
    rows = ours.patch_order.index
    rows = rows if ours.image_order is None else rows[ours.image_order.index]
    for frame, part in enumerate(rows.split(ours.image_lengths)):
        assert torch.equal(part.sort().values, torch.arange(int(ends[frame]), int(ends[frame + 1])))


def test_no_images():
    ours = plan([])
    assert ours.window_lengths == () and ours.image_lengths == ()
    assert ours.patch_order.index.shape == ours.token_restore.index.shape == (0,)
    assert ours.positions.shape == (0, 2)
    assert ours.image_order is None
    assert ours.patch_order.index.dtype == ours.token_restore.index.dtype == ours.positions.dtype == torch.int64


def test_a_4096_pixel_image():
    images = [(1, 292, 292)]
    ours = plan(images)
    assert len(ours.window_lengths) == 37**2
    assert [len(set(part)) for part in (ours.window_lengths, ours.image_lengths)] == [3, 1]
    windows = ours.patch_order.index.split(ours.window_lengths)
    assert sorted(part.tolist() for part in windows) == sorted(hf_windows(images))


# Rope


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
