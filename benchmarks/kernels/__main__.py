"""The kernels of a training step on one device, each in every form that could compute it.

    python -m benchmarks.kernels ceilings attention pointwise optimizer [--size 3b] [--records FILE]

``ceilings`` measures what the device can do at best: a large matrix product and a large copy.  The other groups time
every available form at the shapes of one 3B step, with 12 samples of 689 tokens and with one, so that the choice
between forms rests on measurements.  "ours" is the form that ``mm.device`` picks for this device.

Each result is one JSON line, printed and at once appended to ``--records``, with the median time of a form and the
relative difference between its result and that of the first form of the case.  A form that this device or torch lacks
gets an "error" instead of times; the exit status is 1 if that happens to one of ours.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.attention import attention
from benchmarks.kernels.bench import Bench, Form
from benchmarks.kernels.pointwise import pointwise
from benchmarks.measure import DEVICES, SIZES
from benchmarks.records import OURS, Records, add_record_flags
from mm.device.device import Device
from mm.weights.table import model_weights

CEILING_SIDE, CEILING_COPY_BYTES = 8192, 4 << 30
TINY_CEILING_SIDE, TINY_CEILING_COPY_BYTES = 256, 4 << 20


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

    works: dict[str, tuple[float, Form]] = {  # bytes read and written per weight, and the work
        "norm, foreach": (4, lambda: torch.linalg.vector_norm(torch.stack(
            torch._foreach_norm(gradients)))),  # pyright: ignore[reportPrivateImportUsage]  (no public name)
        "clip, foreach": (8, lambda: torch._foreach_mul_(gradients, scale)),  # pyright: ignore[reportPrivateImportUsage]
        "Adam, fused": (28, lambda: step(None)),
        "Adam, fused, with grad_scale": (32, lambda: step(1 / scale)),
        "to bf16, foreach": (6, lambda: torch._foreach_copy_(lower, weights)),  # pyright: ignore[reportPrivateImportUsage]
    }
    with torch.no_grad():
        for name, (width, work) in works.items():
            bench.compare("optimizer", f"{numel / 1e9:.2f} billion weights", {name: work}, num_bytes=width * numel,
                          num_tensors=len(weights), num_params=numel)  # fmt: skip


GROUPS: dict[str, Callable[[Bench], None]] = {
    "ceilings": ceilings, "attention": attention, "pointwise": pointwise, "optimizer": optimizer,
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
