"""Rounding at random by a hash: to a neighbour, right on average, and the same for the same arguments."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mm.cost.by_device import EAGER_ROUNDING_BYTES
from mm.device.pointwise import mixed, rounded_at_random

NUM_SAMPLES = 1 << 16
MEAN_TOLERANCE = 0.01
"""Largest error of the mean of ``NUM_SAMPLES`` roundings, in units of bf16's last place.  The standard error of as many
fair coins is 0.5 / 256; this is five of them."""


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
    assert share_up == pytest.approx(float((exact.double() - below.double()) / unit), abs=MEAN_TOLERANCE)
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


def test_single_operators_move_as_many_bytes_as_the_plan_assumes() -> None:
    """Beside the 10 of one kernel: two fp32 numbers read and a bf16 one written."""
    moved = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if not func.is_view:
                moved.extend(one.nbytes for one in tree_leaves((args, kwargs, out)) if isinstance(one, Tensor))
            return out

    with Counter():
        rounded_at_random(*torch.empty(2, NUM_SAMPLES, device="meta"), step=torch.empty(1, device="meta"))
    assert sum(moved) / NUM_SAMPLES == pytest.approx(EAGER_ROUNDING_BYTES + 10, rel=0.01)
