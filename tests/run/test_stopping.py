"""A run that is asked to stop saves after the running step and ends, and the same command continues it to the bit."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mm.lock import LOCK_FILE
from mm.process import free_port
from tests.files import ROOT
from tests.launch import warm_python
from tests.tiny_inputs import flags_of, metrics, run, write_inputs

NUM_STEPS = 40
COMPARED = ("iteration", "loss", "grad_norm", "lr", "consumed_samples", "num_tokens")


class Job:
    """A command that trains on two stages, from Hugging Face weights; it may be started again after it has stopped.

    It reads the samples itself: tests/test_restart.py stops a run that has data workers.
    """

    def __init__(self, inputs: Path, name: str, *more: str) -> None:
        self.folder = inputs / name
        self.words = flags_of(
            inputs, name, 2, "--num-workers", "0", "--train-iters", str(NUM_STEPS), "--load", str(inputs / "hf"),
            "--deterministic-mode", "--export-hf", str(self.folder / "hf"), *more,
        )  # fmt: skip
        self.save = self.folder / "save"

    def launch(self, stop: Callable[[int], None] = lambda _: None, *more: str) -> tuple[int, str]:
        """Run the command, and call ``stop`` with the launcher's process id after three steps; status and output."""
        command = [warm_python(), "-m", "mm.launch", "--nproc_per_node", "2", "--master_addr", "localhost",
                   "--master_port", str(free_port()), "-m", "mm.train", *self.words, *more]  # fmt: skip
        before = self.num_steps()
        with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT) as process:
            try:
                while process.poll() is None and self.num_steps() < before + 3:
                    time.sleep(0.01)
                stop(process.pid)
                said, _ = process.communicate(timeout=60)
            finally:
                process.kill()  # and its ranks, which end with it
        return process.returncode, said

    def num_steps(self) -> int:
        rows = self.folder / "logs" / "metrics.jsonl"
        return rows.read_bytes().count(b"\n") if rows.is_file() else 0

    def saved(self) -> int:
        """The iteration of the latest checkpoint."""
        return int((self.save / "latest_checkpointed_iteration.txt").read_text())

    def signal_rank_0(self, _: int) -> None:
        os.kill(json.loads((self.save / LOCK_FILE).read_text())["owner"]["pid"], signal.SIGUSR1)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("stopping"))


def test_a_stopped_run_saves_and_the_same_command_continues_to_the_bit(inputs: Path) -> None:
    """SIGUSR1 to one rank, and a time limit; each launch is the same command.

    It also saves in the background, which the undisturbed run does not.
    """
    whole = Job(inputs, "whole")
    job = Job(inputs, "stopped", "--async-save", "--save-interval", "2", "--save-retain-interval", "20")
    assert whole.launch()[0] == 0
    stops = [(job.signal_rank_0, (), "SIGUSR1", 138),
             (lambda _: None, ("--exit-duration-in-mins", "0.001"), "--exit-duration-in-mins", 0)]
    for stop, flags, cause, expected in stops:
        status, said = job.launch(stop, *flags)
        saved = job.saved()
        reported = f"stopped by {cause} after iteration {saved} of {NUM_STEPS}: continue from it with --load"
        assert status == expected and reported in said, said
        assert saved == job.num_steps() < NUM_STEPS and "Traceback" not in said, said
        assert not list(job.folder.rglob("*.tmp-*"))
    status, said = job.launch()
    assert status == 0 and "holds a checkpoint of the run that this command started: the run continues" in said, said
    status, said = job.launch()  # as after a kill between the export and the end
    assert status == 0 and "nothing to train" in said and "is already identical; nothing was written" in said, said
    ours, theirs = ([[row[key] for key in COMPARED] for row in metrics(inputs, name)] for name in ("stopped", "whole"))
    assert ours == theirs and len(ours) == NUM_STEPS
    assert sorted(path.name for path in job.save.glob("iter_*")) == [f"iter_00000{step}" for step in (20, 40)]
    files = sorted(path.name for path in (whole.save / f"iter_{NUM_STEPS:07d}").glob("*.safetensors"))
    assert len(files) == 6
    for name in files:
        states = [(one.save / f"iter_{NUM_STEPS:07d}" / name).read_bytes() for one in (job, whole)]
        assert states[0] == states[1], name


def test_a_run_goes_on_with_other_numbers_of_ranks(inputs: Path) -> None:
    """Data-parallel ranks whose optimizer state is split: 4, then 3.

    Every step has the same samples; gradients are summed in another order.
    """
    flags = ("--load", str(inputs / "hf"), "--use-distributed-optimizer", "--micro-batch-size", "1",
             "--global-batch-size", "12")
    run(inputs, "four ranks", 1, *flags, num_ranks=4)
    for num_ranks, more in ((4, ("--exit-interval", "2")), (3, ())):
        run(inputs, "resized", 1, *flags, *more, num_ranks=num_ranks)
    whole, resized = metrics(inputs, "four ranks"), metrics(inputs, "resized")
    for key in ("iteration", "consumed_samples", "lr", "num_tokens", "num_target_tokens", "num_patches", "num_images"):
        assert [row[key] for row in resized] == [row[key] for row in whole], key
    assert len(whole) == 6
    for key in ("loss", "grad_norm"):
        ours, theirs = ([row[key] for row in rows] for rows in (resized, whole))
        assert ours[:2] == theirs[:2] and ours == pytest.approx(theirs, rel=1e-6), key


STUCK = """
import hashlib, os, sys
from mm.process import run_command
from mm.process import StopSignals

def work(signals):
    with signals.deferred():
        print("begun", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # Python runs no handler meanwhile, as in a collective
    return 0

signals = StopSignals()
sys.exit(run_command(lambda: work(signals), lambda: "", signals=signals))
"""


def test_a_second_signal_ends_a_process_that_is_stuck() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        began = time.monotonic()
        while process.poll() is None and time.monotonic() < began + 60:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        took = time.monotonic() - began
        process.kill()
    assert process.returncode == 143
    assert took > 2  # signals that come soon after the first are the same request


SWALLOWED = """
import os, signal, sys, time
from mm.process import run_command

def work():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    except KeyboardInterrupt:
        print("swallowed", flush=True)
    try:
        time.sleep(60)
    finally:
        time.sleep(2.5)  # longer than it takes to remind again
        print("ended", flush=True)

sys.exit(run_command(work, lambda: ""))
"""


def test_a_stop_that_other_code_swallows_is_raised_again_but_does_not_interrupt_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", SWALLOWED], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (143, "swallowed\nended\n"), done.stderr
