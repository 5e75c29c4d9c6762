"""Runs the trainer itself on the fake NPU or on the CPU, one run after another, and writes what the device saw as JSON.

Launched by tests/device/test_fake_npu.py: ``npu_worker OUTPUT RUNS.json`` on ranks, which is on the CPU; or once,
without a launcher, ``npu_worker npu OUTPUT RUNS_OF_ONE_RANK.json RUNS_OF_TWO.json``: it forks the ranks itself, from a
process that has the fake NPU and has imported everything.  A run is a list of flags of ``mm.train``.
"""

import json
import os
import sys
from pathlib import Path

from mm.device.device import Device
from mm.process import free_port
from tests.forked import launch
from tests.stand_ins import fake_npu


def main(output: str, runs_file: str) -> int:
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


def fork_ranks(output: str, *runs_files: str) -> int:
    """Run each file of runs on one rank more than the one before."""
    fake_npu.start()
    Device.pick("npu")  # before megatron is imported
    from mm.run import loop, preflight  # noqa: F401

    for num_ranks, runs_file in enumerate(runs_files, start=1):
        child = os.fork()
        if not child:
            os._exit(launch(num_ranks, "tests.device.npu_worker", [output, runs_file]))
        _, status = os.waitpid(child, 0)
        if status:
            return 1
    return 0


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"  # each process sees one NPU, as under ASCEND_RT_VISIBLE_DEVICES
    sys.exit(fork_ranks(*sys.argv[2:]) if sys.argv[1] == "npu" else main(*sys.argv[1:]))
