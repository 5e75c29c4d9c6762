"""One process creates a file while the others wait, even if it fails or dies."""

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from mm.data.index import lock
from mm.data.index.lock import making

CONTEXT = multiprocessing.get_context("forkserver")


def make(path: Path, answers: Connection) -> None:
    """Reports its start, waits for permission, and reports its end."""
    answers.send("begins")
    with making(path, "a thing"):
        answers.send("makes")
        answers.recv()
        answers.send("made")


def begin(path: Path) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=make, args=(path, there))
    process.start()
    there.close()
    assert here.recv() == "begins"
    return process, here


def test_others_wait_for_the_owner_and_take_over_if_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "lock"
    first, of_first = begin(path)
    assert of_first.recv() == "makes"
    second, of_second = begin(path)
    assert not of_second.poll(1.0)
    of_first.send("go")
    assert of_first.recv() == "made" and of_second.recv() == "makes"
    third, of_third = begin(path)
    assert not of_third.poll(1.0)
    os.kill(second.pid or 0, signal.SIGKILL)
    assert of_third.recv() == "makes"  # long before _STALE_SECONDS
    of_third.send("go")
    assert of_third.recv() == "made"
    for process in (first, second, third):
        process.join()
    assert not any(path.parent.iterdir())


def elsewhere(path: Path) -> str:
    """The lock of a process on another node."""
    content = json.dumps({"node": "another", "pid": os.getpid(), "began": 0.0, "host": "far", "token": "x"})
    path.write_text(content)
    return content


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_lock_of_another_node_is_valid_while_it_changes(tmp_path: Path, monkeypatch, capsys, is_readable) -> None:
    """It is taken over after it has not changed for a while, regardless of that node's clock.  Another user's may not
    be readable."""
    monkeypatch.setattr(lock, "_STALE_SECONDS", 1.0)
    monkeypatch.setattr(lock, "_NOTE_SECONDS", (0.5,))
    path, seen, read, num_reads = tmp_path / "lock", [], Path.read_text, 0
    content = elsewhere(path)

    def denied(self: Path, *args, **kwargs) -> str:
        nonlocal num_reads
        found, num_reads = read(self, *args, **kwargs), num_reads + 1
        if found == content:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return found

    if not is_readable:
        monkeypatch.setattr(Path, "read_text", denied)

    def wait() -> None:
        with making(path, "the index of records.json"):
            seen.append("makes")

    waiting = threading.Thread(target=wait)
    waiting.start()
    for number in range(12):  # longer than _STALE_SECONDS
        os.utime(path, (number, number))
        time.sleep(0.25)
        assert not seen
    waiting.join()
    assert seen == ["makes"] and not path.exists()
    said = capsys.readouterr().err
    holder = f"process {os.getpid()} on far" if is_readable else "another user's process"
    assert f"note: waiting for {holder}, which creates the index of records.json: " in said
    assert num_reads < 100  # it sleeps between them


def test_a_new_lock_is_not_removed_instead_of_an_old_one(tmp_path: Path) -> None:
    """The owner ends, and another one starts, between reading the lock and removing it."""
    path = tmp_path / "lock"
    content = elsewhere(path)
    lock._take_away(path, "what stood there before")
    assert path.read_text() == content
    lock._take_away(path, content)
    assert not any(tmp_path.iterdir())


def test_a_lock_is_kept_alive_and_given_up_after_an_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(lock, "_BEAT_SECONDS", 0.05)
    path = tmp_path / "lock"
    with pytest.raises(KeyError), making(path, "a thing"):
        changed = path.stat().st_mtime_ns
        while path.stat().st_mtime_ns == changed:
            time.sleep(0.02)
        raise KeyError
    assert not path.exists()
