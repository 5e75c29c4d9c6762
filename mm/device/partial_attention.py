"""Attention to a part of the keys, for ring attention: its interface, and the form without a fused kernel.

``forward`` returns the output as if there were no other keys, and each query's log-sum-exp, with which the outputs of
several parts are combined.  ``backward`` takes the combined output and log-sum-exp, and returns the gradients of this
part.  Tensors are as in ``mm.device.attention``; queries and keys have segments of their own, pair by pair, and
``causal`` is for pairs of equal lengths.  Forms with a fused kernel are in the files of their devices.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mm.device.attention import Segments

PartialOutput = tuple[Tensor, Tensor]
"""Output [num_queries, num_heads, head_dim] in the dtype of q, and logarithms, fp32 [num_queries, num_heads]."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of q, k and v."""

MAX_SCORE_ROWS = 1024
"""Queries of a segment whose scores are computed together without a fused kernel."""


@dataclass(frozen=True)
class Pairs:
    """Segments of queries, each with its segment of keys."""

    queries: Segments
    keys: Segments
    causal: bool


@dataclass(frozen=True)
class PartialAttention:
    """Both directions of one device's form."""

    forward: Callable[[Tensor, Tensor, Tensor, Pairs], PartialOutput]
    """(q, k, v, pairs)"""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, PartialOutput, Pairs], Gradients]
    """(gradient of the output, q, k, v, whole output and logarithms, pairs)"""


# Without a fused kernel: CPU, and CUDA in fp32


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> PartialOutput:
    outputs, logarithms = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for rows, keys, hidden in _blocks(pairs, q.device):
        scores = _scores(q[rows], k[keys], hidden)
        log = scores.logsumexp(-1)
        out = (scores - log.unsqueeze(-1)).exp() @ _by_head(v[keys], 1)
        outputs[rows], logarithms[rows] = _by_row(out).to(q.dtype), _by_row(log.unsqueeze(-1)).squeeze(-1)
    return outputs, logarithms


def _plain_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: PartialOutput, pairs: Pairs) -> Gradients:
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
    """Rows of queries, rows of keys, and a mask of hidden pairs, for at most ``MAX_SCORE_ROWS`` queries at a time."""
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
    """The inverse of ``_by_head``."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


PLAIN = PartialAttention(_plain_forward, _plain_backward)
