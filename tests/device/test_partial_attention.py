"""Attention to a part of the keys: joined over all parts it is attention to all keys, forward and backward."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm.device import attention, npu
from mm.device.attention import PLAIN, Pairs, PartialAttention, Segments
from tests.devices import kernels_of

CUDA, NPU = (kernels_of(name).partial_attention for name in ("cuda", "npu"))

TOLERANCE = 2e-6
"""Measured 8e-7 over 300 drawn cases in fp32, relative to the largest element of the tensor."""
lengths = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=4)
heads = st.sampled_from([(1, 1), (4, 2), (6, 2), (4, 1)])


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


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device here, and its kernels run on no other; see their shapes above"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_attention_on_cuda(causal, dtype) -> None:
    pairs = pairs_of([(70, 50), (4, 260)], causal, "cuda")
    assert_is_part(CUDA, pairs, (4, 2), 0, 1e-5 if dtype == torch.float32 else 2e-2, "cuda", dtype)
