"""Attention of both towers in every form that could compute it; see benchmarks.kernels."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels.bench import Bench, relative_difference, with_backward
from benchmarks.records import OURS
from mm.device.attention import Segments, by_length, sdpa
from mm.model.qwen2_5_vl.arithmetic import plan_vision
from tests.workload import mixed_samples, num_tokens

LOOP, MASK = "SDPA, segment by segment", "SDPA, one masked call"
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cuDNN": SDPBackend.CUDNN_ATTENTION}  # fmt: skip

MIN_MIXED_TOKENS = 2000
"""Enough for more than one picture."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From packed q, k and v, [rows, heads, head_dim], to the output in the shape of q."""


def attention(bench: Bench) -> None:
    """Segments of equal and of mixed lengths: the LLM's samples, the ViT's windows and its whole pictures."""
    num_samples, tokens = bench.num_samples[-1], num_tokens(bench.sample)
    mixed = mixed_samples(max(num_samples * tokens, MIN_MIXED_TOKENS), seed=0)
    mixed_grids = [grid for grids, _ in mixed for grid in grids]
    equal_grids = list(bench.sample[0]) * num_samples
    language, vision = bench.model.language, bench.model.vision
    causal = {"tower": language, "causal": True}
    compare(bench, "LLM, equal lengths", [tokens] * num_samples, **causal)
    compare(bench, "LLM, mixed lengths", [num_tokens(sample) for sample in mixed], **causal)
    for name, grids in (("one size", equal_grids), ("mixed sizes", mixed_grids)):
        plan = plan_vision(grids, vision.patch_size, vision.spatial_merge_size, vision.window_attn_size)
        full = {"tower": vision, "causal": False}
        compare(bench, f"ViT windows, {name}", plan.window_lengths, has_mask=True, **full)
        compare(bench, f"ViT pictures, {name}", plan.image_lengths, **full)
    windows = plan_vision(equal_grids[:1], vision.patch_size, vision.spatial_merge_size, vision.window_attn_size)
    window_error(bench, windows.window_lengths)


def compare(
    bench: Bench, case: str, lengths: Iterable[int], *, tower: Any, causal: bool, has_mask: bool = False
) -> None:
    """Time every form, forward alone and with the backward pass; TFLOP/s count only pairs that attend."""
    segments = Segments.build(lengths, bench.device.copy)
    rows, heads, dim = sum(segments.lengths), tower.num_attention_heads, tower.head_dim
    q, k, v = (bench.random(rows, count, dim).requires_grad_()
               for count in (heads, tower.num_query_groups, tower.num_query_groups))  # fmt: skip
    gradient = bench.random(rows, heads, dim)
    found = forms(bench, segments, causal, is_grouped=heads != tower.num_query_groups, has_mask=has_mask)
    pairs = sum(n * (n + 1) // 2 if causal else n * n for n in segments.lengths)
    facts = {"shapes": [rows, heads, tower.num_query_groups, dim], "num_segments": len(segments.lengths),
             "num_stretches": len(segments.equal_runs)}  # fmt: skip
    forward = {name: functools.partial(form, q, k, v) for name, form in found.items()}
    ran = {name: operators(form) for name, form in forward.items()}
    parts = {
        "forward": {name: torch.no_grad()(form) for name, form in forward.items()},
        "forward and backward": {name: with_backward(form, [q, k, v], gradient) for name, form in forward.items()},
    }
    for number, (part, works) in enumerate(parts.items()):
        bench.compare("attention", case, works, flops=4 * heads * dim * pairs * (1 + 2 * number), ran=ran,
                      part=part, **facts)  # fmt: skip


def forms(bench: Bench, segments: Segments, causal: bool, is_grouped: bool, has_mask: bool) -> dict[str, Attend]:
    """All forms by name.  "Repeated heads" gives each query head its own copy of keys and values."""
    attend = functools.partial(sdpa, causal=causal)
    one_by_one = dataclasses.replace(segments, equal_runs=tuple((length, 1) for length in segments.lengths))
    stretch = functools.partial(by_length, segments=segments, attend=attend)
    varlen = functools.partial(variable_length, segments=segments, causal=causal)
    found: dict[str, Attend] = {
        LOOP: functools.partial(by_length, segments=one_by_one, attend=attend),  # transformers' ViT does this
        "SDPA by stretch": stretch,
        OURS: lambda q, k, v: bench.device.kernels.attention(q, k, v, segments, causal),
    }
    if has_mask:
        number = torch.repeat_interleave(torch.arange(len(segments.lengths)), torch.tensor(segments.lengths))
        number = number.to(bench.device.torch_device)
        mask = number[:, None] == number
        found[MASK] = functools.partial(masked, mask=mask)
    if bench.device.platform.name != "cpu":
        found["variable length"] = varlen
        found |= {f"SDPA by stretch, {name}": functools.partial(_through, backend, stretch)
                  for name, backend in BACKENDS.items()}  # fmt: skip
    if is_grouped:
        repeated = {f"{name}, repeated heads": functools.partial(_repeated, form)
                    for name, form in found.items() if "by stretch" in name or "variable" in name}  # fmt: skip
        found |= repeated
    return found


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One call over all rows."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask).squeeze(0).transpose(0, 1)


def variable_length(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
    """torch's ``varlen_attn``, with as many key heads as ``k`` has."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": q.shape[-1] ** -0.5, "window_size": (-1, 0) if causal else (-1, -1)}
    if q.shape[1] != k.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True  # torch 2.11 lacks this argument; the error, if any, is recorded
    starts, longest = segments.cu_seqlens, segments.max_length
    out = varlen_attn(q, k, v, starts, starts, longest, longest, **options)
    assert isinstance(out, Tensor), "more than the output comes only on request"
    return out


def _repeated(form: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    return form(q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))


def _through(backend: SDPBackend, form: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return form(q, k, v)


def operators(work: Callable[[], object]) -> list[str]:
    """The names of torch's attention operators that ``work`` calls; empty if it fails."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
        try:
            work()
        except Exception:  # ``Bench.compare`` runs it again and records the error
            return []
    names = {row.key for row in profile.key_averages()}
    return sorted(name for name in names if "attention" in name.lower() and "::_" in name)


def window_error(bench: Bench, lengths: Iterable[int]) -> None:
    """Record the relative difference in fp32 between our window attention and one masked call."""
    vision, segments = bench.model.vision, Segments.build(lengths, bench.device.copy)
    q, k, v = (bench.random(sum(segments.lengths), vision.num_attention_heads, vision.head_dim, dtype=torch.float32)
               for _ in range(3))  # fmt: skip
    found = forms(bench, segments, False, is_grouped=False, has_mask=True)
    error = relative_difference(found[OURS](q, k, v), found[MASK](q, k, v))
    bench.records.write("window error", difference=error, dtype="float32", shapes=list(q.shape))
