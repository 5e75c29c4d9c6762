"""Shared by all groups of benchmarks.kernels: comparing the forms of a kernel on one device."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Clock, shipped_model
from benchmarks.records import OURS, Records
from mm.device.device import Device
from tests.workload import SAMPLE, TINY_SAMPLE, Sample

NUM_SAMPLES = 12
"""Number of samples in the large case; the small one has a single sample."""

Form = Callable[[], Any]
"""Returns a tensor or a tuple of tensors, or works in place and returns None."""


class Bench:
    """What every group needs: the device, a clock, the shapes, and where results go."""

    def __init__(self, device: Device, size: str, records: Records, compiles: bool) -> None:
        self.device, self.size, self.records, self.compiles = device, size, records, compiles
        self.is_tiny = size == "tiny"
        self.model = shipped_model(size)
        self.sample: Sample = TINY_SAMPLE if self.is_tiny else SAMPLE
        self.num_samples = (2,) if self.is_tiny else (1, NUM_SAMPLES)
        self.clock = Clock(device, num_warmup=1, seconds=0.0) if self.is_tiny else Clock(device)
        self.dtype = torch.float32 if device.platform.name == "cpu" else torch.bfloat16
        self.failed: list[str] = []
        """Cases in which our own form raised an error."""
        self._generator = torch.Generator(device.torch_device).manual_seed(0)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed numbers; a device may be faster on zeros."""
        where = {"generator": self._generator, "device": self.device.torch_device}
        return torch.randn(shape, dtype=dtype or self.dtype, **where)

    def compare(
        self, group: str, case: str, forms: dict[str, Form], *, flops: float = 0, num_bytes: float = 0,
        reset: Callable[[], object] | None = None, ran: dict[str, list[str]] | None = None, **facts: Any,
    ) -> None:  # fmt: skip
        """Time each form and record it.

        ``reset`` is called before each form and undoes changes in place; ``ran`` names the operators of each form.
        """
        reference = None
        facts |= {"group": group, "case": case, "dtype": str(self.dtype).removeprefix("torch.")}
        for name, form in forms.items():
            found = {"name": name, **facts, **({"ran": ran[name]} if ran else {})}
            try:
                if reset is not None:
                    reset()
                result = _tensors(form())
                if reference is None:
                    reference = [tensor.detach().clone() for tensor in result]
                pairs = zip(result, reference, strict=True)
                found["difference"] = max((relative_difference(*pair) for pair in pairs), default=0.0)
                del result
                timing = self.clock.time(form)
            except Exception as error:  # is recorded; the other forms are still measured
                found["error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]
                if name == OURS:
                    self.failed.append(f"{group}, {case}")
            else:
                found |= asdict(timing)
                if flops:
                    found["tflops"] = flops / timing.ms / 1e9
                if num_bytes:
                    found["gbps"] = num_bytes / timing.ms / 1e6
            self.records.write("kernel", **found)


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
