"""Ranks whose sums and messages take a known time at least: ``python -m tests.planner.links_worker OUTPUT.json``."""

import json
import sys
import time
from pathlib import Path
from typing import Any

SECONDS = 0.02


def main(output: Path) -> None:
    from mm.device.device import Device

    device = Device.pick("cpu")
    import torch.distributed as dist

    from mm.config.model import ModelConfig
    from mm.doctor.step import model
    from mm.parallel import mesh as parallel
    from mm.planner import links

    tiny: ModelConfig = model()
    mesh = parallel.start(device, tiny, tp_size=1)
    all_reduce, send = dist.all_reduce, dist.send

    def slow_all_reduce(tensor: Any, *args: Any, **more: Any) -> Any:
        time.sleep(SECONDS)
        return all_reduce(tensor, *args, **more)

    def slow_send(tensor: Any, *args: Any, **more: Any) -> Any:
        time.sleep(SECONDS)
        return send(tensor, *args, **more)

    links._BYTES, links.NUM_REPEATS = (4 << 10, 8 << 10), 3
    dist.all_reduce, dist.send = slow_all_reduce, slow_send
    message, sums = links.message_law(device, mesh), links.all_reduce_laws(device, mesh)
    dist.all_reduce, dist.send = all_reduce, send
    assert message is not None
    if mesh.rank == 0:
        output.write_text(json.dumps({"message": message.seconds(4 << 10),
                                      "sums": {size: law.seconds(4 << 10) for size, law in sums.items()}}))
    parallel.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
