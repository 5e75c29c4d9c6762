"""One rank of ``mm-doctor``: ``python -m mm.doctor.rank FILE DEVICE`` under a launcher.

Tries the device, its kernels, the links to the other ranks, and a training step.  Rank 0 writes each finding at once,
so that those before a crash or a hang are known.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm.doctor.diagnosis import Diagnosis, fault, ok, warning
from mm.ending import end_with_launcher, is_first_rank, run_command, status_of

if TYPE_CHECKING:
    from mm.device.device import Device
    from mm.parallel.mesh import Mesh

_NUM_ELEMENTS = 1 << 18
"""In fp32: 1 MiB."""
_NUM_REPEATS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if this device cannot be used."""
    end_with_launcher()
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: status_of(lambda: _examine(Path(words[0]), words[1])), lambda: "nothing was written",
                       is_rank=True)


def _examine(output: Path, wanted: str) -> int:
    from mm.device.device import Device

    device = Device.pick(wanted)
    # megatron looks at the device while it is imported, so everything built on it comes after this
    from mm.doctor.step import model
    from mm.parallel import mesh as parallel

    mesh = parallel.start(device, model(), tp_size=1)
    with open(output if is_first_rank() else os.devnull, "w", encoding="utf-8", buffering=1) as stream:
        stream.writelines(one.line() for one in chain(_device(device), _links(device, mesh), _steps(device, mesh)))
    parallel.stop()
    return 0


def _device(device: "Device") -> Iterator[Diagnosis]:
    yield ok("device", f"{device.kind}: {device.name}")
    for note in device.notes:
        yield warning("device", note, "see the end of that sentence")
    names = {field.name: getattr(device.kernels, field.name) for field in fields(device.kernels)}
    yield ok("kernels", ", ".join(f"{name} {_named(one)}" for name, one in names.items()
                                  if callable(one) and name != "rounded_at_random"))


def _named(kernel: Any) -> str:
    """Where a function comes from, also through ``functools.partial``."""
    inner = getattr(kernel, "func", kernel)
    return f"{inner.__module__}.{inner.__qualname__}" if hasattr(inner, "__qualname__") else type(inner).__name__


def _links(device: "Device", mesh: "Mesh") -> Iterator[Diagnosis]:
    """Collectives and messages between all ranks, on small tensors whose results are known."""
    if mesh.world_size == 1:
        yield warning("links", "one rank, so no link was tried", "mm-doctor --num-processes 2, or more")
        return
    for name, work in _exchanges(device, mesh).items():
        is_right, seconds = True, list[float]()
        for _ in range(_NUM_REPEATS):
            began = time.perf_counter()
            is_right &= bool(work())  # the comparison waits for the device
            seconds.append(time.perf_counter() - began)
        if _all_agree(is_right, mesh):
            yield ok("links", f"{name} over {mesh.world_size} ranks: {1000 * min(seconds):.2f} ms for 1 MiB")
        else:
            yield fault("links", f"{name} over {mesh.world_size} ranks gives wrong numbers",
                        "check the links (nvidia-smi topo -m, npu-smi info -t topo), update the driver, or turn direct "
                        "links off (NCCL_P2P_DISABLE=1, HCCL_INTRA_PCIE_ENABLE=1) to see which one is at fault")


def _exchanges(device: "Device", mesh: "Mesh") -> dict[str, Callable[[], Any]]:
    import torch
    import torch.distributed as dist

    rank, size, here = mesh.rank, mesh.world_size, device.torch_device

    def filled(value: float, count: int = _NUM_ELEMENTS) -> torch.Tensor:
        return torch.full((count,), value, device=here)

    def all_reduce() -> Any:
        own = filled(rank + 1.0)
        dist.all_reduce(own)
        return (own == size * (size + 1) / 2).all()

    def all_gather() -> Any:
        whole = filled(-1.0, size * _NUM_ELEMENTS)
        dist.all_gather_into_tensor(whole, filled(float(rank)))
        return (torch.arange(size, device=here) == whole.view(size, -1).T).all()

    def broadcast() -> Any:
        own = filled(float(rank))
        dist.broadcast(own, size - 1)
        return (own == size - 1).all()

    def ring() -> Any:
        arriving = filled(-1.0)
        both = [dist.P2POp(dist.isend, filled(float(rank)), (rank + 1) % size),
                dist.P2POp(dist.irecv, arriving, (rank - 1) % size)]
        for waiting in dist.batch_isend_irecv(both):
            waiting.wait()
        return (arriving == (rank - 1) % size).all()

    return {"all-reduce": all_reduce, "all-gather": all_gather, "broadcast": broadcast, "send and receive": ring}


def _all_agree(is_right: bool, mesh: "Mesh") -> bool:
    import torch
    import torch.distributed as dist

    votes = torch.tensor([int(is_right)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=mesh.control_group)
    return bool(votes.item())


def _steps(device: "Device", mesh: "Mesh") -> Iterator[Diagnosis]:
    from mm.doctor.step import GOLDEN, TOLERANCE, trained_step

    for precision, tolerance in TOLERANCE.items():
        found = trained_step(device, mesh, precision)
        text = ", ".join(f"{name} {found[name]:.6f} (expected {GOLDEN[name]:.6f})" for name in GOLDEN)
        if all(abs(found[name] / GOLDEN[name] - 1) <= tolerance for name in GOLDEN):
            yield ok(f"training step in {precision}", text)
        else:
            yield fault(f"training step in {precision}", text,
                        "this device computes something else: compare with --device cpu, update the driver and the "
                        "device's libraries to a pair of versions that was tested, and report it (mm-doctor --report)")


if __name__ == "__main__":
    sys.exit(main())
