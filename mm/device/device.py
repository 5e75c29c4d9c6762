"""The device of this process: choosing it, copies to it, its memory, its peak, its random numbers.

``Device.pick`` must run before megatron is imported: some of its modules query the device at import.
"""

import importlib
import importlib.util
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mm.device.attention import torch_npu
from mm.device.compiled import compile_fault
from mm.device.deterministic import make_deterministic
from mm.device.kernels import Kernels, kernels_of
from mm.device.known import peak_flops, refuse_old_cuda, refuse_old_npu
from mm.device.shims import apply_shims
from mm.device.side import SideQueue
from mm.errors import UserError

_ADAPTOR = "mindspeed.megatron_adaptor"
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_EAGER_NOTE = (
    "SwiGLU, rope, norms and the loss's logits run eagerly, in several kernels each, because torch.compile does not "
    "work here: {}. It needs a C compiler, Python's headers (Python.h) and Triton: install gcc and python3-dev, then "
    "start again"
)


MAX_MESSAGE_CTAS = 4
"""Each moves some 20 GB/s over NVLink, as is generally reported: 20 MB, the hidden states of 2,756 tokens of 7B, take
0.25 ms of the 25 ms and more that a stage computes.  Chosen, not measured."""


@dataclass(frozen=True)
class Device:
    """One accelerator (or the CPU), as this process uses it."""

    kind: str
    """"cuda", "npu" or "cpu"."""
    index: int
    backend: str
    """torch.distributed backend for tensors on this device."""
    kernels: Kernels
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """Notes for the user about the device: one sentence each, for the start of the log."""

    @classmethod
    def pick(cls, wanted: str = "auto", deterministic: bool = False) -> "Device":
        """Choose npu, cuda or cpu (in this order when ``wanted`` is "auto") and prepare torch and megatron for it.

        Raises ``UserError`` when the wanted device is not usable here or too old, the environment is not
        ``deterministic``, or MindSpeed has patched megatron.
        """
        if _ADAPTOR in sys.modules:
            raise UserError(
                f"{_ADAPTOR} is loaded in this process: it reads our command line as its own, and replaces "
                f"Tensor.view, megatron's gradient buffers and its optimizer, so that nothing here would compute what "
                f"was tested. Take its import out of the script; an installed MindSpeed may stay, nothing of it is "
                f"needed"
            )
        kind = _usable_kind(wanted)
        if deterministic:
            make_deterministic(kind)
        index = 0 if kind == "cpu" else int(os.environ.get("LOCAL_RANK", "0"))
        if kind == "npu":
            _prepare_npu(index)
        elif kind == "cuda":
            _prepare_cuda(index)
        apply_shims(kind)
        fault = compile_fault(torch.device(kind, index)) if kind == "cuda" else None
        kernels = kernels_of(kind) if fault is None else kernels_of(kind, fuse=None)
        notes = () if fault is None else (_EAGER_NOTE.format(fault),)
        return cls(kind, index, _BACKENDS[kind], kernels, notes=notes)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def name(self) -> str:
        """The device's own name, as its driver reports it."""
        return "cpu" if self.kind == "cpu" else getattr(torch, self.kind).get_device_name(self.index)

    @property
    def peak_flops(self) -> float | None:
        """Dense bf16 FLOP/s that its maker publishes; None where no number is known."""
        return peak_flops(self.name)

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to this device through pinned memory (torch keeps it until it is copied).

        A copy from ordinary memory makes the host wait for the work queued on the device; this one does not.  What is
        pinned already is not pinned again.
        """
        return tensor if self.kind == "cpu" else tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def pin(self, tensor: Tensor) -> Tensor:
        """A host tensor in pinned memory, or the tensor itself on the CPU; for other threads than the main one."""
        if self.kind == "cpu":
            return tensor
        getattr(torch, self.kind).set_device(self.index)  # a new thread is on device 0, whose memory is not ours
        return tensor.pin_memory()

    def side_queue(self) -> SideQueue:
        """A new side stream of this device."""
        return SideQueue(None if self.kind == "cpu" else self.kind)

    @property
    def adam_obeys_scale(self) -> bool:
        """Whether torch's fused AdamW obeys ``grad_scale`` and ``found_inf`` here.

        The kernels of CUDA and the CPU do; torch_npu's takes both and looks at neither.
        """
        return self.kind != "npu"

    @property
    def starts_messages_ahead(self) -> bool:
        """Whether stages post receives early by default; the command line can override it.

        An NCCL message occupies GPU multiprocessors from its start until the other side joins: for most of a stage's
        computing time, to gain 0.1 to 0.3 % of a step (docs/performance.md).  HCCL waits in its own engines (SDMA),
        gloo on the host.
        """
        return self.kind != "cuda"

    @property
    def max_message_ctas(self) -> int | None:
        """Multiprocessors that a group for pipeline messages may occupy; None: the backend's default.

        What a frozen prefix of stages sends waits for the next stage whether that asks ahead or not.  NCCL would take
        up to 32 of the 132 processors of an H100 (its default of ``max_ctas``).
        """
        return MAX_MESSAGE_CTAS if self.kind == "cuda" else None

    def start_reading(self, tensor: Tensor) -> Callable[[], list[float]]:
        """Start copying a small fp32 vector to the host; calling the result waits for it and returns its numbers.

        That waits for the work queued before, not for what is queued between the two calls.
        """
        on_host = self.start_copying_back(tensor)
        return lambda: on_host().tolist()

    def host_buffer(self, num_bytes: int) -> Tensor | None:
        """Pinned memory to copy back into, as bytes; None on the CPU, whose tensors are on the host."""
        return None if self.kind == "cpu" else torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def start_copying_back(self, tensor: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Start copying a tensor to the host; calling the result, in any thread, waits for the copy and returns it.

        ``into``: pinned memory for it; without, it gets its own.  On the CPU the result is the tensor itself.
        """
        if self.kind == "cpu":
            return lambda: tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if into is None else into
        copy.copy_(tensor, non_blocking=True)
        copied = getattr(torch, self.kind).Event()
        copied.record()

        def on_host() -> Tensor:
            getattr(torch, self.kind).set_device(self.index)  # a new thread is on no device, or on device 0
            copied.synchronize()
            return copy

        return on_host

    def mark(self) -> Any:
        """This moment; on an accelerator, the one when all work of the current stream so far will be done."""
        if self.kind == "cpu":
            return time.perf_counter()
        event = getattr(torch, self.kind).Event(enable_timing=True)
        event.record()
        return event

    def seconds_of(self, marks: Sequence[Any]) -> list[float]:
        """The times of ``mark``s by this process's ``time.perf_counter``; waits until the device has passed them."""
        if self.kind == "cpu":
            return list(marks)
        last = self.mark()
        last.synchronize()
        now = time.perf_counter()
        return [now - mark.elapsed_time(last) / 1000 for mark in marks]

    def profiler(self, directory: str, name: str) -> Any:
        """torch's profiler, or torch_npu's, of host and device; ``stop`` after ``start`` writes a trace of ``name``."""
        if self.kind == "npu":
            handler = torch_npu().profiler.tensorboard_trace_handler(directory, name)
            return torch_npu().profiler.profile(on_trace_ready=handler)
        return torch.profiler.profile(on_trace_ready=torch.profiler.tensorboard_trace_handler(directory, name))

    def max_memory_bytes(self) -> int:
        """Peak memory of this process: allocated on the device, or resident on the CPU."""
        if self.kind == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return getattr(torch, self.kind).max_memory_allocated()

    def synchronize(self) -> None:
        """Wait for the device; used around timings in benchmarks only, never in training."""
        if self.kind != "cpu":
            getattr(torch, self.kind).synchronize()


