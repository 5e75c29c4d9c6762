"""Runs the program on two stages once for each fault, and writes how each rank ended and what all of them said.

Started by tests/parallel/health/test_watchdog.py: ``python -m tests.parallel.watchdog_worker DIRECTORY``; DIRECTORY
holds what ``tests.tiny_inputs`` writes.  Each fault leaves its output and found.json in DIRECTORY/FAULT.  There is no
launcher that could end a rank: this process imports everything once, forks the ranks of each fault and only waits.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from mm.device.device import Device
from tests.launch import fork_rank
from tests.parallel.faults import FAULTS, Fault

Device.pick("cpu")

from mm import train  # noqa: E402
from mm.errors import UserError  # noqa: E402
from mm.parallel.activity import Activity, Work  # noqa: E402
from mm.parallel.health import watchdog  # noqa: E402
from mm.parallel.health.watchdog import Watchdog  # noqa: E402
from mm.process import free_port  # noqa: E402
from mm.run import loop, preflight  # noqa: E402, F401

GUARD_SECONDS = 60.0
"""After which a job that does not end is killed."""
ITERATION = 2
JOBS_AT_ONCE = 4
"""Beside those whose fault has happened, most of which wait for a limit."""


class FaultyTrainer(loop.Trainer):
    """A run in which ``fault`` happens; the trainer asks nothing of it, the journal tells it when."""

    fault: Fault

    def run_steps(self) -> None:
        is_in_step = not self.fault.phase and self.mesh.rank == self.fault.rank
        if is_in_step or self.fault.kind == "interrupted":
            self.setup.stage.journal.listeners.append(self)
        super().run_steps()

    def begin(self, activity: Activity) -> None:
        """Cause the fault in the second step, at its work on microbatch 1; in the ViT, on any with images."""
        is_there = activity.work is self.fault.work and (
            activity.microbatch in (1, None) or activity.work is Work.VISION_FORWARD)
        if self.progress.iteration != ITERATION - 1 or not is_there:
            return
        Path(self.run.args.log_dir, "began").write_text(str(time.monotonic()), encoding="utf-8")
        match self.fault.kind:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "interrupted" | "interrupted alone":
                os.kill(os.getpid(), signal.SIGINT)
            case "raises":
                raise IndexError("seventeen is too many")
            case "stopped":
                stop_here(Path(self.run.args.log_dir))
            case "sleeps":
                time.sleep(10 * GUARD_SECONDS)
            case "user's mistake":
                raise UserError("sample 17 cannot be used")

    def end(self, activity: Activity) -> None:
        pass


def run_with(fault: Fault, inputs: Path) -> int:
    """On one rank: the program; returns its exit status."""
    (inputs / fault.name).mkdir(exist_ok=True)
    output = os.open(inputs / fault.name / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    FaultyTrainer.fault = fault
    loop.Trainer = FaultyTrainer
    if fault.phase and os.environ["RANK"] == str(fault.rank):
        StoppingWatchdog.fault, StoppingWatchdog.directory = fault, inputs / fault.name
        watchdog.Watchdog = StoppingWatchdog
    if fault.kind == "killed before":
        train.check_files = partial(die_once_expected, inputs / fault.name)
        Watchdog.meet = lambda entered: wait(entered, inputs / fault.name)
    is_alike = fault.kind == "set up otherwise" and os.environ["RANK"] != str(fault.rank)
    return train.main([
        "--device", "cpu", "--mm-model", str(inputs / f"{fault.model}.json"), "--mm-data", str(inputs / "data.json"),
        "--micro-batch-size", "1", "--global-batch-size", "4", "--seq-length", "512", "--train-iters", "3", "--lr",
        "1e-3", "--num-workers", "0", "--log-interval", "1", "--log-dir", str(inputs / fault.name),
        *save_flags(inputs, fault), *(() if is_alike else fault.flags),
    ])  # fmt: skip


def save_flags(inputs: Path, fault: Fault) -> list[str]:
    """Only where the fault is in a save or the export: without --save, a signal ends the run at once."""
    folder = inputs / fault.name
    return ["--save", str(folder / "save"), "--load", str(inputs / "hf"), "--export-hf", str(folder / "hf")] if (
        fault.phase in ("save", "export", "between")) else []


def stop_here(directory: Path) -> None:
    """Stop this process, as a debugger or a broken machine does."""
    (directory / "began").write_text(str(time.monotonic()), encoding="utf-8")
    os.kill(os.getpid(), signal.SIGSTOP)


class StoppingWatchdog(Watchdog):
    """A rank that is stopped in one phase, or just after it."""

    fault: Fault
    directory: Path

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with super().phase(name):
            if name == self.fault.phase and (name != "start" or self._beating.begun.is_set()):
                time.sleep(1.2)  # as long as a beat
                stop_here(self.directory)
            yield
        if self.fault.phase == "between" and name == "export":  # when the others leave
            stop_here(self.directory)


def wait(entered: Watchdog, directory: Path) -> None:
    """In place of the wait for all ranks: rank 1 has joined, and waits for rank 0."""
    entered._beating.joined.wait()
    (directory / "waits").touch()
    time.sleep(10 * GUARD_SECONDS)


def die_once_expected(directory: Path, *_: object) -> None:
    """In place of rank 0's look at the files."""
    while not (directory / "waits").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


class Job:
    """The ranks of one fault."""

    def __init__(self, fault: Fault, inputs: Path) -> None:
        self.fault, self.directory = fault, inputs / fault.name
        self.started, port = time.monotonic(), free_port()
        self.until = self.started + GUARD_SECONDS
        self.needed_guard = False
        self.statuses: list[int | None] = [None, None]
        """By rank, negative for a signal, as subprocess has them."""
        self.processes = [fork_rank(rank, 2, port, partial(run_with, fault, inputs)) for rank in range(2)]

    def is_busy(self) -> bool:
        """Whether the fault is still to come."""
        return not (self.directory / "began").exists()

    def is_over(self) -> bool:
        """Look which ranks have ended."""
        for rank, process in enumerate(self.processes):
            if self.statuses[rank] is None and (found := os.waitpid(process, os.WNOHANG))[0]:
                self.statuses[rank] = os.waitstatus_to_exitcode(found[1])
            elif self.statuses[rank] is None and time.monotonic() > self.until:
                self.needed_guard = True
                os.kill(process, signal.SIGKILL)
        return None not in self.statuses

    def write(self) -> None:
        """How it ended, and the seconds from the fault to the end of the last rank."""
        began = self.directory / "began"
        seconds = time.monotonic() - (float(began.read_text(encoding="utf-8")) if began.exists() else self.started)
        found = {"statuses": self.statuses, "seconds": seconds, "needed_guard": self.needed_guard}
        (self.directory / "found.json").write_text(json.dumps(found), encoding="utf-8")
        print(self.fault.name, found, flush=True)


def main(inputs: Path, only: list[str]) -> None:
    waiting, running = [fault for fault in FAULTS if not only or fault.name in only], []
    while waiting or running:
        while waiting and sum(job.is_busy() for job in running) < JOBS_AT_ONCE:
            running.append(Job(waiting.pop(0), inputs))
        for job in [job for job in running if job.is_over()]:
            job.write()
            running.remove(job)
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
