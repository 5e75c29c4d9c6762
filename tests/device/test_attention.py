"""Every kernel against dense masked attention, forward and gradients; parts of the keys joined are all keys."""

import functools
import inspect
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention.varlen import varlen_attn

from mm.device import attention, npu
from mm.device.attention import PLAIN, Pairs, PartialAttention, Segments
from mm.device.cpu import cpu_attention
from mm.device.cuda import cuda_attention
from mm.device.npu import npu_attention
from mm.model.qwen2_5_vl.positions import plan_vision
from tests.device.marks import on_cuda
from tests.devices import kernels_of

fast = settings(max_examples=40, deadline=None)
some_lengths = st.lists(st.integers(0, 9), max_size=8)
heads = st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (4, 1)])


def inputs(num_tokens, num_heads, num_kv_heads, head_dim=8, device="cpu", dtype=torch.float32):
    """q, k, v as strided slices of one fused projection, as in the model."""
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device, dtype=dtype)
    return [part.requires_grad_() for part in fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)]


def segments_of(lengths, device="cpu"):
    return Segments.build(lengths, lambda tensor: tensor.to(device))


def reference(q, k, v, lengths, causal):
    """Dense attention with a block-diagonal mask."""
    _, num_heads, head_dim = q.shape
    owner = torch.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(q.device)
    seen = owner[:, None] == owner[None, :]
    if causal:
        seen = seen.tril()
    group = num_heads // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float().repeat_interleave(group, 1)) / head_dim**0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.float().repeat_interleave(group, 1))


def assert_equals_reference(kernel, lengths, num_heads=4, num_kv_heads=2, causal=False, atol=2e-6, **kwargs):
    parts = inputs(sum(lengths), num_heads, num_kv_heads, **kwargs)
    segments = segments_of(lengths, parts[0].device)
    out, expected = kernel(*parts, segments, causal), reference(*parts, lengths=lengths, causal=causal)
    assert out.shape == expected.shape and out.dtype == parts[0].dtype
    torch.testing.assert_close(out.float(), expected, atol=atol, rtol=atol)
    upstream = torch.randn_like(expected)
    ours = torch.autograd.grad(out, parts, upstream.to(out.dtype))
    for mine, theirs in zip(ours, torch.autograd.grad(expected, parts, upstream), strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), atol=4 * atol, rtol=4 * atol)


def window_lengths(*images):
    return plan_vision(images, 14, 2, 112).window_lengths


# Segments


def test_segments():
    segments = segments_of([3, 3, 0, 3, 5, 2, 2])
    assert segments.lengths == (3, 3, 3, 5, 2, 2)
    assert segments.equal_runs == ((3, 3), (5, 1), (2, 2))
    assert segments.cu_seqlens.tolist() == [0, 3, 6, 9, 14, 16, 18]
    assert segments.cu_seqlens.dtype == torch.int32
    assert segments.max_length == 5


def test_no_segments():
    segments = segments_of([])
    assert (segments.lengths, segments.equal_runs, segments.max_length) == ((), (), 0)
    assert segments.cu_seqlens.tolist() == [0]


@pytest.mark.parametrize(("lengths", "max_segments", "expected"), [
    ([100], None, True), ([50, 50], None, True), ([50, 60], None, False), ([64] * 1000 + [16], None, False),
    ([64] * 1000 + [16], 1024, False), ([64] * 1024 + [16], 1024, True), ([64, 16] * 513, 1024, False),
    ([64] * 2000, 1024, True), ([], None, True),
])  # fmt: skip
def test_the_way_with_fewer_calls_is_preferred(lengths, max_segments, expected):
    assert segments_of(lengths).prefers_batches(max_segments) is expected


ONE_SIZE, MIXED = ((1, 32, 32), (1, 16, 48)), ((1, 30, 26), (1, 16, 16), (1, 22, 34))
"""Grids whose windows are all of one size, and of several."""


# CPU


@fast
@given(lengths=some_lengths, heads=heads, causal=st.booleans())
def test_cpu(lengths, heads, causal):
    assert_equals_reference(cpu_attention, lengths, *heads, causal=causal)


@pytest.mark.parametrize("kernel", [cpu_attention, cuda_attention, npu_attention])
def test_an_empty_row_keeps_all_three_in_the_graph(kernel, torch_npu):
    parts = inputs(0, 4, 2)
    out = kernel(*parts, segments_of([]), True)
    assert out.shape == (0, 4, 8)
    assert [gradient.shape for gradient in torch.autograd.grad(out.sum(), parts)] == [part.shape for part in parts]


# CUDA