def _usable_kind(wanted: str) -> str:
    if wanted not in ("auto", "npu", "cuda", "cpu"):
        raise UserError(f"--device is {wanted!r}; expected auto, npu, cuda or cpu")
    has_npu = importlib.util.find_spec("torch_npu") is not None
    if wanted == "npu" and not has_npu:
        raise UserError("--device npu: torch_npu is not installed; install the torch_npu of your torch version")
    if wanted == "npu" or (wanted == "auto" and has_npu):
        if torch_npu().npu.is_available():
            return "npu"
        if wanted == "npu":
            raise UserError("--device npu: torch_npu sees no NPU; source Ascend's set_env.sh and check npu-smi info")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device; check nvidia-smi and that torch is a CUDA build")
    return "cuda" if wanted in ("auto", "cuda") and torch.cuda.is_available() else "cpu"


def _prepare_cuda(index: int) -> None:
    """Choose the device, and take cuDNN's attention away from SDPA.

    torch prefers it on Hopper and Blackwell, and it plans for each exact shape: 23 to 37 ms of the host for every new
    length of a sample, with plans that are never dropped.  Flash attention takes any length.
    """
    torch.cuda.set_device(index)
    refuse_old_cuda(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
    torch.backends.cuda.enable_cudnn_sdp(False)


def _prepare_npu(index: int) -> None:
    """Load what redirects CUDA's names, choose the device, and run operators from CANN's binaries.

    With ``jit_compile`` on, CANN would compile operators for every new shape, and ``npu_rotary_mul`` would take no head
    size but 128, while the ViT's is 80.
    """
    importlib.import_module("torch_npu.contrib.transfer_to_npu")
    torch_npu().npu.set_device(index)
    refuse_old_npu(torch_npu().npu.get_device_name(index))
    torch_npu().npu.set_compile_mode(jit_compile=False)
    assert torch_npu().npu.is_jit_compile_false(), "set_compile_mode(jit_compile=False) had no effect"


def random_states() -> dict[str, Tensor]:
    """The states of all random number generators of this process: Python, numpy, torch and torch on the device."""
    _, words, _ = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)  # its type is that of the old form too
    states = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.tensor([*numpy_state["state"]["key"].tolist(), numpy_state["state"]["pos"]], dtype=torch.int64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():  # NPUs answer here too
        states["device"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Restore the states that ``random_states`` returned."""
    version, _, _ = random.getstate()
    random.setstate((version, tuple(states["python"].tolist()), None))
    *keys, position = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
    torch.set_rng_state(states["torch"])
    if "device" in states:
        torch.cuda.set_rng_state(states["device"])
