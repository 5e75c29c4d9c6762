"""Counts over a batch against counting one by one."""

from dataclasses import astuple, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.batch import (
    IGNORE_INDEX,
    BatchTotals,
    Microbatch,
    Normalisation,
    encoder_batches,
    normalised,
    targets_per_segment,
)
from mm.model.qwen2_5_vl.positions import plan_vision
from tests.tiny import our_config

fast = settings(max_examples=40, deadline=None)
VISION = our_config(((4,),), ((4,),)).vision  # windows of 56 pixels: 4 x 4 patches

segments = st.lists(st.lists(st.booleans(), min_size=1, max_size=9), max_size=5)
"""For each sample, which of its tokens are targets."""
grids = st.lists(
    st.tuples(st.integers(1, 2), st.integers(1, 5).map(lambda n: 2 * n), st.integers(1, 5).map(lambda n: 2 * n)),
    max_size=3,
)
microbatches = st.lists(st.tuples(segments, grids), max_size=3)


def build(is_target: list[list[bool]], image_grids: list[tuple[int, int, int]]) -> Microbatch:
    flat = torch.tensor([target for sample in is_target for target in sample], dtype=torch.bool)
    labels = torch.where(flat, 7, IGNORE_INDEX)
    return Microbatch(
        token_ids=torch.zeros(len(flat), dtype=torch.int64), labels=labels,
        positions=torch.zeros(3, len(flat), dtype=torch.int64),
        segment_lengths=tuple(len(sample) for sample in is_target), image_grids=tuple(image_grids), pixel_values=None)


@fast
@given(drawn=microbatches)
def test_counts(drawn) -> None:
    totals = BatchTotals.of([build(*one) for one in drawn], VISION)
    samples = [sample for is_target, _ in drawn for sample in is_target]
    images = [grid for _, image_grids in drawn for grid in image_grids]
    windows = [length for grid in images for length in plan_vision((grid,), 14, 2, 56).window_lengths]
    assert totals == BatchTotals(
        num_tokens=sum(1 for sample in samples for _ in sample),
        num_patches=sum(1 for t, h, w in images for _ in range(t * h * w)),
        num_images=len(images),
        num_omitted_images=0,
        num_target_tokens=sum(1 for sample in samples for target in sample if target),
        num_target_samples=sum(1 for sample in samples if any(sample)),
        num_microbatches=len(drawn),
        num_causal_pairs=sum(1 for s in samples for query in range(len(s)) for key in range(len(s)) if key <= query),
        num_image_pairs=sum((h * w) ** 2 for t, h, w in images for _ in range(t)),
        num_window_pairs=sum(length**2 for length in windows),
    )


@fast
@given(drawn=microbatches, cut=st.integers(0, 3))
def test_counts_of_a_global_batch_are_the_sums_over_its_parts(drawn, cut: int) -> None:
    batch = [build(*one) for one in drawn]
    parts = [astuple(BatchTotals.of(part, VISION)) for part in (batch[:cut], batch[cut:])]
    assert astuple(BatchTotals.of(batch, VISION)) == tuple(sum(pair) for pair in zip(*parts, strict=True))


def test_nothing_counts_nothing() -> None:
    assert astuple(BatchTotals.of([], VISION)) == (0,) * len(fields(BatchTotals))


@fast
@given(is_target=segments)
def test_targets_per_segment(is_target) -> None:
    found = targets_per_segment(build(is_target, []))
    assert found.dtype == torch.int64 and found.tolist() == [sum(sample) for sample in is_target]


@fast
@given(drawn=microbatches)
def test_joined_microbatches_lie_shortest_first_and_whole(drawn) -> None:
    batch = [numbered(build(*one), number) for number, one in enumerate(drawn)]
    if not batch:
        return
    joined, ordered = Microbatch.join(batch), sorted(batch, key=lambda one: one.num_tokens)
    assert joined.segment_lengths == sum((one.segment_lengths for one in ordered), ())
    assert joined.image_grids == sum((one.image_grids for one in ordered), ())
    sizes = [one.num_tokens for one in ordered]
    for name, dim in (("token_ids", 0), ("labels", 0), ("positions", 1)):
        for found, one in zip(getattr(joined, name).split(sizes, dim), ordered, strict=True):
            assert torch.equal(found, getattr(one, name))
    if joined.pixel_values is None:
        assert not joined.image_grids
    else:
        for found, one in zip(joined.pixel_values.split([one.num_patches for one in ordered]), ordered, strict=True):
            assert one.pixel_values is None or torch.equal(found, one.pixel_values)


def numbered(microbatch: Microbatch, number: int) -> Microbatch:
    """Contents by which it is known again; joining must keep the given order of equal lengths."""
    pixels = torch.full((microbatch.num_patches, 2), float(number)) if microbatch.image_grids else None
    ids, positions = microbatch.token_ids + number, microbatch.positions + number
    return replace(microbatch, token_ids=ids, positions=positions, pixel_values=pixels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalised_bytes_are_those_of_numpy(dtype, monkeypatch) -> None:
    """In rounds of any size; a row of patches has each channel's values together."""
    monkeypatch.setattr("mm.batch._ROWS_AT_A_TIME", 3)
    rule = Normalisation(255.0, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    patches = torch.arange(3 * 256, dtype=torch.uint8).view(3, 256).repeat(7, 1, 1).flatten(1)
    mean, std = (np.array(one, dtype=np.float32)[:, None] for one in (rule.mean, rule.std))
    row = (np.arange(256, dtype=np.float32) / np.float32(255) - mean) / std
    expected = torch.from_numpy(row).flatten().repeat(7, 1).to(dtype)
    assert torch.equal(normalised(patches, rule.constants(), dtype), expected)


@given(st.lists(st.sampled_from((None, False, True)), max_size=12), st.integers(1, 5))
def test_neighbours_with_images_pass_the_vit_together(skip_vision: list[bool | None], size: int) -> None:
    """Every microbatch with images is in one batch, with all others of its ``size`` neighbours that do as it does."""
    batches = encoder_batches(skip_vision, size)
    of_number = {number: batch for batch in batches for number in batch}
    assert sorted(of_number) == [number for number, skips in enumerate(skip_vision) if skips is not None]
    assert sum(map(len, batches)) == len(of_number)
    for one, of_one in of_number.items():
        assert list(of_one) == sorted(of_one)
        for other in of_number:
            are_alike = one // size == other // size and skip_vision[one] == skip_vision[other]
            assert (other in of_one) == are_alike
