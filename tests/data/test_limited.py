import os
import pickle
import signal
import threading
import time

import numpy as np
import psutil
import pytest

from mm.data.limited import LimitedProcess, ProcessEndedError
from mm.errors import UserError
from mm.process import STOPPING


@pytest.fixture(scope="module")
def process():
    one = LimitedProcess("tests.data.limited_worker")
    yield one
    one.close()


def test_content_goes_there_and_comes_back_through_shared_memory(process):
    for num_bytes in (5, 0, 3 << 20, 40 << 20, 7):
        content = np.random.default_rng(num_bytes).bytes(num_bytes)
        reply = process.ask({"task": "echo"}, content)
        assert process.shared(reply["shape"]).tobytes() == content


def test_secrets_of_the_environment_stay_here(monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "HARMLESS"):
        monkeypatch.setenv(name, "x")
    one = LimitedProcess("tests.data.limited_worker")
    environment = one.ask({"task": "echo"})["environment"]
    one.close()
    assert {name for name in os.environ if name not in environment} == {
        "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"}


def test_files_of_the_current_folder_do_not_stand_in_for_modules(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path)
    one = LimitedProcess("tests.data.limited_worker")
    assert one.ask({"task": "echo"})
    one.close()


def test_memory_has_a_limit_and_the_next_request_is_answered(process):
    before = psutil.Process().memory_info().rss
    assert process.ask({"task": "allocate", "num_bytes": 100 << 20})["size"] == 100 << 20
    with pytest.raises(ProcessEndedError, match="more than 256 MiB of memory") as error:
        process.ask({"task": "allocate", "num_bytes": 4 << 30})
    assert error.value.is_large and not error.value.is_late
    assert process.ask({"task": "echo"})
    assert psutil.Process().memory_info().rss - before < 50 << 20


def test_shared_memory_counts_too(process):
    with pytest.raises(ProcessEndedError, match="more than 256 MiB of memory") as error:
        process.ask({"task": "share", "num_bytes": 1 << 30})
    assert error.value.is_large
    assert process.ask({"task": "echo"})


def test_an_end_within_a_message_is_reported_as_an_end(process):
    with pytest.raises(ProcessEndedError, match="by signal SIGKILL"):
        process.ask({"task": "stop in a message"})
    assert process.ask({"task": "echo"})


@pytest.mark.parametrize("task", ["compute", "sleep"])
def test_time_has_a_limit(process, task):
    """Processor time while it computes, elapsed time while it sleeps."""
    start = time.monotonic()
    with pytest.raises(ProcessEndedError) as error:
        process.ask({"task": task})
    assert error.value.is_late and time.monotonic() - start < 10
    assert process.ask({"task": "echo"})


def test_a_crash_is_reported_with_its_signal(process):
    with pytest.raises(ProcessEndedError, match="by signal SIGSEGV") as error:
        process.ask({"task": "crash"})
    assert not error.value.is_late
    assert process.ask({"task": "echo"})


def test_refusals_leave_the_process_running_and_mistakes_of_the_program_do_not(process):
    process.ask({"task": "echo"})
    number = process.pid
    with pytest.raises(UserError, match=r"^not this one\.$"):
        process.ask({"task": "refuse"})
    assert process.pid == number
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a mistake in the program"):
        process.ask({"task": "fail"})
    assert process.pid is None


def test_a_pickled_one_has_its_own_process(process):
    process.ask({"task": "echo"})
    other = pickle.loads(pickle.dumps(process))
    assert other.pid is None
    other.ask({"task": "echo"})
    assert other.pid not in (None, process.pid)
    other.close()


def test_threads_take_turns(process):
    def ask(number):
        content = bytes([number]) * 1000
        for _ in range(20):
            with process:
                shape = process.ask({"task": "echo"}, content)["shape"]
                right.append(process.shared(shape).tobytes() == content)

    right = []
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 80


def test_closing_twice_closes_no_other_file(process):
    """A number of a closed file is given to the next."""
    process.ask({"task": "echo"})
    process.close()
    reader, writer = os.pipe()
    process.close()
    os.write(writer, b"x")
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_to_all_processes_of_a_job_does_not_end_one_that_starts(number):
    one = LimitedProcess("tests.data.limited_worker")
    one._start()
    os.kill(one.pid, number)
    assert one.ask({"task": "echo"})
    one.close()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*STOPPING}
