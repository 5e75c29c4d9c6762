"""A rank of a run whose ranks are nodes with disks of their own: ``nodes_worker DIRECTORY KILLED FLAGS...``.

A node is a working directory of its own: a relative path names another directory on each.  KILLED is
``RANK@ITERATION``, and that rank is killed when it should make this checkpoint appear, or ``-``.  Started by
tests/run/checkpoint/test_disks.py.
"""

import os
import signal
import sys
from pathlib import Path

from mm import train
from mm.device.device import Device

Device.pick("cpu")

from mm.checkpoint import training_files as files  # noqa: E402
from mm.run.checkpoint import disks  # noqa: E402


def main(directory: str, killed: str, flags: list[str]) -> int:
    rank, publish = os.environ["RANK"], files.publish

    def dies(temporary: Path) -> Path:
        if killed == f"{rank}@{int(temporary.name.partition('.')[0].removeprefix('iter_'))}":
            os.kill(os.getpid(), signal.SIGKILL)
        return publish(temporary)

    files.publish, disks.WAIT_SECONDS = dies, 1.0
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    node = Path(directory) / f"node{rank}"
    node.mkdir(parents=True, exist_ok=True)
    os.chdir(node)
    return train.main(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
