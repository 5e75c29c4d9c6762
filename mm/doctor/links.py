"""Speed of the devices and of the links between the ranks of ``mm-doctor``, on tensors whose results are known."""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median_low

import torch
import torch.distributed as dist

from mm.device.device import Device
from mm.doctor.diagnosis import Diagnosis, fault, ok, warning
from mm.parallel.agreement import by_rank
from mm.parallel.mesh import Mesh

NUM_ELEMENTS = 1 << 22
"""In fp32: 16 MiB."""
_NUM_REPEATS = 5
_SIDE = 2048
_LATE = 2.0
"""A rank is slow if it takes more than this many times the median of all ranks."""
_CURE = ("check the links (nvidia-smi topo -m, npu-smi info -t topo), update the driver, or turn direct links off "
         "(NCCL_P2P_DISABLE=1, HCCL_INTRA_PCIE_ENABLE=1) to see which one is at fault")


def link_findings(
    device: Device, mesh: Mesh, names: Sequence[str], begin: Callable[[str], None]
) -> Iterator[Diagnosis]:
    """Collective over all ranks.  ``names``: each rank with its device; ``begin`` notes what this rank begins."""
    yield _speeds(device, mesh, names, begin)
    size, here = mesh.world_size, device.torch_device
    if size == 1:
        yield warning("links", "one rank, so no link was tried", "mm-doctor --num-processes 2, or more")
        return
    begin(f"all-reduce over {size} ranks")
    own = torch.empty(NUM_ELEMENTS, device=here)

    def all_reduce() -> bool:
        own.fill_(mesh.rank + 1.0)
        dist.all_reduce(own)
        return bool((own == size * (size + 1) / 2).all())

    seconds, is_right = _timed(all_reduce)
    wrong = [name for name, right in zip(names, by_rank(mesh, is_right), strict=True) if not right]
    speed = 2 * (size - 1) / size * own.nbytes / max(by_rank(mesh, seconds)) / 1e9
    yield fault("links", f"all-reduce over {size} ranks: wrong numbers on {', '.join(wrong)}", _CURE) if wrong else (
        ok("links", f"all-reduce over {size} ranks: {speed:.1f} GB/s in each direction (16 MiB of fp32)"))
    begin("messages to the next rank")
    arriving, sent = torch.empty(NUM_ELEMENTS, device=here), torch.full((NUM_ELEMENTS,), float(mesh.rank), device=here)

    def exchange() -> bool:
        both = [dist.P2POp(dist.isend, sent, (mesh.rank + 1) % size),
                dist.P2POp(dist.irecv, arriving, (mesh.rank - 1) % size)]
        for waiting in dist.batch_isend_irecv(both):
            waiting.wait()
        return bool((arriving == (mesh.rank - 1) % size).all())

    seconds, is_right = _timed(exchange)
    wrong = [f"from {names[rank - 1]} to {names[rank]}" for rank, right in enumerate(by_rank(mesh, is_right))
             if not right]
    speed = arriving.nbytes / max(by_rank(mesh, seconds)) / 1e9
    yield fault("links", f"messages arrive wrong {', '.join(wrong)}", _CURE) if wrong else (
        ok("links", f"messages to the next rank: {speed:.1f} GB/s (16 MiB)"))


def _timed(run: Callable[[], bool]) -> tuple[float, bool]:
    """The shortest time of ``run``, and whether its result was always right."""
    seconds, right = list[float](), list[bool]()
    for _ in range(_NUM_REPEATS):
        began = time.perf_counter()
        right.append(run())  # waits for the device
        seconds.append(time.perf_counter() - began)
    return min(seconds), all(right)


def _speeds(device: Device, mesh: Mesh, names: Sequence[str], begin: Callable[[str], None]) -> Diagnosis:
    """Whether some rank computes the same products more slowly than the others."""
    begin("matrix products")
    one = torch.full((_SIDE, _SIDE), 1.0, device=device.torch_device)
    seconds, _ = _timed(lambda: bool(((one @ one)[0, 0] == _SIDE).item()))
    of_ranks = by_rank(mesh, seconds)
    usual, slowest = median_low(of_ranks), max(of_ranks)
    name = names[of_ranks.index(slowest)]
    text = f"{_SIDE}^3 in fp32 takes {1000 * usual:.2f} ms"
    if slowest > _LATE * usual and device.platform.num_devices() is not None:  # ranks on the CPU share it
        return warning("matrix products", f"{text}, but {name} takes {slowest / usual:.1f} times as long",
                       "look at its clock, its temperature and other processes on it (nvidia-smi -q -d "
                       "CLOCK,PERFORMANCE, npu-smi info, top)")
    return ok("matrix products", f"{text}, and on the slowest, {name}, {1000 * slowest:.2f}")
