"""Without a terminal, long work prints a line every so often, and short work prints none."""

import pytest

from mm import progress
from mm.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances one second per call."""
    seconds = iter(range(1_000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))


def test_long_work_prints_lines(clock, monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 10.0)
    assert list(Progress("checking \x1b a.json", 25, "records").each(range(25))) == list(range(25))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["checking \\x1b a.json: 10 of 25 (40%) records, 10 s",
                                "checking \\x1b a.json: 20 of 25 (80%) records, 20 s",
                                "checking \\x1b a.json: 25 of 25 (100%) records, 26 s in all"]


def test_bytes_and_an_unknown_total(clock, monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 1.0)
    with Progress("writing", 3 << 30, "B", done=1 << 30) as work:
        work.update(1 << 29)
    with Progress("reading", unit="records") as work:
        work.update(1234)
    assert capsys.readouterr().err.splitlines() == [
        "writing: 1.5 GiB of 3.0 GiB (50%), 1 s", "writing: 1.5 GiB of 3.0 GiB (50%), 2 s in all",
        "reading: 1,234 records, 1 s", "reading: 1,234 records, 2 s in all"]


def test_short_work_and_other_ranks_print_nothing(clock, monkeypatch, capsys) -> None:
    list(Progress("short", 20, "records").each(range(20)))
    monkeypatch.setattr(progress, "EVERY_SECONDS", 1.0)
    list(Progress("another rank's", 20, "records", is_shown=False).each(range(20)))
    assert capsys.readouterr() == ("", "")