def varlen_attn_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """The signature of torch 2.11 over the reference."""
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.shape[1] == key.shape[1] == value.shape[1]
    return _varlen_reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def varlen_attn_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None
):  # fmt: skip
    """The signature of torch 2.12 and 2.13 over the reference."""
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert enable_gqa or query.shape[1] == key.shape[1]
    return _varlen_reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def _varlen_reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size):
    lengths = cu_seq_q.diff().tolist()
    assert cu_seq_q.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == max(lengths)
    assert scale == query.shape[-1] ** -0.5
    causal = {(-1, -1): False, (-1, 0): True}[window_size]
    return reference(query, key, value, lengths, causal).to(query.dtype)


@pytest.mark.parametrize("release", [varlen_attn_2_11, varlen_attn_2_13])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_cuda_speaks_to_varlen_attn_of_each_torch_release(monkeypatch, release, causal, num_kv_heads):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", release)
    kwargs = {"dtype": torch.bfloat16, "atol": 2e-2}
    assert_equals_reference(cuda_attention, [5, 3, 0, 7], 4, num_kv_heads, causal, **kwargs)


def test_the_installed_varlen_attn_takes_what_is_passed():
    """So that the two signatures above do not drift away from torch's."""
    installed = inspect.signature(varlen_attn)
    installed.bind(*range(7), scale=1.0, window_size=(-1, 0))
    assumed = varlen_attn_2_13 if "enable_gqa" in installed.parameters else varlen_attn_2_11
    assert list(installed.parameters)[:7] == list(inspect.signature(assumed).parameters)[:7]


@fast
@given(lengths=some_lengths, heads=heads, causal=st.booleans())
def test_cuda_float32_path(lengths, heads, causal):
    assert_equals_reference(cuda_attention, lengths, *heads, causal=causal)


@pytest.mark.parametrize(("grids", "expected"), [(ONE_SIZE, {"sdpa": 1}), (MIXED, {"varlen_attn": 1})])
def test_cuda_windows_take_one_call(monkeypatch, grids, expected):
    calls = Counter()

    def varlen(*args, **kwargs):
        calls["varlen_attn"] += 1
        return varlen_attn_2_13(*args, **kwargs)

    def sdpa(*args, **kwargs):
        calls["sdpa"] += 1
        return scaled_dot_product_attention(*args, **kwargs)

    scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", sdpa)
    assert_equals_reference(cuda_attention, window_lengths(*grids), 2, 2, dtype=torch.bfloat16, atol=2e-2)
    assert calls == expected


@on_cuda
@pytest.mark.parametrize("lengths", [
    [300], [17, 200, 33, 64], list(window_lengths((1, 30, 26), (1, 16, 16))), [],
], ids=["one sequence", "packed", "windows", "empty"])  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float32, 2e-5)])
def test_cuda(lengths, causal, heads, dtype, atol):
    for head_dim in (80, 128):
        assert_equals_reference(
            cuda_attention, lengths, *heads, causal=causal, atol=atol, head_dim=head_dim, dtype=dtype, device="cuda"
        )


# NPU, against the stand-in


@fast
@given(lengths=some_lengths, heads=heads, causal=st.booleans())
def test_npu(torch_npu, lengths, heads, causal):
    assert_equals_reference(npu_attention, lengths, *heads, causal=causal)


def record_calls(monkeypatch, torch_npu):
    """Names of the layouts and numbers of segments of each call that follows."""
    calls, operator = [], torch_npu.npu_fusion_attention

    @functools.wraps(operator)
    def recorded(query, key, value, head_num, input_layout, **kwargs):
        calls.append((input_layout, len(kwargs.get("actual_seq_qlen", query))))
        return operator(query, key, value, head_num, input_layout, **kwargs)

    monkeypatch.setattr(torch_npu, "npu_fusion_attention", recorded)
    return calls


@pytest.mark.parametrize("causal", [False, True])
def test_npu_more_segments_than_one_call_takes(monkeypatch, torch_npu, causal):
    calls = record_calls(monkeypatch, torch_npu)
    lengths = [1 + i % 2 for i in range(1500)]
    assert_equals_reference(npu_attention, lengths, 2, 1, causal)
    assert calls == [("TND", 1024), ("TND", 476)]


@pytest.mark.parametrize(("lengths", "expected"), [
    (window_lengths(*ONE_SIZE), [("BSND", 28)]), (window_lengths(*MIXED), [("TND", 35)]),
    ([2] * 1000 + [1] * 24, [("TND", 1024)]), ([2] * 1100 + [1] * 30, [("BSND", 1100), ("BSND", 30)]),
    ([3, 2] * 2 + [1] * 1100, [("TND", 1024), ("TND", 80)]),
])  # fmt: skip
def test_npu_windows_take_as_few_calls_as_possible(monkeypatch, torch_npu, lengths, expected):
    calls = record_calls(monkeypatch, torch_npu)
    assert_equals_reference(npu_attention, lengths, 2, 2)
    assert calls == expected


def test_npu_one_causal_sequence_longer_than_the_mask(torch_npu):
    assert_equals_reference(npu_attention, [2100], 1, 1, causal=True)


