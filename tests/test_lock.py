"""One run at a time per directory and one maker of an index, even after the previous one was killed."""

import json
import multiprocessing
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mm import lock
from mm.errors import UserError
from mm.lock import LOCK_FILE, Claim, Owner, making

CONTEXT = multiprocessing.get_context("forkserver")


def content_of(owner: Owner) -> bytes:
    return json.dumps({"owner": asdict(owner)}).encode() + b"\n"


def take(directories: dict[str, str]) -> Claim:
    found = Claim()
    found.add(directories, print)
    return found


def in_child(action: Callable[[], int]) -> int:
    """Run ``action`` in a fork and return its process id.  The result of ``action`` is the exit status."""
    child = os.fork()
    if child:
        return child
    status = 99
    try:
        status = action()
    finally:
        os._exit(status)


def holder(directory: Path) -> int:
    """Start a process that holds ``directory`` until it is killed; return its id once it has the lock."""

    def hold() -> int:
        take({"--save": str(directory)})
        signal.pause()
        return 0

    child = in_child(hold)
    while not (directory / LOCK_FILE).exists() or Owner.read((directory / LOCK_FILE).read_bytes()) is None:
        time.sleep(0.01)
    return child


def test_a_run_that_ends_while_it_locks_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog's thread ends the run right after it released the directories."""
    is_writing, release = threading.Event(), threading.Event()

    def slow_disk(_: int) -> None:
        is_writing.set()
        release.wait(10)

    monkeypatch.setattr(lock.os, "fsync", slow_disk)
    found = Claim()
    locking = threading.Thread(target=found.add, args=({"--save": str(tmp_path)}, print))
    locking.start()
    assert is_writing.wait(10)
    ending = threading.Thread(target=found.release)
    ending.start()
    time.sleep(0.1)
    assert ending.is_alive() and (tmp_path / LOCK_FILE).exists()
    release.set()
    locking.join()
    ending.join()
    assert not (tmp_path / LOCK_FILE).exists()
    found.add({"--log-dir": str(tmp_path / "later")}, print)  # another directory can still be locked
    found.release()


def test_a_second_run_is_rejected_while_the_first_runs(tmp_path: Path) -> None:
    with take({"--save": str(tmp_path / "a/save"), "--log-dir": str(tmp_path / "logs")}):
        for directories in ({"--save": str(tmp_path / "a" / ".." / "a/save")}, {"--save": str(tmp_path / "logs")}):
            (given,) = directories.values()
            with pytest.raises(UserError) as refused:
                take({"--log-dir": str(tmp_path / "other"), **directories})
            (problem,) = refused.value.problems
            assert f"--save {given} is being written by another run, process {os.getpid()} on {socket.gethostname()} " \
                   "since 20" in problem
            assert list((tmp_path / "other").iterdir()) == []  # already taken locks are released
    assert not list(tmp_path.rglob(f"{LOCK_FILE}*"))
    take({"--save": str(tmp_path / "a/save"), "--log-dir": str(tmp_path / "a/save")}).release()  # one lock


def test_a_killed_run_is_replaced_at_once(tmp_path: Path) -> None:
    child = holder(tmp_path)
    os.kill(child, signal.SIGSTOP)  # a stopped process may continue
    with pytest.raises(UserError, match=f"process {child} on "):
        take({"--save": str(tmp_path)})
    os.kill(child, signal.SIGKILL)
    while True:
        with suppress(UserError):  # it may not be dead yet; then it is a zombie, whose exit status has not been read
            take({"--save": str(tmp_path)}).release()
            break
    os.waitpid(child, 0)


def test_a_reused_process_id_is_not_the_owner(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_bytes(content_of(replace(Owner.here(), started="1")))
    take({"--save": str(tmp_path)}).release()


@pytest.mark.parametrize(("error", "is_taken"), [(PermissionError, False), (ProcessLookupError, True)])
def test_a_run_whose_process_is_hidden_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError], is_taken: bool
) -> None:
    """Another user's, if ``/proc`` hides it: the kernel forbids to signal a process only while there is one."""

    def refuse_signal(*_: int) -> None:
        raise error

    (tmp_path / LOCK_FILE).write_bytes(content_of(replace(Owner.here(), pid=17)))
    monkeypatch.setattr(lock, "began", lambda pid: None if pid == 17 else "1")
    monkeypatch.setattr(lock.os, "kill", refuse_signal)
    if is_taken:
        take({"--save": str(tmp_path)}).release()
    else:
        with pytest.raises(UserError, match="is being written by another run, process 17 on"):
            take({"--save": str(tmp_path)})


def test_only_one_of_many_runs_replaces_a_killed_one(tmp_path: Path, monkeypatch) -> None:
    remove, random = lock._remove, Random(0)

    def remove_slowly(*arguments: Any) -> None:
        """The lock file may be replaced between finding and removing it."""
        time.sleep(0.004 * Random(os.getpid() + random.randrange(100)).random())
        remove(*arguments)

    monkeypatch.setattr(lock, "_remove", remove_slowly)
    for number in range(4):
        directory, found = tmp_path / str(number), tmp_path / f"found {number}"
        found.mkdir()
        child = holder(directory)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        follow_all(directory, found, num_runs=6)
        assert sorted(path.read_text() for path in found.iterdir()) == ["has it", *["refused"] * 5]


