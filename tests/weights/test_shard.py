"""How shards lie in memory, fp32 weights as two halves, and which rank reads which weight."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.config.model import ModelConfig, read_model
from mm.weights.fuse import fuse, shard
from mm.weights.shard import FFN_MULTIPLE, MemoryLayout, joined, memory_ffn, memory_shape, readers, split
from mm.weights.table import Fusion, Weight, model_weights
from tests.files import EXAMPLES
from tests.weights.test_table import hf_tensors_of, models

LEGAL_TP_SIZES = {"3b": (1, 2), "7b": (1, 2, 4), "32b": (1, 2, 4, 8), "72b": (1, 2, 4, 8)}
CASES = [(size, tp_size) for size, tp_sizes in LEGAL_TP_SIZES.items() for tp_size in tp_sizes]
BF16_BYTES, LOAD_BYTES = 2, 16


def example(size: str) -> ModelConfig:
    return read_model(EXAMPLES / f"model_{size}.json").value


def misaligned(shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Matrices with a row, and layers with an output, that is no multiple of 16 bytes."""
    found = []
    for name, shape in shapes.items():
        outputs, *inputs = shape
        if inputs and math.prod(inputs) * BF16_BYTES % LOAD_BYTES:  # the patch embedding is used as a matrix
            found.append(f"{name} has rows of {shape[1:]}")
        if any(layer in name for layer in ("linear_fc1", "linear_qkv")) and outputs * BF16_BYTES % LOAD_BYTES:
            found.append(f"{name} has {outputs} outputs")
    return found


def test_the_legal_tensor_parallel_sizes():
    for size, tp_sizes in LEGAL_TP_SIZES.items():
        model = example(size)
        heads = (model.vision.num_attention_heads, model.language.num_attention_heads, model.language.num_query_groups,
                 model.language.vocab_size)
        assert tp_sizes == tuple(tp for tp in (1, 2, 4, 8) if not any(number % tp for number in heads)), size


@pytest.mark.parametrize(("size", "tp_size"), CASES)
def test_every_row_loads_16_bytes_at_a_time(size: str, tp_size: int):
    weights = model_weights(example(size))
    assert misaligned({weight.name: memory_shape(weight, tp_size) for weight in weights}) == []


@settings(max_examples=30, deadline=None)
@given(ffn=st.integers(1, 10_000), tp_size=st.sampled_from([1, 2, 4, 8]))
def test_an_ffn_is_padded_as_little_as_possible(ffn: int, tp_size: int):
    padded = memory_ffn(ffn, tp_size)
    assert padded % (tp_size * FFN_MULTIPLE) == 0 and 0 <= padded - ffn < tp_size * FFN_MULTIPLE


def in_memory(weight: Weight, part: torch.Tensor) -> torch.Tensor:
    """``part``, a shard in files, with zeros behind each of gate, up and down."""
    if not weight.pads or weight.tp_dim is None:
        return part
    blocks = []
    for block in part.chunk(2 if weight.fusion is Fusion.GATE_UP else 1, weight.tp_dim):
        missing = list(block.shape)
        missing[weight.tp_dim] = -block.shape[weight.tp_dim] % FFN_MULTIPLE
        blocks += [block, torch.zeros(missing, dtype=part.dtype)]
    return torch.cat(blocks, dim=weight.tp_dim)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), tp_size=st.sampled_from([1, 2, 4]))
def test_a_shard_and_its_ranges_go_to_memory_and_back(data, tp_size):
    model = data.draw(models(tp_size))
    for weight in model_weights(model):
        whole = fuse(weight, hf_tensors_of(weight))
        part = shard(weight, whole, tp_size, data.draw(st.integers(0, tp_size - 1)))
        memory, held = MemoryLayout.of(weight, tp_size), in_memory(weight, part)
        assert memory.shape == memory_shape(weight, tp_size) == tuple(held.shape)
        assert memory.file_shape == tuple(part.shape)
        assert torch.equal(memory.pad_whole(part), held) and torch.equal(memory.unpad_whole(held), part)
        # and any ranges of it, such as the distributed optimizer's
        flat, real = held.reshape(-1), part.reshape(-1)
        cuts = data.draw(st.lists(st.integers(0, len(flat)), max_size=4))
        reached = 0
        for start, stop in pairwise(sorted([0, *cuts, len(flat)])):
            first, last = memory.real_range(start, stop)
            assert first == reached
            assert torch.equal(memory.unpad(flat[start:stop], start), real[first:last])
            assert torch.equal(memory.pad(real[first:last], start, stop), flat[start:stop])
            reached = last
        assert reached == len(real)


def test_values_and_dtypes_are_kept_to_the_bit():
    """Also infinities, NaN and negative zeros; in every precision of a parameter."""
    weight = next(weight for weight in model_weights(example("3b")) if weight.name.endswith("0.mlp.linear_fc1.bias"))
    memory = MemoryLayout.of(weight, 2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        part = torch.randn(memory.file_shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        part[:3] = torch.tensor([math.inf, math.nan, -0.0])
        back = memory.unpad_whole(memory.pad_whole(part))
        assert back.dtype == dtype and torch.equal(back.view(torch.uint8), part.view(torch.uint8))


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


@given(st.lists(st.integers(0, 10**9), max_size=60), st.integers(1, 70))
def test_every_weight_has_one_reader_and_shares_are_even(num_bytes: list[int], num_ranks: int) -> None:
    chosen = readers(num_bytes, num_ranks)
    assert len(chosen) == len(num_bytes) and set(chosen) <= set(range(num_ranks))
    shares = [0] * num_ranks
    for size, rank in zip(num_bytes, chosen, strict=True):
        shares[rank] += size
    assert max(shares) - min(shares) <= max(num_bytes, default=0)


def test_the_largest_weights_go_to_ranks_far_apart() -> None:
    """With four ranks to a host, each of two hosts reads half of the four largest weights."""
    chosen = readers([1, 9, 9, 9, 9, 1, 8, 1], 8)
    assert chosen[1:5] == (0, 4, 2, 6) and sorted(chosen) == [*range(8)]