# Attention to a part of the keys

CUDA, NPU = (kernels_of(name).partial_attention for name in ("cuda", "npu"))

TOLERANCE = 2e-6
"""Measured 8e-7 over 300 drawn cases in fp32, relative to the largest element of the tensor."""
lengths = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=4)


def pairs_of(drawn: list[tuple[int, int]], causal: bool, device: str = "cpu") -> Pairs:
    """Segments of so many queries and keys; as many of both where attention is causal."""
    queries, keys = zip(*((one, one) if causal else (one, other) for one, other in drawn), strict=True)
    return Pairs(*(Segments.build(part, lambda tensor: tensor.to(device)) for part in (queries, keys)), causal=causal)


def dense(q, k, v, pairs: Pairs):
    """Output and logarithms of sums of exponentials, by one masked product in fp64."""
    q, k, v = (one.double() for one in (q, k, v))
    owners = [torch.repeat_interleave(torch.tensor(one.lengths)) for one in (pairs.queries, pairs.keys)]
    seen = owners[0][:, None] == owners[1][None, :]
    seen = seen.tril() if pairs.causal else seen
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for one in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~seen[:, None].to(q.device), -torch.inf)
    return torch.einsum("qhk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= tolerance * max(1.0, expected.abs().max())


def assert_is_part(form: PartialAttention, pairs: Pairs, num_heads, seed, tolerance=TOLERANCE, device="cpu",
                   dtype=torch.float32) -> None:
    """One part against the dense form; the gradients with output and logarithms of more keys than these.

    The other keys' share of the exponentials is drawn: e^(logarithm of all) is more than that of these.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    num_queries, num_keys = sum(pairs.queries.lengths), sum(pairs.keys.lengths)
    q, k, v = (drawn(rows, count, 8) for rows, count in zip((num_queries, num_keys, num_keys),
                                                            (num_heads[0], num_heads[1], num_heads[1]), strict=True))
    out, logarithms = form.forward(q, k, v, pairs)
    expected_out, expected_logarithms = dense(q, k, v, pairs)
    assert_close(out, expected_out, tolerance)
    assert_close(logarithms, expected_logarithms, tolerance)

    others, others_out = drawn(*logarithms.shape).double(), drawn(*out.shape).double()
    exact = [one.double().requires_grad_() for one in (q, k, v)]
    part_out, part_logarithms = dense(*exact, pairs=pairs)
    all_logarithms = torch.logaddexp(part_logarithms, others)
    share = (part_logarithms - all_logarithms).exp().unsqueeze(-1)
    all_out = part_out * share + others_out * (1 - share)
    upstream = drawn(*out.shape)
    expected = torch.autograd.grad(all_out, exact, upstream.double())
    whole = all_out.detach().to(dtype), all_logarithms.detach().float()
    for mine, theirs in zip(form.backward(upstream, q, k, v, whole, pairs), expected, strict=True):
        assert_close(mine, theirs, tolerance)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=lengths, causal=st.booleans(), num_heads=heads, seed=st.integers(0, 99), npu=st.booleans())
def test_parts_of_attention(drawn, causal, num_heads, seed, npu, torch_npu) -> None:
    assert_is_part(NPU if npu else PLAIN, pairs_of(drawn, causal), num_heads, seed)


def test_long_segments_are_done_some_queries_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(attention, "MAX_SCORE_ROWS", 3)
    for causal in (False, True):
        assert_is_part(PLAIN, pairs_of([(7, 5), (4, 6)], causal), (4, 2), seed=0)


def test_an_npu_takes_so_many_segments_in_a_call(monkeypatch, torch_npu) -> None:
    monkeypatch.setattr(npu, "MAX_SEGMENTS", 2)
    assert_is_part(NPU, pairs_of([(3, 5), (4, 2), (1, 6)], causal=False), (4, 2), seed=0)


def test_the_operators_of_cuda_take_what_is_given() -> None:
    """Without values, by torch's own description of its operators."""
    pairs = pairs_of([(3, 5), (4, 2)], causal=False, device="meta")
    q, k = torch.empty(7, 4, 8, device="meta", dtype=torch.bfloat16), torch.empty(7, 2, 8, device="meta").bfloat16()
    out, logarithms = CUDA.forward(q, k, k, pairs)
    assert (out.shape, logarithms.shape) == (q.shape, (7, 4))
    gradients = CUDA.backward(out, q, k, k, (out, logarithms), pairs)
    assert [one.shape for one in gradients] == [q.shape, k.shape, k.shape]


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_attention_on_cuda(causal, dtype) -> None:
    pairs = pairs_of([(70, 50), (4, 260)], causal, "cuda")
    assert_is_part(CUDA, pairs, (4, 2), 0, 1e-5 if dtype == torch.float32 else 2e-2, "cuda", dtype)
