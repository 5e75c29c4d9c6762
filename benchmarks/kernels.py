"""The attention of both towers on one device, in every form that could compute it, and the device's ceilings.

    python -m benchmarks.kernels ceilings attention [--size 3b] [--records FILE]

``ceilings`` measures what the device can do at best: a large matrix product and a large copy.  ``attention`` times
every available form at the shapes of 12 samples, so that the choice between forms rests on measurements.  "ours" is the
form that ``mm.device`` picks for this device.

Each result is one JSON line, printed and at once appended to ``--records``, with the median time of a form and the
relative difference between its result and that of the first form of the case.  A form that this device or torch lacks
gets an "error" instead of times; the exit status is 1 if that happens to one of ours.
"""

import argparse
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import DEVICES, SIZES, Clock, shipped_model
from benchmarks.records import OURS, Records, add_record_flags
from mm.device.attention import Segments, by_length, sdpa
from mm.device.device import Device
from mm.model.qwen2_5_vl.positions import plan_vision
from tests.workload import SAMPLE, TINY_SAMPLE, Sample, mixed_samples, num_tokens

CEILING_SIDE, CEILING_COPY_BYTES = 8192, 4 << 30
TINY_CEILING_SIDE, TINY_CEILING_COPY_BYTES = 256, 4 << 20
LOOP, MASK = "SDPA, segment by segment", "SDPA, one masked call"
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cuDNN": SDPBackend.CUDNN_ATTENTION}  # fmt: skip
NUM_SAMPLES, NUM_TINY_SAMPLES = 12, 2
MIN_MIXED_TOKENS = 2000
"""Enough for more than one image."""

Form = Callable[[], Any]
"""Returns a tensor or a tuple of tensors, or works in place and returns None."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From packed q, k and v, [rows, heads, head_dim], to the output in the shape of q."""


