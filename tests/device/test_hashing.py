"""Rounding at random by a hash: to a neighbour, right on average, and the same for the same arguments."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mm.device.hashing import mixed, rounded_at_random

NUM_SAMPLES = 1 << 16
MEAN_ERROR = 0.01
"""Of the mean of that many roundings, in units of bf16's last place: five standard errors of a fair coin, 0.5 / 256."""


def arguments(seed: int, number: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    return torch.randn(number, generator=torch.Generator().manual_seed(seed)), torch.tensor([float(seed % 1000)])


@given(value=st.floats(2.0**-100, 2.0**100, width=32), is_negative=st.booleans(), seed=st.integers(0, 10_000))
def test_a_number_becomes_a_neighbour_and_stays_on_average(value: float, is_negative: bool, seed: int) -> None:
    exact = torch.tensor(-value if is_negative else value)
    below = (exact.view(torch.int32) >> 16 << 16).view(torch.float32)  # towards zero
    unit = ((below.view(torch.int32) + (1 << 16)).view(torch.float32) - below).double()
    found = rounded_at_random(exact.expand(NUM_SAMPLES).contiguous(), *arguments(seed))
    assert found.dtype == torch.bfloat16
    share_up = float((found.double().mean() - below.double()) / unit)
    assert share_up == pytest.approx(float((exact.double() - below.double()) / unit), abs=MEAN_ERROR)
    assert set(found.tolist()) <= {float(below), float(below.double() + unit)}


def test_what_bf16_can_represent_is_kept() -> None:
    values = torch.cat([torch.randn(1000).bfloat16().float(), torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    found = rounded_at_random(values, *arguments(0, len(values)))
    assert torch.equal(found.float(), values) and found[-3].signbit()
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # the second is CUDA's
    assert rounded_at_random(nans, *arguments(0, 3)).isnan().all()


def test_every_argument_decides() -> None:
    values, (salts, step) = torch.full((NUM_SAMPLES,), 1 + 2.0**-8), arguments(1)
    found = rounded_at_random(values, salts, step)
    assert torch.equal(found, rounded_at_random(values, salts, step))
    for others in ((salts.nextafter(salts + 1), step), (salts, step + 1)):
        share = float((found != rounded_at_random(values, *others)).float().mean())
        assert share == pytest.approx(0.5, abs=0.02)  # two coins


def test_numbers_are_hashed_without_collisions() -> None:
    numbers = torch.arange(1 << 20)
    assert len(mixed(numbers).unique()) == len(numbers)