def follow_all(directory: Path, found: Path, num_runs: int) -> None:
    """Start runs at the same time; each writes whether it got ``directory``, and a holder waits for all of them."""

    def follow() -> int:
        try:
            take({"--save": str(directory)})
            text = "has it"
        except UserError:
            text = "refused"
        part = found.with_name(f"{os.getpid()}.part")
        part.write_text(text)
        part.rename(found / str(os.getpid()))
        while len(list(found.iterdir())) < num_runs:
            time.sleep(0.01)
        return 0

    children = [in_child(follow) for _ in range(num_runs)]
    assert [os.waitpid(one, 0)[1] for one in children] == [0] * num_runs


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of a run on another host."""
    monkeypatch.setattr(lock, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.1)
    owner = replace(Owner.here(), kernel="another", host="node-7", pid=17, since="2026-11-23 01:02:03")
    (tmp_path / LOCK_FILE).write_bytes(content_of(owner))
    return tmp_path / LOCK_FILE


def test_another_hosts_run_counts_as_dead_without_renewal(elsewhere: Path, capsys) -> None:
    directories = {"--save": str(elsewhere.parent)}
    with take(directories):
        held = Owner.read(elsewhere.read_bytes())
        assert held is not None and held.pid == os.getpid()
    printed = capsys.readouterr().out
    owner = "process 17 on node-7 since 2026-11-23 01:02:03"
    assert printed.startswith(f"note: --save {elsewhere.parent} is claimed by {owner}; this run takes it over if ")
    assert printed.count("note: ") == 1


def test_another_hosts_run_that_renews_is_alive(elsewhere: Path) -> None:
    """Whatever the clock of that host says."""
    thread = threading.Timer(0.3, os.utime, (elsewhere, (1.0, 1.0)))
    thread.start()
    with pytest.raises(UserError, match="is being written by another run, process 17 on node-7"):
        take({"--save": str(elsewhere.parent)})
    thread.join()


def test_a_run_renews_its_lock_and_notices_its_loss(elsewhere: Path) -> None:
    elsewhere.unlink()
    mine = take({"--save": str(elsewhere.parent)})
    changed = elsewhere.stat().st_mtime_ns
    while elsewhere.stat().st_mtime_ns == changed:
        time.sleep(0.01)
    mine.check()
    other = replace(Owner.here(), host="node-8")
    elsewhere.unlink()
    elsewhere.write_bytes(content_of(other))
    with pytest.raises(UserError, match=r"no longer belongs to this run.*this run stops writing"):
        mine.check()
    mine.release()
    assert json.loads(elsewhere.read_bytes())["owner"] == asdict(other)  # it belongs to another run and stays


@pytest.mark.parametrize("place", [
    lambda path: path.symlink_to("missing"), lambda path: path.symlink_to(__file__), os.mkfifo, os.mkdir])
def test_a_lock_that_is_no_file_is_refused_at_once(tmp_path: Path, place: Callable[[Path], Any]) -> None:
    path = tmp_path / LOCK_FILE
    place(path)
    directories = {"--save": str(tmp_path)}
    with pytest.raises(UserError, match=rf"--save {tmp_path}: {path} cannot .*not a regular file.*remove it"):
        take(directories)
    with pytest.raises(OSError, match="not a regular file"), making(path, "a thing"):
        pass
    assert os.path.lexists(path)


def test_a_lock_that_cannot_be_written_is_not_left(tmp_path: Path) -> None:
    """The disk accepts the new file, but none of its content, as a full one does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    num_files = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        with pytest.raises(UserError, match=rf"--save {tmp_path}: .*{LOCK_FILE} cannot be written"):
            take({"--save": str(tmp_path)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [] and len(os.listdir("/proc/self/fd")) == num_files


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


def test_others_wait_for_the_maker_and_take_over_if_it_is_killed(tmp_path: Path) -> None:
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
    assert of_third.recv() == "makes"  # long before SILENT_SECONDS
    of_third.send("go")
    assert of_third.recv() == "made"
    for process in (first, second, third):
        process.join()
    assert not any(path.parent.iterdir())


def test_a_maker_elsewhere_is_waited_for_while_it_renews(elsewhere: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(lock, "_NOTE_SECONDS", 0.5)
    seen = []

    def wait() -> None:
        with making(elsewhere, "the index of records.json"):
            seen.append("makes")

    waiting = threading.Thread(target=wait)
    waiting.start()
    for number in range(10):  # longer than SILENT_SECONDS
        os.utime(elsewhere, (number, number))
        time.sleep(0.25)
        assert not seen
    waiting.join()
    assert seen == ["makes"] and not elsewhere.exists()
    said = capsys.readouterr().err
    owner = "process 17 on node-7 since 2026-11-23 01:02:03"
    assert f"note: waiting for {owner}, which creates the index of records.json: " in said


def test_a_failed_maker_gives_the_lock_up(tmp_path: Path) -> None:
    with pytest.raises(KeyError), making(tmp_path / "lock", "a thing"):
        raise KeyError
    assert not any(tmp_path.iterdir())


def test_a_run_that_has_ended_locks_nothing_more(tmp_path: Path) -> None:
    """The end may come from another thread, right before the main thread locks a directory."""
    claim = Claim()
    claim.release()
    claim.add({"--save": str(tmp_path)}, print)
    assert not (tmp_path / LOCK_FILE).exists()
