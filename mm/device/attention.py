"""Attention over packed segments: the interface of the devices' kernels, and functions that several of them share.

Queries are [num_tokens, num_heads, head_dim], keys and values [num_tokens, num_kv_heads, head_dim], segments one after
another; every token attends only within its own segment.  The softmax scale is 1 / sqrt(head_dim).

A fused kernel can be called in two ways: with consecutive segments of equal length viewed as a batch, one call per run
of equal lengths, without copy, mask or lengths on the device; or with variable lengths, one call over all segments.

Ring attention attends to a part of the keys at a time (``PartialAttention``).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """Lengths of packed segments, on host and device; built once per microbatch, so no layer waits for the device."""

    lengths: tuple[int, ...]
    """Tokens of each segment; none is empty."""
    equal_runs: tuple[tuple[int, int], ...]
    """(length, number of consecutive segments of this length)"""
    cu_seqlens: Tensor
    """int32 [num_segments + 1] on the device: where each segment begins, and the end."""
    max_length: int
    """0 without segments."""

    @classmethod
    def build(cls, lengths: Iterable[int], copy: Callable[[Tensor], Tensor]) -> "Segments":
        """Describe segments of ``lengths`` tokens, without the empty ones.  ``copy``: ``Device.copy``."""
        kept = tuple(length for length in lengths if length)
        starts = torch.tensor((0, *itertools.accumulate(kept)), dtype=torch.int32)
        return cls(
            lengths=kept, equal_runs=tuple((length, len(list(group))) for length, group in itertools.groupby(kept)),
            cu_seqlens=copy(starts), max_length=max(kept, default=0))

    def prefers_batches(self, max_segments: int | None = None) -> bool:
        """Whether ``by_length`` launches at most as many kernels as variable-length calls of up to ``max_segments``
        (None: any number).

        A single run is a batch, which needs no lengths.  Windows of mixed sizes have up to nine runs, so they take one
        variable-length call.
        """
        num_calls = 1 if max_segments is None else -(-len(self.lengths) // max_segments)
        return len(self.equal_runs) <= num_calls


Kernel = Callable[[Tensor, Tensor, Tensor, Segments, bool], Tensor]
"""``kernel(q, k, v, segments, causal)``: [num_tokens, num_heads, head_dim], in the dtype of q.  k and v may have fewer
heads, a divisor of q's (grouped queries)."""


def by_length(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Call ``attend`` on each run of equal lengths as a batch [count, length, heads, head_dim]; join the results."""
    check_cover(q, segments)
    if not segments.equal_runs:
        return q + (k.sum() + v.sum())  # empty, yet all three stay in the graph
    sizes = [length * count for length, count in segments.equal_runs]
    outputs = []
    for (length, count), of_run in zip(segments.equal_runs, pieces(sizes, q, k, v), strict=True):
        outputs.append(attend(*(one.unflatten(0, (count, length)) for one in of_run)).flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def pieces(sizes: list[int], *tensors: Tensor) -> Iterable[Sequence[Tensor]]:
    """Split all tensors into pieces of ``sizes`` rows.

    ``split``, because its backward pass joins the gradients once, where each slice would pad its own; and not if there
    is a single piece, because even that would copy the gradients.
    """
    return [tensors] if len(sizes) == 1 else zip(*(tensor.split(sizes) for tensor in tensors), strict=True)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's attention of a batch [count, length, heads, head_dim]."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def check_cover(q: Tensor, segments: Segments) -> None:
    """Raise ValueError if the segments do not have exactly one token per query."""
    if sum(segments.lengths) != q.shape[0]:
        raise ValueError(f"the segments have {sum(segments.lengths)} tokens, but there are {q.shape[0]} queries")


PartialOutput = tuple[Tensor, Tensor]
"""Output [num_queries, num_heads, head_dim] in the dtype of q, and logarithms, fp32 [num_queries, num_heads]."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of q, k and v."""

MAX_SCORE_ROWS = 1024
"""Queries of a segment whose scores are computed together without a fused kernel."""


@dataclass(frozen=True)
class Pairs:
    """Segments of queries, each with its segment of keys; ``causal`` is for pairs of equal lengths."""

    queries: Segments
    keys: Segments
    causal: bool


@dataclass(frozen=True)
class PartialAttention:
    """One device's attention to a part of the keys."""

    forward: Callable[[Tensor, Tensor, Tensor, Pairs], PartialOutput]
    """(q, k, v, pairs) -> the output as if there were no other keys, and each query's log-sum-exp, with which the
    outputs of several parts are combined."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, PartialOutput, Pairs], Gradients]
    """(gradient of the output, q, k, v, combined output and log-sum-exp, pairs) -> the gradients of this part."""


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
