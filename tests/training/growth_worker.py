"""A rank that counts what its process holds, step by step: ``growth_worker FOLDER FLAGS...``, with flags of mm.train.

Started by tests/training/test_growth.py.  FOLDER gets a list of counts for each rank.
"""

import ctypes
import gc
import json
import os
import sys
import threading
from pathlib import Path

os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # torch's record of collectives, which grows until it has 2000

from mm import train
from mm.device.device import Device

Device.pick("cpu")

from mm.parallel.activity import Activity, Work  # noqa: E402
from mm.training import loop  # noqa: E402

EARLY, LATE = range(26, 36, 2), range(56, 66, 2)
"""Steps at which to count: a save or a validation takes memory for a while, at some of them."""


class Allocated(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


class CountingTrainer(loop.Trainer):
    """Counts when some of its steps begin."""

    def run_steps(self) -> None:
        self.library = ctypes.CDLL(None)
        self.library.mallinfo2.restype = Allocated
        self.counts: list[dict[str, int]] = []
        self.setup.stage.journal.listeners.append(self)
        super().run_steps()
        Path(sys.argv[1], f"rank_{self.mesh.rank}.json").write_text(json.dumps(self.counts))

    def begin(self, activity: Activity) -> None:
        step = self.progress.iteration
        is_counted = bool(self.counts) and self.counts[-1]["step"] == step
        if activity.work is not Work.DATA or is_counted or step not in (*EARLY, *LATE):
            return
        gc.collect()
        memory = self.library.mallinfo2()
        self.counts.append({
            "step": step, "objects": len(gc.get_objects()), "bytes": memory.uordblks + memory.hblkhd,
            "blocks": sys.getallocatedblocks(), "files": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
        })  # fmt: skip

    def end(self, activity: Activity) -> None:
        pass


loop.Trainer = CountingTrainer

if __name__ == "__main__":
    sys.exit(train.main(sys.argv[2:]))
