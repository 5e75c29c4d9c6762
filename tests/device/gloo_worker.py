"""Completes thousands of coalesced collectives of one gloo group as fast as its workers can.

Two long collectives come first, so that those after them are queued when the workers are free.
"""

import os

from mm.device.device import Device

if __name__ == "__main__":
    Device.pick("cpu")

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    alone = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
    pairs = [(torch.empty(size), torch.ones(size)) for size in [10_000_000] * 2 + [1] * 3000]
    for _ in range(5):
        works = []
        for whole, piece in pairs:
            with dist._coalescing_manager(async_ops=True) as work:
                dist.all_gather_into_tensor(whole, piece, async_op=True)
            works.append(work)
        for work in works:
            work.wait()
    assert all(torch.equal(whole, piece) for whole, piece in pairs)
    os._exit(0)
