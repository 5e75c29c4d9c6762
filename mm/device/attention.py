"""Attention over packed segments: the interface of the devices' kernels, and functions that several of them share.

Pure functions on packed tensors: queries [num_tokens, num_heads, head_dim], keys and values [num_tokens,
num_kv_heads, head_dim], segments one after another, every token attending only within its own segment.  The softmax
scale is 1 / sqrt(head_dim).  A device's kernel is in its own file.

A fused kernel can be called in two ways.  *By stretch*: consecutive segments of equal length are viewed as a batch, one
call per stretch; no copy, no mask, no lengths on the device.  *Variable length*: one call over all segments.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """Lengths of packed segments, on host and device; built once per microbatch, so no layer waits for the device."""

    lengths: tuple[int, ...]
    """Tokens of each segment; none is empty."""
    stretches: tuple[tuple[int, int], ...]
    """(length, number of consecutive segments of this length)."""
    cu_seqlens: Tensor
    """int32 [num_segments + 1] on the device: where each segment begins, and the end."""
    max_length: int
    """0 without segments."""

    @classmethod
    def build(cls, lengths: Iterable[int], copy: Callable[[Tensor], Tensor]) -> "Segments":
        """Describe segments of ``lengths`` tokens, without the empty ones.

        ``copy`` copies a host tensor to the device (``Device.copy``).
        """
        kept = tuple(length for length in lengths if length)
        starts = torch.tensor((0, *itertools.accumulate(kept)), dtype=torch.int32)
        return cls(
            lengths=kept, stretches=tuple((length, len(list(group))) for length, group in itertools.groupby(kept)),
            cu_seqlens=copy(starts), max_length=max(kept, default=0))

    def prefers_stretches(self, max_segments: int | None = None) -> bool:
        """Whether to call by stretch, if a variable-length call takes up to ``max_segments`` (None: any number).

        The way with fewer launches wins; of one stretch the batch, because it needs no lengths.  Windows of mixed sizes
        have up to nine stretches, so they take one variable-length call.
        """
        num_calls = 1 if max_segments is None else -(-len(self.lengths) // max_segments)
        return len(self.stretches) <= num_calls


Kernel = Callable[[Tensor, Tensor, Tensor, Segments, bool], Tensor]
"""``kernel(q, k, v, segments, causal)``: [num_tokens, num_heads, head_dim], in the dtype of q.  k and v may have fewer
heads, a divisor of q's (grouped queries)."""


def by_stretch(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Call ``attend`` on each stretch as a batch [count, length, heads, head_dim], and join the results."""
    check_cover(q, segments)
    if not segments.stretches:
        return q + (k.sum() + v.sum())  # empty, yet all three stay in the graph
    sizes = [length * count for length, count in segments.stretches]
    outputs = []
    for (length, count), of_stretch in zip(segments.stretches, pieces(sizes, q, k, v), strict=True):
        outputs.append(attend(*(one.unflatten(0, (count, length)) for one in of_stretch)).flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def pieces(sizes: list[int], *tensors: Tensor) -> Iterable[Sequence[Tensor]]:
    """The tensors' rows in pieces of ``sizes``.

    A split's backward joins the gradients once; slices would pad each.  Even a split into one copies the gradients.
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
