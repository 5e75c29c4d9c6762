"""A rank of a run whose first attempts are killed: ``restart_worker FLAGS...``, under torchrun.

In attempt 0 the last rank is killed in the validation after the fourth iteration, in attempt 1 the first rank in the
fifth iteration.  From attempt 1 on the first rank joins late.  Started by tests/test_restart.py.
"""

import os
import signal
import sys
import time

from mm import train
from mm.device.device import Device

Device.pick("cpu")

from mm.parallel.activity import Activity, Work  # noqa: E402
from mm.run import loop  # noqa: E402

LATE_SECONDS = 3.0
KILLED = {0: (1, 4, Work.FORWARD), 1: (0, 4, Work.BACKWARD)}
"""By attempt: the rank that is killed, how many steps have been made, and in which work; a forward pass after a step
that is validated is one of the validation."""


class KilledTrainer(loop.Trainer):
    """Kills its process at the iteration in ``KILLED``."""

    def run_steps(self) -> None:
        rank, *self.moment = KILLED.get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), (None,))
        if self.mesh.rank == rank:
            self.setup.stage.journal.listeners.append(self)
        super().run_steps()

    def begin(self, activity: Activity) -> None:
        if [self.progress.iteration, activity.work] == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, activity: Activity) -> None:
        pass


def main(flags: list[str]) -> int:
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) and os.environ["RANK"] == "0":
        time.sleep(LATE_SECONDS)
    if int(os.environ["TORCHELASTIC_MAX_RESTARTS"]):
        loop.Trainer = KilledTrainer
    # each replica holds the whole optimizer state, so that a survivor could save it
    return train.main([flag for flag in flags if flag != "--use-distributed-optimizer"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
