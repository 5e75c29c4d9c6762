"""Attention to a part of the keys, for ring attention: one pair of functions per kind of device.

``forward`` returns the output as if there were no other keys, and each query's log-sum-exp, by which the outputs of
several parts are combined.  ``backward`` takes the combined output and log-sum-exp, and returns the gradients of this
part.  Tensors are as in ``mm.device.attention``; queries and keys have segments of their own,
pair by pair, and ``causal`` is for pairs of equal lengths.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mm.device.attention import NPU_MAX_SEGMENTS, Segments, npu_causal_mask, torch_npu

Part = tuple[Tensor, Tensor]
"""Output [num_queries, num_heads, head_dim] in the dtype of q, and logarithms, fp32 [num_queries, num_heads]."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of q, k and v."""

MAX_SCORE_ROWS = 1024
"""Queries of a segment whose scores are computed at once without a fused kernel."""


@dataclass(frozen=True)
class Pairs:
    """Segments of queries, each with its segment of keys."""

    queries: Segments
    keys: Segments
    causal: bool


@dataclass(frozen=True)
class PartialAttention:
    """The two functions of a device."""

    forward: Callable[[Tensor, Tensor, Tensor, Pairs], Part]
    """(q, k, v, pairs)"""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Part, Pairs], Gradients]
    """(gradient of the output, q, k, v, whole output and logarithms, pairs)"""


# Without a fused kernel: CPU, and CUDA in fp32


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> Part:
    outputs, logarithms = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for rows, keys, hidden in _blocks(pairs, q.device):
        scores = _scores(q[rows], k[keys], hidden)
        log = scores.logsumexp(-1)
        out = (scores - log.unsqueeze(-1)).exp() @ _by_head(v[keys], 1)
        outputs[rows], logarithms[rows] = _by_row(out).to(q.dtype), _by_row(log.unsqueeze(-1)).squeeze(-1)
    return outputs, logarithms


def _plain_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, pairs: Pairs) -> Gradients:
    out, logarithms = whole
    group = q.shape[1] // k.shape[1]
    q_gradient = torch.empty_like(q)
    k_gradient, v_gradient = (torch.zeros_like(one, dtype=torch.float32) for one in (k, v))
    for rows, keys, hidden in _blocks(pairs, q.device):
        upstream = _by_head(gradient[rows], group)
        log = _by_head(logarithms[rows].unsqueeze(-1), group)
        probabilities = (_scores(q[rows], k[keys], hidden) - log).exp()
        inner = (upstream * _by_head(out[rows], group)).sum(-1, keepdim=True)
        of_scores = probabilities * (upstream @ _by_head(v[keys], 1).transpose(-1, -2) - inner) * q.shape[-1] ** -0.5
        q_gradient[rows] = _by_row(of_scores @ _by_head(k[keys], 1)).to(q.dtype)
        k_gradient[keys] += (of_scores.transpose(-1, -2) @ _by_head(q[rows], group)).sum(1).transpose(0, 1)
        v_gradient[keys] += (probabilities.transpose(-1, -2) @ upstream).sum(1).transpose(0, 1)
    return q_gradient, k_gradient.to(k.dtype), v_gradient.to(v.dtype)


def _blocks(pairs: Pairs, device: torch.device) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Rows of queries, rows of keys, and which of these pairs are hidden; some queries at a time."""
    starts = zip((0, *accumulate(pairs.queries.lengths)), (0, *accumulate(pairs.keys.lengths)), strict=True)
    for (q_start, k_start), q_len, k_len in zip(starts, pairs.queries.lengths, pairs.keys.lengths, strict=False):
        for first in range(0, q_len, MAX_SCORE_ROWS):
            rows = slice(q_start + first, q_start + min(first + MAX_SCORE_ROWS, q_len))
            hidden = None
            if pairs.causal:
                queries = torch.arange(rows.start - q_start, rows.stop - q_start, device=device)
                hidden = torch.arange(k_len, device=device) > queries.unsqueeze(1)
            yield rows, slice(k_start, k_start + k_len), hidden


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    """fp32 [num_kv_heads, queries per group, num_queries, num_keys]"""
    scores = _by_head(q, q.shape[1] // k.shape[1]) @ _by_head(k, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def _by_head(x: Tensor, group: int) -> Tensor:
    """[rows, heads, dim] -> fp32 [heads / group, group, rows, dim]"""
    return x.float().unflatten(1, (-1, group)).permute(1, 2, 0, 3)


def _by_row(x: Tensor) -> Tensor:
    """The way back."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