class Bench:
    """The device, a clock, the shapes, and where results go."""

    def __init__(self, device: Device, size: str, records: Records) -> None:
        self.device, self.records, self.is_tiny = device, records, size == "tiny"
        self.model = shipped_model(size)
        self.sample: Sample = TINY_SAMPLE if self.is_tiny else SAMPLE
        self.num_samples = NUM_TINY_SAMPLES if self.is_tiny else NUM_SAMPLES
        self._clock = Clock(device, num_warmup=1, seconds=0.0) if self.is_tiny else Clock(device)
        self.dtype = torch.float32 if device.platform.name == "cpu" else torch.bfloat16
        self.failed: list[str] = []
        """Cases in which our own form raised an error."""
        self._generator = torch.Generator(device.torch_device).manual_seed(0)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed numbers; a device may be faster on zeros."""
        where = {"generator": self._generator, "device": self.device.torch_device}
        return torch.randn(shape, dtype=dtype or self.dtype, **where)

    def compare(
        self, group: str, case: str, forms: dict[str, Form], *, flops: float = 0, num_bytes: float = 0, **facts: Any
    ) -> None:
        """Time each form and record it."""
        reference = None
        facts |= {"group": group, "case": case, "dtype": str(self.dtype).removeprefix("torch.")}
        for name, form in forms.items():
            found = {"name": name, **facts}
            try:
                result = _tensors(form())
                if reference is None:
                    reference = [tensor.detach().clone() for tensor in result]
                pairs = zip(result, reference, strict=True)
                found["difference"] = max((relative_difference(*pair) for pair in pairs), default=0.0)
                del result
                timing = self._clock.time(form)
            except Exception as error:  # is recorded; the other forms are still measured
                found["error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]
                if name == OURS:
                    self.failed.append(f"{group}, {case}")
            else:
                found |= dataclasses.asdict(timing)
                if flops:
                    found["tflops"] = flops / timing.ms / 1e9
                if num_bytes:
                    found["gbps"] = num_bytes / timing.ms / 1e6
            self.records.write("kernel", **found)


def ceilings(bench: Bench) -> None:
    """The device's best rates, on random numbers."""
    side = TINY_CEILING_SIDE if bench.is_tiny else CEILING_SIDE
    a, b = bench.random(side, side), bench.random(side, side)
    out = torch.empty_like(a)
    bench.compare("ceilings", "matrix product", {"matrix product": lambda: torch.mm(a, b, out=out)},
                  flops=2 * side**3, shapes=[side, side, side])  # fmt: skip
    num_bytes = TINY_CEILING_COPY_BYTES if bench.is_tiny else CEILING_COPY_BYTES
    source = bench.random(num_bytes // 4, dtype=torch.float32)
    target = torch.empty_like(source)
    bench.compare("ceilings", "copy", {"copy": lambda: target.copy_(source)}, num_bytes=2 * num_bytes,
                  shapes=[num_bytes // 4])  # fmt: skip


def attention(bench: Bench) -> None:
    """Segments of equal and of mixed lengths: the LLM's samples, the ViT's windows and its whole images."""
    num_samples, tokens = bench.num_samples, num_tokens(bench.sample)
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
        compare(bench, f"ViT images, {name}", plan.image_lengths, **full)
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
             "num_equal_runs": len(segments.equal_runs)}  # fmt: skip
    forward = {name: functools.partial(form, q, k, v) for name, form in found.items()}
    parts = {
        "forward": {name: torch.no_grad()(form) for name, form in forward.items()},
        "forward and backward": {name: with_backward(form, [q, k, v], gradient) for name, form in forward.items()},
    }
    for number, (part, works) in enumerate(parts.items()):
        bench.compare("attention", case, works, flops=4 * heads * dim * pairs * (1 + 2 * number), part=part,
                      **facts)  # fmt: skip


def forms(bench: Bench, segments: Segments, causal: bool, is_grouped: bool, has_mask: bool) -> dict[str, Attend]:
    """All forms by name.  "Repeated heads" gives each query head its own copy of keys and values."""
    attend = functools.partial(sdpa, causal=causal)
    one_by_one = dataclasses.replace(segments, equal_runs=tuple((length, 1) for length in segments.lengths))
    by_runs = functools.partial(by_length, segments=segments, attend=attend)
    varlen = functools.partial(variable_length, segments=segments, causal=causal)
    found: dict[str, Attend] = {
        LOOP: functools.partial(by_length, segments=one_by_one, attend=attend),  # transformers' ViT does this
        "SDPA by length": by_runs,
        OURS: lambda q, k, v: bench.device.kernels.attention(q, k, v, segments, causal),
    }
    if has_mask:
        number = torch.repeat_interleave(torch.arange(len(segments.lengths)), torch.tensor(segments.lengths))
        number = number.to(bench.device.torch_device)
        mask = number[:, None] == number
        found[MASK] = functools.partial(masked, mask=mask)
    if bench.device.platform.name != "cpu":
        found["variable length"] = varlen
        found |= {f"SDPA by length, {name}": functools.partial(_through, backend, by_runs)
                  for name, backend in BACKENDS.items()}  # fmt: skip
    if is_grouped:
        repeated = {f"{name}, repeated heads": functools.partial(_repeated, form)
                    for name, form in found.items() if "by length" in name or "variable" in name}  # fmt: skip
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


def window_error(bench: Bench, lengths: Iterable[int]) -> None:
    """Record the relative difference in fp32 between our window attention and one masked call."""
    vision, segments = bench.model.vision, Segments.build(lengths, bench.device.copy)
    q, k, v = (bench.random(sum(segments.lengths), vision.num_attention_heads, vision.head_dim, dtype=torch.float32)
               for _ in range(3))  # fmt: skip
    found = forms(bench, segments, False, is_grouped=False, has_mask=True)
    error = relative_difference(found[OURS](q, k, v), found[MASK](q, k, v))
    bench.records.write("window error", difference=error, dtype="float32", shapes=list(q.shape))


def _tensors(result: Any) -> tuple[Tensor, ...]:
    if result is None:
        return ()
    return (result,) if isinstance(result, Tensor) else tuple(result)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of ``expected``, in fp32."""
    expected = expected.float()
    return float((found.detach().float() - expected).norm() / expected.norm().clamp_min(1e-30))


def with_backward(forward: Form, inputs: list[Tensor], gradient: Tensor) -> Form:
    """A form that returns the output of ``forward`` and the gradients of ``inputs``."""

    def both() -> tuple[Tensor, ...]:
        output = forward()
        return (output, *torch.autograd.grad(output, inputs, gradient))

    return both


GROUPS: dict[str, Callable[[Bench], None]] = {"ceilings": ceilings, "attention": attention}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", choices=GROUPS)
    parser.add_argument("--device", default="auto", choices=DEVICES)
    parser.add_argument("--size", default="3b", choices=SIZES)
    add_record_flags(parser, "kernels")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    flags = parse(argv)
    device = Device.pick(flags.device)
    records = Records(flags.records, flags.label, device.name, flags.size)
    bench = Bench(device, flags.size, records)
    for name in flags.groups:
        GROUPS[name](bench)
    for failed in bench.failed:
        print(f"failed: {failed}, {OURS}", file=sys.stderr)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
