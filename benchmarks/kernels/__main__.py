"""The kernels of a training step on one device, each in every form that could compute it.

    python -m benchmarks.kernels ceilings gemm attention pointwise optimizer towers [--size 3b] [--records FILE]

``ceilings`` measures what the device can do at best: a large matrix product and a large copy.  The other groups time
every available form at the shapes of one 3B step, with 12 samples of 689 tokens and with one, so that the choice
between forms rests on measurements.  ``towers`` times the whole ViT and the whole LLM against transformers'.  "ours" is
the form that ``mm.device`` picks for this device.

Each result is one JSON line, printed and at once appended to ``--records``, with the median time of a form and the
relative difference between its result and that of the first form of the case.  A form that this device or torch lacks
gets an "error" instead of times; the exit status is 1 if that happens to one of ours.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.attention import attention
from benchmarks.kernels.bench import Bench, Form, with_backward
from benchmarks.kernels.pointwise import pointwise
from benchmarks.measure import DEVICES, SIZES
from benchmarks.records import OURS, Records, add_record_flags
from mm.device.device import Device
from mm.weights.table import model_weights
from tests.workload import num_patches, num_tokens

CEILING_SIDE, CEILING_COPY_BYTES = 8192, 4 << 30
TINY_CEILING_SIDE, TINY_CEILING_COPY_BYTES = 256, 4 << 20
FFN_SIZES, TP_SIZES = (3420, 3424, 3456), (1, 2, 4)
"""Width of the ViT's ffn: in 3B and 7B, the same rounded up to rows of whole 16 bytes, and in 32B and 72B."""


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
    bench.compare("ceilings", "fill", {"fill": target.zero_}, num_bytes=num_bytes, shapes=[num_bytes // 4])


def gemm(bench: Bench) -> None:
    """Matrix products of both towers, weight gradients, the ViT's ffn by width and TP size, the patch embedding."""
    vision, language = bench.model.vision, bench.model.language
    for samples in bench.num_samples:
        for tower, rows in (("LLM", samples * num_tokens(bench.sample)), ("ViT", samples * num_patches(bench.sample))):
            layer = language if tower == "LLM" else vision
            hidden, ffn = layer.hidden_size, layer.ffn_hidden_size
            queries = layer.num_attention_heads * layer.head_dim
            keys = layer.num_query_groups * layer.head_dim
            shapes = {"qkv": (hidden, queries + 2 * keys), "proj": (queries, hidden), "fc1": (hidden, 2 * ffn),
                      "fc2": (ffn, hidden)}  # fmt: skip
            for name, (inputs, outputs) in shapes.items():
                products(bench, f"{tower} {name}", rows, inputs, outputs)
                weight_gradients(bench, f"{tower} {name}", rows, inputs, outputs)
    rows = bench.num_samples[-1] * num_patches(bench.sample)
    for ffn in (vision.ffn_hidden_size,) if bench.is_tiny else FFN_SIZES:
        for tp_size in TP_SIZES:
            local = -(-ffn // tp_size)
            facts = {"ffn": ffn, "tp_size": tp_size}
            products(bench, f"ViT fc1, ffn {ffn}, TP {tp_size}", rows, vision.hidden_size, 2 * local, **facts)
            products(bench, f"ViT fc2, ffn {ffn}, TP {tp_size}", rows, local, vision.hidden_size, **facts)
    patch_embedding(bench, rows)


def products(bench: Bench, case: str, rows: int, inputs: int, outputs: int, **facts: Any) -> None:
    """One linear layer: its forward product and those of its two gradients."""
    x, weight, gradient = bench.random(rows, inputs), bench.random(outputs, inputs), bench.random(rows, outputs)
    passes = {
        "forward": lambda: F.linear(x, weight),
        "input gradient": lambda: gradient @ weight,
        "weight gradient": lambda: gradient.t() @ x,
    }
    for name, form in passes.items():
        bench.compare("gemm", f"{case}, {rows} rows", {name: form}, flops=2 * rows * inputs * outputs,
                      shapes=[rows, inputs, outputs], **facts)  # fmt: skip


def weight_gradients(bench: Bench, case: str, rows: int, inputs: int, outputs: int) -> None:
    """Ways to add a weight's gradient to its fp32 buffer."""
    x, gradient = bench.random(rows, inputs), bench.random(rows, outputs)
    buffer = torch.zeros(outputs, inputs, device=bench.device.torch_device)
    forms: dict[str, Form] = {
        "product, then add_": lambda: buffer.add_(gradient.t() @ x),
        "addmm into fp32": lambda: torch.addmm(buffer, gradient.t(), x, out_dtype=torch.float32, out=buffer),
        OURS: lambda: (bench.device.kernels.accumulate(buffer, gradient, x, False), buffer)[1],
    }
    bench.compare("weight gradient", f"{case}, {rows} rows", forms, flops=2 * rows * inputs * outputs,
                  reset=buffer.zero_, shapes=[rows, inputs, outputs])  # fmt: skip


def patch_embedding(bench: Bench, rows: int) -> None:
    """The first layer of the ViT as a matrix product, and as the 3-D convolution that published checkpoints have."""
    vision = bench.model.vision
    kernel = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    patches = bench.random(rows, vision.patch_elements)
    weight = bench.random(vision.hidden_size, vision.in_channels, *kernel).requires_grad_()
    gradient = bench.random(rows, vision.hidden_size)
    forms = {
        "linear": lambda: F.linear(patches, weight.flatten(1)),
        "convolution": lambda: F.conv3d(patches.view(rows, vision.in_channels, *kernel), weight, stride=kernel)
        .flatten(1),
    }  # fmt: skip
    bench.compare("patch embedding", f"{rows} rows",
                  {name: with_backward(form, [weight], gradient) for name, form in forms.items()},
                  flops=4 * rows * weight.numel(), shapes=list(patches.shape))  # fmt: skip


def optimizer(bench: Bench) -> None:
    """Clipping, Adam and the copy to bf16 weights, over tensors of the model's own shapes."""
    device = bench.device.torch_device
    shapes = [weight.shape for weight in model_weights(bench.model)]
    weights: list[Tensor] = [torch.nn.Parameter(bench.random(*shape, dtype=torch.float32)) for shape in shapes]
    lower = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    for weight in weights:
        weight.grad = bench.random(*weight.shape, dtype=torch.float32)
    gradients: list[Any] = [weight.grad for weight in weights]
    numel = sum(weight.numel() for weight in weights)
    scale = torch.tensor(0.999, device=device)
    adam = torch.optim.AdamW(weights, lr=1e-9, weight_decay=0.01, fused=True)

    def step(grad_scale: Tensor | None) -> None:
        found_inf = None if grad_scale is None else torch.zeros((), device=device)
        vars(adam).update(grad_scale=grad_scale, found_inf=found_inf)  # as torch's own GradScaler passes them
        adam.step()

    def clip_one_by_one() -> None:
        for gradient in gradients:
            gradient.copy_(gradient * scale)

    def copy_one_by_one() -> None:
        for low, high in zip(lower, weights, strict=True):
            low.copy_(high)

    works: dict[str, tuple[float, Form]] = {  # bytes read and written per weight, and the work
        "norm, foreach": (4, lambda: torch.linalg.vector_norm(torch.stack(
            torch._foreach_norm(gradients)))),  # pyright: ignore[reportPrivateImportUsage]  (no public name)
        "clip, mul and copy_ one by one": (16, clip_one_by_one),
        "clip, foreach": (8, lambda: torch._foreach_mul_(gradients, scale)),  # pyright: ignore[reportPrivateImportUsage]
        "Adam, fused": (28, lambda: step(None)),
        "Adam, fused, with grad_scale": (32, lambda: step(1 / scale)),
        "to bf16, one by one": (6, copy_one_by_one),
        "to bf16, foreach": (6, lambda: torch._foreach_copy_(lower, weights)),  # pyright: ignore[reportPrivateImportUsage]
    }
    with torch.no_grad():
        for name, (width, work) in works.items():
            bench.compare("optimizer", f"{numel / 1e9:.2f} billion weights", {name: work}, num_bytes=width * numel,
                          num_tensors=len(weights), num_params=numel)  # fmt: skip


def towers(bench: Bench) -> None:
    """Both towers as a whole.  Imported here, because only this group needs megatron-core and transformers."""
    from benchmarks.kernels.towers import time_towers

    time_towers(bench)


GROUPS: dict[str, Callable[[Bench], None]] = {
    "ceilings": ceilings, "gemm": gemm, "attention": attention, "pointwise": pointwise, "optimizer": optimizer,
    "towers": towers,
}  # fmt: skip


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", choices=GROUPS)
    parser.add_argument("--device", default="auto", choices=DEVICES)
    parser.add_argument("--size", default="3b", choices=SIZES)
    add_record_flags(parser, "kernels")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction,
                        help="time torch.compile's forms too (default: on CUDA)")  # fmt: skip
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    flags = parse(argv)
    device = Device.pick(flags.device)
    records = Records(flags.records, flags.label, device.name, flags.size)
    compiles = device.platform.name == "cuda" if flags.compile is None else flags.compile
    bench = Bench(device, flags.size, records, compiles)
    for name in flags.groups:
        GROUPS[name](bench)
    for failed in bench.failed:
        print(f"failed: {failed}, {OURS}", file=sys.stderr)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
