"""Without a terminal, long work prints a line every so often, and short work prints none; a terminal shows a bar."""

import fcntl
import os
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest

from mm import console
from mm.console import Progress, duration, ongoing


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances one second per call."""
    seconds = iter(range(1_000))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(seconds)))


def test_long_work_prints_lines(clock, monkeypatch, capsys) -> None:
    monkeypatch.setattr(console, "EVERY_SECONDS", 10.0)
    assert list(Progress("checking \x1b a.json", 25, "records").each(range(25))) == list(range(25))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["checking \\x1b a.json: 10 of 25 (40%) records, 10 s, about 15 s left",
                                "checking \\x1b a.json: 20 of 25 (80%) records, 20 s, about 5 s left",
                                "checking \\x1b a.json: 25 of 25 (100%) records, 26 s in all"]


def test_bytes_and_an_unknown_total(clock, monkeypatch, capsys) -> None:
    """The time left counts only what this process has done: 1 of 3 GiB were there before."""
    monkeypatch.setattr(console, "FIRST_SECONDS", 1.0)
    with Progress("writing", 3 << 30, "B", done=1 << 30) as work:
        work.update(1 << 29)
    with Progress("reading", unit="records") as work:
        work.update(1234)
    assert capsys.readouterr().err.splitlines() == [
        "writing: 1.5 GiB of 3.0 GiB (50%), 1 s, about 3 s left", "writing: 1.5 GiB of 3.0 GiB (50%), 2 s in all",
        "reading: 1,234 records, 1 s", "reading: 1,234 records, 2 s in all"]


def test_short_work_and_other_ranks_print_nothing(clock, monkeypatch, capsys) -> None:
    list(Progress("short", 9, "records").each(range(9)))
    monkeypatch.setattr(console, "FIRST_SECONDS", 1.0)
    list(Progress("another rank's", 20, "records", is_shown=False).each(range(20)))
    assert capsys.readouterr() == ("", "")


def test_nothing_is_left_after_a_resumed_part_that_was_all_done_before(clock, monkeypatch, capsys) -> None:
    monkeypatch.setattr(console, "FIRST_SECONDS", 1.0)
    with Progress("answering", 5, "answers", done=5) as work:
        work.update(0)
    assert capsys.readouterr().err.splitlines()[0] == "answering: 5 of 5 (100%) answers, 1 s"


def test_work_without_parts_prints_lines_until_it_ends(monkeypatch, capsys) -> None:
    monkeypatch.setattr(console, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(console, "EVERY_SECONDS", 0.1)
    with ongoing("waiting \x1b"):
        assert len(threads()) == 1
        time.sleep(1.0)
    assert not threads()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and 3 <= len(lines) <= 10
    assert set(lines) <= {"waiting \\x1b: 0 s so far", "waiting \\x1b: 1 s so far"}


def test_an_error_ends_the_lines_too(monkeypatch, capsys) -> None:
    monkeypatch.setattr(console, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(console, "EVERY_SECONDS", 60.0)
    with pytest.raises(KeyboardInterrupt), ongoing("saving", usual_seconds=4000.0):  # it must not wait for a minute
        _wait_for(lambda: capsys.readouterr().err == "saving: 0 s of about 67 min\n")
        raise KeyboardInterrupt
    assert not threads()


def test_short_work_without_parts_and_other_ranks_print_nothing(monkeypatch, capsys) -> None:
    with ongoing("short"):
        pass
    monkeypatch.setattr(console, "FIRST_SECONDS", 0.0)
    with ongoing("another rank's", is_shown=False):
        assert not threads()
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


_ON_A_TERMINAL = """
import time
from mm import progress
progress._DELAY_SECONDS = progress._BEAT_SECONDS = 0.2
with progress.ongoing("the first step", usual_seconds=90.0):
    time.sleep(1.5)
"""


def test_a_terminal_shows_the_seconds_and_then_nothing() -> None:
    screen, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 80, 0, 0))
    done = subprocess.run([sys.executable, "-c", _ON_A_TERMINAL], stdout=subprocess.PIPE, stderr=terminal, check=True)
    os.write(terminal, b"END")  # so that a read never waits in vain
    shown = ""
    while not shown.endswith("END"):
        shown += os.read(screen, 1 << 16).decode()
    shown = shown.removesuffix("END")
    os.close(terminal)
    os.close(screen)
    assert done.stdout == b""
    assert "the first step: 00:01" in shown and "of about 90 s" in shown and "\n" not in shown
    assert shown.rstrip("\r").rpartition("\r")[2].strip() == ""  # the line is cleared


@pytest.mark.parametrize(("seconds", "text"), [
    (0.4, "0 s"), (119.4, "119 s"), (120, "2 min"), (7100, "118 min"), (7200, "2 h 0 min"), (8000, "2 h 13 min"),
    (171_000, "47 h 30 min"), (172_799, "2 days 0 h"), (172_800, "2 days 0 h"), (4_918_698, "56 days 22 h")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "progress"]


def _wait_for(holds, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)
