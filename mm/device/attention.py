"""Attention over packed segments, one kernel per kind of device.

Pure functions on packed tensors: queries [num_tokens, num_heads, head_dim], keys and values [num_tokens,
num_kv_heads, head_dim], segments one after another, every token attending only within its own segment.  The softmax
scale is 1 / sqrt(head_dim).  ``kernels.py`` picks the kernel of a device.

Two ways of calling a fused kernel recur.  *By stretch*: segments of equal length that lie together are viewed as a
batch, one call per stretch; no copy, no mask, no lengths on the device.  *Variable length*: one call over all segments.
"""

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NPU_MAX_SEGMENTS = 1024
"""Longest list of lengths that ``npu_fusion_attention`` takes in one variable-length call (its documentation)."""

NPU_CAUSAL_MASK_SIDE = 2048
"""Side of the compressed mask that its ``sparse_mode`` 3 wants, whatever the lengths (its documentation)."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Lengths of packed segments, on host and device; built once per microbatch, so no layer waits for the device."""

    lengths: tuple[int, ...]
    """Tokens of each segment; none is empty."""
    stretches: tuple[tuple[int, int], ...]
    """(length, how many segments of it in a row)."""
    cu_seqlens: Tensor
    """int32 [num_segments + 1] on the device: where each segment begins, and the end."""
    max_length: int
    """0 without segments."""

    @classmethod
    def build(cls, lengths: Iterable[int], copy: Callable[[Tensor], Tensor]) -> "Segments":
        """Describe segments of ``lengths`` tokens; empty ones hold no token and are left out.

        ``copy`` takes a host tensor to the device (``Device.copy``).
        """
        kept = tuple(length for length in lengths if length)
        starts = torch.tensor((0, *itertools.accumulate(kept)), dtype=torch.int32)
        return cls(
            lengths=kept,
            stretches=tuple((length, len(list(group))) for length, group in itertools.groupby(kept)),
            cu_seqlens=copy(starts),
            max_length=max(kept, default=0),
        )

    def prefers_stretches(self, max_segments: int | None = None) -> bool:
        """Whether to call by stretch where a variable-length call takes up to ``max_segments`` (None: any number).

        The way with fewer calls wins.  A single stretch (one sequence, equal lengths) is one call either way: then the
        batch wins, which needs no lengths.  Windows of mixed sizes have up to nine stretches, hence nine launches a
        layer, so they take one variable-length call.  This reasons by launches; a measurement may change the rule here.
        """
        num_calls = 1 if max_segments is None else -(-len(self.lengths) // max_segments)
        return len(self.stretches) <= num_calls


Kernel = Callable[[Tensor, Tensor, Tensor, Segments, bool], Tensor]
"""``kernel(q, k, v, segments, causal)``: [num_tokens, num_heads, head_dim], in the dtype of q.  k and v may have fewer
heads, a divisor of q's (grouped queries)."""


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
    """A ``Kernel``: torch's SDPA by stretch."""
    return _by_stretch(q, k, v, segments, functools.partial(_sdpa, causal=causal))


def cuda_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
    """A ``Kernel``.  float16 and bfloat16: SDPA by stretch where the segments prefer it, else one call of torch's
    ``varlen_attn``.  Other dtypes, which ``varlen_attn`` does not take: SDPA by stretch, keys and values repeated for
    grouped queries (of SDPA's kernels only the quadratic one takes fewer of them in float32)."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return _by_stretch(q, *_repeat_heads(q, k, v), segments, functools.partial(_sdpa, causal=causal))
    if segments.prefers_stretches():
        return _by_stretch(q, k, v, segments, functools.partial(_sdpa, causal=causal))
    return _cuda_varlen(q, k, v, segments, causal)


def npu_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
    """A ``Kernel``: ``torch_npu.npu_fusion_attention``, layout BSND by stretch where full attention's segments prefer
    it (a batch escapes the limit on lists of lengths), TND otherwise."""
    if not segments.lengths or (segments.prefers_stretches(NPU_MAX_SEGMENTS) and not causal):
        return _by_stretch(q, k, v, segments, _npu_full)
    return _npu_varlen(q, k, v, segments, causal)


def _by_stretch(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Call ``attend`` on each stretch as a batch [count, length, heads, head_dim] and join what it returns."""
    _check_cover(q, segments)
    if not segments.stretches:
        return q + (k.sum() + v.sum())  # empty, yet all three stay in the graph
    sizes = [length * count for length, count in segments.stretches]
    outputs = []
    for (length, count), parts in zip(segments.stretches, _pieces(sizes, q, k, v), strict=True):
        outputs.append(attend(*(part.unflatten(0, (count, length)) for part in parts)).flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _pieces(sizes: list[int], *tensors: Tensor) -> Iterable[Sequence[Tensor]]:
    """The tensors' rows in pieces of ``sizes``.

    By split, not slices: its backward joins the gradients once instead of padding each to the whole row.  One piece is
    the tensors themselves: a split into one would copy the gradients.
    """
    return [tensors] if len(sizes) == 1 else zip(*(tensor.split(sizes) for tensor in tensors), strict=True)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def _cuda_varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    _check_cover(q, segments)
    options: dict[str, Any] = {"scale": q.shape[-1] ** -0.5, "window_size": (-1, 0) if causal else (-1, -1)}
    if q.shape[1] != k.shape[1]:
        if _takes_grouped_queries(varlen_attn):
            options["enable_gqa"] = True
        else:  # torch 2.11
            k, v = _repeat_heads(q, k, v)
    starts, longest = segments.cu_seqlens, segments.max_length
    out: Any = varlen_attn(q, k, v, starts, starts, longest, longest, **options)  # a pair only with return_aux
    return out


@functools.cache
def _takes_grouped_queries(varlen_attn: Callable) -> bool:
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def torch_npu() -> Any:
    """Ascend's package, which has no types and is there only beside an NPU."""
    return importlib.import_module("torch_npu")


def _npu_full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch_npu().npu_fusion_attention(q, k, v, q.shape[2], "BSND", scale=q.shape[-1] ** -0.5)[0]


def _npu_varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
    _check_cover(q, segments)
    # without a mask the operator ignores sparse_mode and attends to everything
    masking = {"atten_mask": npu_causal_mask(q.device), "sparse_mode": 3} if causal else {}
    starts = range(0, len(segments.lengths), NPU_MAX_SEGMENTS)
    chunks = [segments.lengths[start : start + NPU_MAX_SEGMENTS] for start in starts]
    sizes = [sum(chunk) for chunk in chunks]
    outputs = []
    for chunk, parts in zip(chunks, _pieces(sizes, q, k, v), strict=True):
        ends = list(itertools.accumulate(chunk))
        outputs.append(
            torch_npu().npu_fusion_attention(
                *parts,
                q.shape[1],
                "TND",
                scale=q.shape[-1] ** -0.5,
                actual_seq_qlen=ends,
                actual_seq_kvlen=ends,
                **masking,
            )[0]
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@functools.cache
def npu_causal_mask(device: torch.device) -> Tensor:
    """The compressed mask of ``sparse_mode`` 3: True where a key is hidden.  4 MiB, the same for every call."""
    side = NPU_CAUSAL_MASK_SIDE
    return torch.ones(side, side, dtype=torch.bool, device=device).triu(1)


def _repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Give each query head its own copy of the keys and values that its group shares."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def _check_cover(q: Tensor, segments: Segments) -> None:
    if sum(segments.lengths) != q.shape[0]:
        raise ValueError(f"segments hold {sum(segments.lengths)} tokens, but the queries are {q.shape[0]}")
