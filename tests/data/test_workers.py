"""Work in other processes: none outlives the one that it works for, and no error is lost."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mm.data.workers import Prepared
from mm.process import began
from tests.files import ROOT


def stops(number: int) -> int:
    return next(iter(range(1 - number)))  # forgets that there may be none


@pytest.mark.parametrize("num_processes", [0, 1])
def test_a_stop_iteration_of_the_work_does_not_end_the_stream(num_processes):
    results = Prepared(stops, range(3), num_processes, 1)
    assert next(results) == 0
    with pytest.raises(RuntimeError, match="stops raised StopIteration for item 1"):
        next(results)
    results.close()


RUN = """
import os, signal, sys
from itertools import count
from multiprocessing import forkserver
from mm.data.limited import LimitedProcess
from mm.data.workers import Prepared

decoder = LimitedProcess("tests.data.limited_worker")
decoder.ask({"task": "echo"})
results = Prepared(abs, count(), 2, 2)
next(results)
pids = [decoder.pid, forkserver._forkserver._forkserver_pid, *(one.pid for one in results._results._workers)]
print(*pids, flush=True)
for pid in pids:
    os.kill(pid, signal.SIGSTOP)
if sys.argv[1] == "closes":
    results.close()
elif sys.argv[1] == "fails":
    raise SystemExit(3)
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("end", "status"), [("closes", 0), ("fails", 3), ("is killed", -signal.SIGKILL)])
def test_stopped_processes_end_with_the_run(end, status):
    run = subprocess.Popen([sys.executable, "-c", RUN, end], cwd=ROOT, stdout=subprocess.PIPE,
                           env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert run.stdout is not None
    pids = [int(word) for word in run.stdout.readline().split()]
    assert len(pids) == 4
    try:
        assert run.wait(60) == status
        deadline = time.monotonic() + 20
        while (left := [pid for pid in pids if began(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left
    finally:
        for pid in filter(began, pids):
            os.kill(pid, signal.SIGKILL)
        run.kill()
        run.stdout.close()
