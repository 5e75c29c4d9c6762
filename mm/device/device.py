"""The device that a process runs on: picking it, copies to it, its memory, its peak, its random numbers.

``Device.pick`` must run before megatron is imported, because some of its modules look at the device while they are
imported.
"""

import importlib
import importlib.util
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mm.device.attention import torch_npu
from mm.device.deterministic import make_deterministic
from mm.device.kernels import Kernels, kernels_of
from mm.device.shims import apply_shims
from mm.device.side import SideQueue
from mm.errors import UserError

_ADAPTOR = "mindspeed.megatron_adaptor"
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "Ascend910_93": 354e12,
    "Ascend910B1": 378e12,
    "Ascend910B2": 353e12,
    "Ascend910B3": 313e12,
    "Ascend910B4": 280e12,
}
"""Dense bf16 FLOP/s as the makers publish them; the first name found in the device's own name counts."""
MEMORY_BYTES = {
    "H200": 143771 * 2**20,
    "H100": 81559 * 2**20,
    "H800": 81559 * 2**20,
    "A100": 81920 * 2**20,
    "A800": 81920 * 2**20,
    "L40S": 46068 * 2**20,
    "Ascend910_93": 65536 * 2**20,
    "Ascend910B1": 65536 * 2**20,
    "Ascend910B2": 65536 * 2**20,
    "Ascend910B3": 65536 * 2**20,
    "Ascend910B4": 32768 * 2**20,
}
"""The whole memory of a device: of H200, H100, H800 and L40S as nvidia-smi shows it, of the others what their makers
name, in GiB.  An A100 or A800 has 80 GB or half of it."""


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

    @classmethod
    def pick(cls, wanted: str = "auto", deterministic: bool = False) -> "Device":
        """Choose npu, cuda or cpu (in this order when ``wanted`` is "auto") and prepare megatron for it.

        Raises ``UserError`` when the wanted device is not usable here, the environment is not ``deterministic``, or
        MindSpeed has patched megatron.
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
            importlib.import_module("torch_npu.contrib.transfer_to_npu")
        if kind != "cpu":
            getattr(torch, kind).set_device(index)
        apply_shims(kind)
        return cls(kind, index, _BACKENDS[kind], kernels_of(kind))

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def name(self) -> str:
        """The device's own name, as its driver reports it."""
        return "cpu" if self.kind == "cpu" else getattr(torch, self.kind).get_device_name(self.index)

    def copy(self, tensor: Tensor) -> Tensor:
        """A host tensor on this device, by way of pinned memory (torch keeps it until it is copied).

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
        """A new one beside what this process computes."""
        return SideQueue(None if self.kind == "cpu" else self.kind)

    @property
    def adam_obeys_scale(self) -> bool:
        """Whether torch's fused AdamW obeys ``grad_scale`` and ``found_inf`` here.

        The kernels of CUDA and the CPU do; torch_npu's takes both and looks at neither.
        """
        return self.kind != "npu"

    @property
    def starts_messages_ahead(self) -> bool:
        """Whether a stage asks for a message before it wants it, where the command line does not say.

        From its beginning until the other side has come to it, a message of NCCL's occupies processors of the GPU: for
        most of the time that a stage computes, and all it wins is 0.1 to 0.3 % of a step (docs/performance.md).
        HCCL's waits in its own engines (SDMA), gloo's on the host.
        """
        return self.kind != "cuda"

    @property
    def max_message_ctas(self) -> int | None:
        """Processors of the device that a group for pipeline messages may occupy; None: as the backend has it.

        What a frozen prefix of stages sends waits for the next stage whether that asks ahead or not.  NCCL would take
        up to 32 of the 132 processors of an H100 (its default of ``max_ctas``).
        """
        return MAX_MESSAGE_CTAS if self.kind == "cuda" else None

    def start_reading(self, tensor: Tensor) -> Callable[[], list[float]]:
        """Begin to copy a small fp32 vector to the host; a call of the result waits for it and gives its numbers.

        That waits for the work queued before, not for what is queued between the two calls.
        """
        on_host = self.start_copying_back(tensor)
        return lambda: on_host().tolist()

    def start_copying_back(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to copy a tensor to the host; a call of the result, in any thread, waits for the copy and gives it.

        On the CPU it is the tensor itself.
        """
        if self.kind == "cpu":
            return lambda: tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
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


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of a device by its name; None for one that we do not know."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name.lower() in device_name.lower()), None)


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
    """Set what ``random_states`` gave."""
    version, _, _ = random.getstate()
    random.setstate((version, tuple(states["python"].tolist()), None))
    *keys, position = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
    torch.set_rng_state(states["torch"])
    if "device" in states:
        torch.cuda.set_rng_state(states["device"])
