"""Work in other processes: in order, whatever a decoder does to its process, and no process outlives its owner."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from itertools import count

import pytest
import torch

from mm.data import workers
from mm.data.sample import Inline
from mm.data.workers import Prepared, decoding
from mm.errors import UserError
from mm.process import STOPPING, began
from tests.files import ROOT


def read(item: tuple[str, str]) -> tuple[int, str]:
    """Decode the file ``item[1]``, which does to the process what ``item[0]`` says; the process, and the result."""
    what, name = item
    pid = os.getpid()
    try:
        with decoding("good.png"):
            pass
        with decoding(Inline(name, what.encode()) if what == "embedded" else name, 0.5):
            match what:
                case "crash" | "embedded":
                    os.kill(pid, signal.SIGSEGV)
                case "kill":
                    os.kill(pid, signal.SIGKILL)
                case "exit":
                    os._exit(3)
                case "hang":
                    while True:
                        pass
                case "fill":
                    return pid, str(len(bytearray(workers.ROOM_BYTES + (1 << 30))))
                case "refuse":
                    raise UserError(f"{name}: is empty.")
    except UserError as error:
        return pid, str(error)
    return pid, "read"


BAD = {
    "crash": "crash.png: its decoder crashed (SIGSEGV); re-encode or remove it.",
    "kill": "kill.png: its decoder was killed, perhaps because memory ran out; re-encode or remove it.",
    "exit": "exit.png: its decoder ended with status 3; re-encode or remove it.",
    "hang": "hang.png: its decoder took too long (videos: video_timeout of the data JSON); re-encode or remove it.",
    "fill": "fill.png: decoding needs more than 4 GiB of memory; re-encode or remove it.",
    "refuse": "refuse.png: is empty.",
    "embedded": "embedded.png: its decoder crashed (SIGSEGV); re-encode or remove it.",
}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_file_that_ends_its_worker_costs_its_own_result_only(num_processes: int) -> None:
    items = [("", f"{number}.png") for number in range(30)]
    for number, what in enumerate(BAD):
        items[3 * number + 1] = what, f"{what}.png"
    items[29] = items[1]
    results = Prepared(read, items, num_processes, 3)
    found = [next(results) for _ in items]
    with pytest.raises(StopIteration):
        next(results)
    assert [text for _, text in found] == [BAD.get(what, "read") for what, _ in items]
    assert found[28][0] == found[29][0] or num_processes > 1, "a file that ended a worker once is not read again"
    assert os.getpid() not in {pid for pid, _ in found}
    results.close()
    assert multiprocessing.active_children() == []


def test_another_embedded_file_of_the_same_name_is_read() -> None:
    results = Prepared(decode, [b"bad", b"good", b"bad"], 1, 1)
    assert list(results) == ["data:image: its decoder ended with status 1; re-encode or remove it.", "good",
                             "data:image: its decoder ended with status 1; re-encode or remove it."]
    results.close()


def decode(content: bytes) -> str:
    try:
        with decoding(Inline("data:image", content)):
            return "good" if content == b"good" else str(os._exit(1))
    except UserError as error:
        return str(error)


def test_without_a_worker_nothing_is_limited() -> None:
    assert list(Prepared(read, [("", "a"), ("refuse", "b")], 0, 1)) == [
        (os.getpid(), "read"), (os.getpid(), "b: is empty.")]


def fail(item: int) -> torch.Tensor:
    """A result, an error, or the end of the process outside of any file."""
    if item == 2:
        raise KeyError("a mistake in the program")
    if item == 3:
        os._exit(7)
    return torch.arange(item + 4)


@pytest.mark.parametrize(("item", "kind", "message"), [
    (2, KeyError, "a mistake"), (3, UserError, "a data worker ended: its process ended with status 7")])
def test_other_errors_of_the_work_are_raised(item: int, kind: type[Exception], message: str) -> None:
    results = Prepared(fail, [1, item], 1, 2)
    assert next(results).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(kind, match=message):
        next(results)
    results.close()


def stops(number: int) -> int:
    return next(iter(range(1 - number)))  # forgets that there may be none


@pytest.mark.parametrize("num_processes", [0, 1])
def test_a_stop_iteration_of_the_work_does_not_end_the_stream(num_processes: int) -> None:
    results = Prepared(stops, range(3), num_processes, 1)
    assert next(results) == 0
    with pytest.raises(RuntimeError, match="stops raised StopIteration for item 1"):
        next(results)
    results.close()


def signalled(number: int) -> int:
    os.kill(os.getpid(), number)
    return number


def test_a_signal_to_all_processes_of_a_job_ends_no_worker() -> None:
    results = Prepared(signalled, STOPPING, 1, 1)
    assert list(results) == list(STOPPING)
    results.close()


RUN = """
import os, signal, sys
from itertools import count
from multiprocessing import forkserver
from mm.data.workers import Prepared

results = Prepared(abs, count(), 2, 2)
next(results)
pids = [forkserver._forkserver._forkserver_pid, *(one.process.pid for one in results._workers._workers)]
for pid in pids:
    os.kill(pid, signal.SIGSTOP)
print(*pids, flush=True)
if sys.argv[1] == "fails":
    raise SystemExit(3)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("end", "status"), [("fails", 3), ("is killed", -signal.SIGKILL)])
def test_stopped_processes_end_with_the_run(end: str, status: int) -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN, end], cwd=ROOT, stdout=subprocess.PIPE,
                           env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert run.stdout is not None
    pids = [int(word) for word in run.stdout.readline().split()]
    run.stdout.close()
    try:
        assert len(pids) == 3 and run.wait(20) == status
        deadline = time.monotonic() + 10
        while (left := [pid for pid in pids if began(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left
    finally:
        for pid in filter(began, pids):
            os.kill(pid, signal.SIGKILL)
        run.kill()
        run.wait()


def test_results_are_computed_ahead_and_no_further() -> None:
    taken = count()
    results = Prepared(abs, taken, 2, 3)
    assert next(results) == 0 and next(taken) == 7
    results.close()
