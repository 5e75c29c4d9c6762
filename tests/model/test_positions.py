"""The plan of windows against transformers' vision_utils and against its own promises."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from mm.model.positions import plan_vision

PATCH, MERGE, WINDOW = 14, 2, 112
grids = st.tuples(st.integers(1, 3), st.integers(1, 13), st.integers(1, 13)).map(lambda g: (g[0], g[1] * 2, g[2] * 2))
some_images = st.lists(grids, min_size=1, max_size=5)
fast = settings(max_examples=50, deadline=None)


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
    windows = ours.patch_order.split(ours.window_lengths)
    assert sorted(part.tolist() for part in windows) == sorted(hf_windows(images, window))


@fast
@given(images=some_images)
def test_windows_run_from_the_largest_to_the_smallest(images):
    lengths = plan(images).window_lengths
    assert list(lengths) == sorted(lengths, reverse=True)


@fast
@given(images=some_images)
def test_tokens_come_back_in_reading_order(images):
    ours = plan(images)
    tokens = ours.patch_order[:: MERGE**2] // MERGE**2  # which unit the projector makes of each four rows
    assert torch.equal(ours.patch_order.view(-1, MERGE**2) // MERGE**2, tokens[:, None].expand(-1, MERGE**2))
    assert torch.equal(tokens[ours.token_restore], torch.arange(tokens.numel()))


@fast
@given(images=some_images)
def test_image_order_gathers_frames(images):
    ours = plan(images)
    ends = get_vision_cu_seqlens(torch.tensor(images))
    assert ours.image_lengths == tuple(ends.diff().tolist())
    rows = ours.patch_order if ours.image_order is None else ours.patch_order[ours.image_order]
    for frame, part in enumerate(rows.split(ours.image_lengths)):
        assert torch.equal(part.sort().values, torch.arange(ends[frame], ends[frame + 1]))


@fast
@given(images=some_images)
def test_image_restore_undoes_image_order(images):
    ours = plan(images)
    identity = torch.arange(ours.patch_order.numel())
    if ours.image_order is None:
        assert ours.image_restore is None
    else:
        assert not torch.equal(ours.image_order, identity)
        assert torch.equal(ours.image_order[ours.image_restore], identity)


def test_one_image_needs_no_image_order():
    assert plan([(1, 20, 34)]).image_order is None


def test_an_image_with_an_edge_before_another_needs_one():
    assert plan([(1, 10, 8), (1, 8, 8)]).image_order is not None


@fast
@given(images=some_images)
def test_positions_are_in_window_order(images):
    ours = plan(images)
    assert torch.equal(ours.positions, get_vision_position_ids(torch.tensor(images), MERGE)[ours.patch_order])


def test_no_images():
    ours = plan([])
    assert ours.window_lengths == () and ours.image_lengths == ()
    assert ours.patch_order.shape == ours.token_restore.shape == (0,)
    assert ours.positions.shape == (0, 2)
    assert ours.image_order is None and ours.image_restore is None
    assert ours.patch_order.dtype == ours.token_restore.dtype == ours.positions.dtype == torch.int64


def test_a_4096_pixel_image():
    images = [(1, 292, 292)]
    ours = plan(images)
    assert len(ours.window_lengths) == 37**2
    assert [len(set(part)) for part in (ours.window_lengths, ours.image_lengths)] == [3, 1]
    windows = ours.patch_order.split(ours.window_lengths)
    assert sorted(part.tolist() for part in windows) == sorted(hf_windows(images))
