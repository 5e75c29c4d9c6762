"""Counts the bytes that a rank keeps between two steps, in tensors of real processes, and writes them as JSON.

Launched by tests/run/test_kept_bytes.py: ``kept_worker OUTPUT.json``, on two ranks.
"""

import gc
import json
import os
import sys
import warnings
from pathlib import Path

from mm.device.device import Device

Device.pick("cpu")  # before megatron is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from mm.config import run as config  # noqa: E402
from mm.config.data import DataConfig  # noqa: E402
from mm.cost.stage_memory import stage_sizes  # noqa: E402
from mm.parallel import mesh as parallel  # noqa: E402
from mm.run.optim.block_adam import BlockAdam  # noqa: E402
from tests.parallel.kept_cases import STATES, STRATEGIES  # noqa: E402
from tests.parallel.state_run import Layout, Run  # noqa: E402


def live_bytes() -> dict[int, int]:
    """The memory of all tensors of this process, by its address."""
    gc.collect()
    found: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are looked at
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    for one in tensors:
        storage = one.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def wait_for_workers(mesh: parallel.Mesh) -> None:
    """Wait until gloo's threads hold no tensors: on a busy machine they release them some time after a collective, but
    before the group's next one."""
    groups = (one for one in vars(mesh.groups).values() if isinstance(one, dist.ProcessGroup))
    for group in dict.fromkeys(groups):
        dist.barrier(group)


def kept(layout: Layout) -> tuple[int, int, int, int]:
    """Bytes that this rank keeps after a step, and those of the dry run; both on the device, and in host memory.

    fp32 copies of bf16 gradients exist from the update to the next step, which clears them before its first pass.
    """
    run = Run(layout)
    run.train(1)
    expected = config.Run(run.args, run.config, DataConfig("hf", ("data.json",)), run.mesh.world_size)
    size = stage_sizes(expected, run.config.placement())[run.mesh.pp_rank]
    on_host = [state for one in run.optimizer.chained_optimizers if isinstance(one.optimizer, BlockAdam)
               for states in one.optimizer._host.values() for state in states.values()]
    num_host_bytes, places = sum(one.nbytes for one in on_host), {one.untyped_storage().data_ptr() for one in on_host}
    wait_for_workers(run.mesh)
    before = live_bytes()
    del run, on_host
    after = live_bytes()
    freed = sum(num_bytes for place, num_bytes in before.items() if place not in after and place not in places)
    return freed, size.total_bytes + size.update_bytes, num_host_bytes, size.host_bytes


def main(output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=parallel.timedelta(minutes=2))
    found = {}
    for strategy in STRATEGIES:
        for name, (precision, flags) in STATES.items():
            flags = ("--data-parallel-sharding-strategy", strategy, *flags)
            found[f"{strategy}, {name}"] = kept(Layout(precision=precision, flags=flags))
    if dist.get_rank() == 0:
        output.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
