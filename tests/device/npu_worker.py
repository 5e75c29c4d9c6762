"""Runs the trainer itself on the fake NPU or on the CPU, one run after another, and writes what the device saw as JSON.

Launched by tests/device/test_fake_npu.py: ``npu_worker npu|cpu RUNS.json OUTPUT``, by torchrun for ``npu``.  A run is a
list of flags of ``mm.train``.
"""

import json
import os
import sys
from pathlib import Path

from mm.process import free_port
from tests.stand_ins import fake_npu


def main(runs_file: str, output: str) -> int:
    import torch.distributed as dist

    from mm import train

    ports = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for run in json.loads(Path(runs_file).read_text(encoding="utf-8")):
        # A process group of its own for each run, whose port is chosen now: earlier, another process could take it.
        if os.environ["RANK"] == "0":
            ports.set(run["name"], str(free_port()))
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": ports.get(run["name"]).decode()}
        fake_npu.HOST_READS.clear()
        fake_npu.COLLECTIVES.clear()
        if status := train.main(run["flags"]):
            return status
        seen = {"host_reads": fake_npu.HOST_READS,
                "collectives": [[*name, count] for name, count in fake_npu.COLLECTIVES.items()]}
        Path(output, f"{run['name']}_{os.environ['RANK']}.json").write_text(json.dumps(seen), encoding="utf-8")
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "npu":
        os.environ["LOCAL_RANK"] = "0"  # each process sees one NPU, as under ASCEND_RT_VISIBLE_DEVICES
        fake_npu.start()
    sys.exit(main(*sys.argv[2:]))
