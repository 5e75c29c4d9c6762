"""fp32 weights in two halves: to the bit, and with the nearest bf16 number as the first half."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from mm.weights.shard import joined, split

BITS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)
TIE = 0x8000


def halves(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight, remainder = numbers.new_empty(len(numbers), dtype=torch.bfloat16), torch.empty(len(numbers)).short()
    split(numbers, weight, remainder)
    return weight, remainder


@given(BITS)
def test_both_halves_are_the_number_to_the_bit(bits: list[int]) -> None:
    """Whatever the bits, also infinities and numbers near them; NaN becomes infinity in both."""
    numbers = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    expected = torch.where(numbers.isnan(), torch.inf, numbers)
    weight, remainder = halves(numbers)
    assert torch.equal(joined(weight, remainder).view(torch.int32), expected.view(torch.int32))
    assert weight[numbers.isnan()].isinf().all()


@given(BITS)
def test_the_first_half_is_torchs_rounding_but_for_ties(bits: list[int]) -> None:
    numbers = torch.tensor([one for one in bits if one & 0xFFFF != TIE], dtype=torch.int32).view(torch.float32)
    numbers = numbers[~numbers.isnan()]
    assert torch.equal(halves(numbers)[0], numbers.bfloat16())


@given(st.lists(st.integers(-(2**15), 2**15 - 1), max_size=40))
def test_ties_are_rounded_away_from_zero_and_are_as_near(highs: list[int]) -> None:
    numbers = torch.tensor([high << 16 | TIE for high in highs], dtype=torch.int32).view(torch.float32)
    weight = halves(numbers)[0]
    is_finite = weight.isfinite()
    one, other, exact = (some[is_finite].double() for some in (weight, numbers.bfloat16(), numbers))
    assert torch.all(one.abs() > exact.abs()) and torch.equal((one - exact).abs(), (other - exact).abs())


def test_the_example_of_the_module() -> None:
    weight, remainder = halves(torch.tensor([0x3F809000], dtype=torch.int32).view(torch.float32))
    assert (float(weight), int(remainder)) == (1.0078125, -0x7000)


def test_slices_of_a_buffer_are_filled_in_place() -> None:
    buffer, numbers = torch.zeros(12, dtype=torch.bfloat16), torch.randn(5)
    remainder = torch.zeros(5, dtype=torch.int16)
    split(numbers, buffer[3:8], remainder)
    assert torch.equal(joined(buffer[3:8], remainder), numbers)
    assert not buffer[:3].any() and not buffer[8:].any()
