"""Every kernel against dense masked attention in float32, forward and gradients."""

import functools
import inspect
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.varlen import varlen_attn

from mm.device.attention import Segments
from mm.device.cpu import cpu_attention
from mm.device.cuda import cuda_attention
from mm.device.npu import npu_attention
from mm.model.qwen2_5_vl.arithmetic import plan_vision

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


@pytest.mark.parametrize(
    ("lengths", "max_segments", "expected"),
    [
        ([100], None, True),
        ([50, 50], None, True),
        ([50, 60], None, False),
        ([64] * 1000 + [16], None, False),
        ([64] * 1000 + [16], 1024, False),
        ([64] * 1024 + [16], 1024, True),
        ([64, 16] * 513, 1024, False),
        ([64] * 2000, 1024, True),
        ([], None, True),
    ],
)
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


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
row_kinds = pytest.mark.parametrize(
    "lengths",
    [[300], [17, 200, 33, 64], list(window_lengths((1, 30, 26), (1, 16, 16))), []],
    ids=["one sequence", "packed", "windows", "empty"],
)


@on_cuda
@row_kinds
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


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (window_lengths(*ONE_SIZE), [("BSND", 28)]),
        (window_lengths(*MIXED), [("TND", 35)]),
        ([2] * 1000 + [1] * 24, [("TND", 1024)]),
        ([2] * 1100 + [1] * 30, [("BSND", 1100), ("BSND", 30)]),
        ([3, 2] * 2 + [1] * 1100, [("TND", 1024), ("TND", 80)]),
    ],
)
def test_npu_windows_take_as_few_calls_as_possible(monkeypatch, torch_npu, lengths, expected):
    calls = record_calls(monkeypatch, torch_npu)
    assert_equals_reference(npu_attention, lengths, 2, 2)
    assert calls == expected


def test_npu_one_causal_sequence_longer_than_the_mask(torch_npu):
    assert_equals_reference(npu_attention, [2100], 1, 1, causal=True)
