"""Runs the program once for each case of tests/training/test_dying.py, with its fault and then again without.

Started as ``python -m tests.training.dying_worker DIRECTORY``, where DIRECTORY holds what ``tests.tiny_inputs`` writes.
Each launch leaves its output in DIRECTORY/CASE and its ranks' statuses in DIRECTORY/CASE/statuses.json.  There is no
launcher that could end a rank: this process imports everything once and forks the ranks.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from mm.device.device import Device
from tests.launch import fork_rank
from tests.training.dying_cases import CASES, Case

Device.pick("cpu")

from mm import train  # noqa: E402
from mm.errors import UserError  # noqa: E402
from mm.parallel.activity import Activity, Work  # noqa: E402
from mm.ports import free_port  # noqa: E402
from mm.training import preflight, run  # noqa: E402, F401
from tests.tiny_inputs import flags_of  # noqa: E402

GUARD_SECONDS = 90.0
CASES_AT_ONCE = 3


class FaultyTrainer(run.Trainer):
    """A run in which the fault of ``case`` happens in a backward pass."""

    case: Case

    def run_steps(self) -> None:
        if self.mesh.rank == self.case.rank:
            self.setup.stage.journal.listeners.append(self)
        super().run_steps()

    def begin(self, activity: Activity) -> None:
        if self.progress.iteration != self.case.iteration - 1 or activity.work is not Work.BACKWARD:
            return
        match self.case.fault:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raises":
                raise IndexError("seventeen is too many")
            case "user's mistake":
                raise UserError("sample 17 cannot be used")

    def end(self, activity: Activity) -> None:
        pass


def run_rank(case: Case, inputs: Path, output: str) -> int:
    """On one rank: the program; returns its exit status."""
    (inputs / case.name).mkdir(exist_ok=True)
    descriptor = os.open(inputs / case.name / output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if output == "failed":
        FaultyTrainer.case = case
        run.Trainer = FaultyTrainer
    limit = ("--step-timeout", "8") if output == "failed" and case.fault == "stopped" else ()
    return train.main(flags_of(inputs, case.name, case.num_stages, "--num-workers", "0", "--load", str(inputs / "hf"),
                               "--deterministic-mode", *case.flags, *limit))


class Launch:
    """The ranks of one launch."""

    def __init__(self, case: Case, inputs: Path, output: str) -> None:
        self.case, self.inputs, self.output, port = case, inputs, output, free_port()
        self.until = time.monotonic() + GUARD_SECONDS
        self.statuses: list[int | None] = [None, None]
        self.processes = [fork_rank(rank, 2, port, partial(run_rank, case, inputs, output)) for rank in range(2)]

    def is_over(self) -> bool:
        for rank, process in enumerate(self.processes):
            if self.statuses[rank] is None and (found := os.waitpid(process, os.WNOHANG))[0]:
                self.statuses[rank] = os.waitstatus_to_exitcode(found[1])
            elif self.statuses[rank] is None and time.monotonic() > self.until:
                os.kill(process, signal.SIGKILL)
        return None not in self.statuses

    def close(self) -> None:
        folder = self.inputs / self.case.name
        (folder / f"{self.output}.json").write_text(json.dumps(self.statuses))
        if self.output == "failed":  # what the survivors left, before the next launch
            names = sorted(path.name for path in (folder / "save").iterdir()) if (folder / "save").is_dir() else []
            (folder / "left.json").write_text(json.dumps(names))


def main(inputs: Path, only: list[str]) -> None:
    waiting = [case for case in CASES if not only or case.name in only]
    running: list[Launch] = []
    while waiting or running:
        while waiting and len(running) < CASES_AT_ONCE:
            case = waiting.pop(0)
            running.append(Launch(case, inputs, "failed" if case.fault else "again"))
        over = [launch for launch in running if launch.is_over()]
        running = [launch for launch in running if launch not in over]
        for launch in over:
            launch.close()
            if launch.output == "failed":
                running.append(Launch(launch.case, inputs, "again"))
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