# CUDA


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> Part:
    if q.dtype not in (torch.float16, torch.bfloat16):
        return _plain_forward(q, k, v, pairs)
    starts = pairs.queries.cu_seqlens, pairs.keys.cu_seqlens, pairs.queries.max_length, pairs.keys.max_length
    out, logarithms, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *starts, 0.0, pairs.causal, return_debug_mask=False, scale=q.shape[-1] ** -0.5)
    return out, logarithms.t()


def _cuda_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, pairs: Pairs) -> Gradients:
    if q.dtype not in (torch.float16, torch.bfloat16):
        return _plain_backward(gradient, q, k, v, whole, pairs)
    starts = pairs.queries.cu_seqlens, pairs.keys.cu_seqlens, pairs.queries.max_length, pairs.keys.max_length
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is not
    return torch.ops.aten._flash_attention_backward(
        gradient.contiguous(), q, k, v, whole[0], whole[1].t().contiguous(), *starts, 0.0, pairs.causal, random,
        random, scale=q.shape[-1] ** -0.5)


# Ascend


def _npu_forward(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> Part:
    outputs, logarithms = [], []
    for rows, keys, lengths in _npu_calls(pairs):
        out, row_max, total, *_ = torch_npu().npu_fusion_attention(
            q[rows], k[keys], v[keys], q.shape[1], "TND", scale=q.shape[-1] ** -0.5, **lengths,
            **_npu_masking(q.device, pairs.causal))
        outputs.append(out)
        logarithms.append(row_max[..., 0] + total[..., 0].log())  # the operator repeats each number eight times
    return torch.cat(outputs), torch.cat(logarithms)


def _npu_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, pairs: Pairs) -> Gradients:
    found = []
    for rows, keys, lengths in _npu_calls(pairs):
        row_max = whole[1][rows].unsqueeze(-1).repeat(1, 1, 8)
        found.append(torch_npu().npu_fusion_attention_grad(
            q[rows], k[keys], v[keys], gradient[rows].contiguous(), q.shape[1], "TND", softmax_max=row_max,
            softmax_sum=torch.ones_like(row_max), attention_in=whole[0][rows], scale_value=q.shape[-1] ** -0.5,
            **lengths, **_npu_masking(q.device, pairs.causal))[:3])
    q_gradients, k_gradients, v_gradients = zip(*found, strict=True)
    return torch.cat(q_gradients), torch.cat(k_gradients), torch.cat(v_gradients)


def _npu_calls(pairs: Pairs) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """Rows of queries and of keys of each call, which takes so many lengths only."""
    q_start = k_start = 0
    for first in range(0, len(pairs.queries.lengths), NPU_MAX_SEGMENTS):
        chunk = slice(first, first + NPU_MAX_SEGMENTS)
        q_ends, k_ends = (list(accumulate(one.lengths[chunk])) for one in (pairs.queries, pairs.keys))
        lengths = {"actual_seq_qlen": q_ends, "actual_seq_kvlen": k_ends}
        yield slice(q_start, q_start + q_ends[-1]), slice(k_start, k_start + k_ends[-1]), lengths
        q_start, k_start = q_start + q_ends[-1], k_start + k_ends[-1]


def _npu_masking(device: torch.device, causal: bool) -> dict[str, Any]:
    return {"atten_mask": npu_causal_mask(device), "sparse_mode": 3} if causal else {}


PLAIN = PartialAttention(_plain_forward, _plain_backward)
CUDA = PartialAttention(_cuda_forward, _cuda_backward)
NPU = PartialAttention(_npu_forward, _npu_backward)
