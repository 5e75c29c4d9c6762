"""Bad samples are listed once, also over several runs, and too many of them end the run."""

import os
from dataclasses import asdict

import pytest

from mm.data.loader.quarantine import LEDGER, Quarantine
from mm.data.sample import BadSample
from mm.errors import UserError
from tests.files import json_lines

BAD = [BadSample("a.json", 10 * number, number, f"id{number}", "x.jpg", f"x.jpg: damaged {number} é")
       for number in range(4)]


def test_each_sample_has_one_row_over_epochs_and_runs(tmp_path) -> None:
    ledger = tmp_path / "logs" / LEDGER
    first = Quarantine(100, 0.1, ledger)
    first.add([])
    assert not ledger.exists()
    first.add([BAD[0], BAD[1], BAD[0]])
    first.add([BAD[1]])
    Quarantine(100, 0.1, ledger).add([BAD[1], BAD[2]])
    assert json_lines(ledger) == [asdict(one) for one in BAD[:3]]


def test_too_many_are_refused_but_still_listed(tmp_path) -> None:
    quarantine = Quarantine(20, 0.1, tmp_path / LEDGER)
    quarantine.add(BAD[:2])
    quarantine.add(BAD[:2])
    with pytest.raises(UserError, match=r"3 of 20 samples cannot be used, more than --max-bad-fraction 0.1 .*ed 2"):
        quarantine.add(BAD[2:3])
    assert len(json_lines(tmp_path / LEDGER)) == 3


def test_the_file_of_a_killed_run_is_read(tmp_path) -> None:
    """An incomplete line is cut off; ids may contain any character."""
    ledger, odd = tmp_path / LEDGER, BadSample("a.json", 1, 0, "\ud83d \u2028", None, "x")
    Quarantine(100, 0.1, ledger).add([odd, BAD[1]])
    with open(ledger, "a") as stream:
        stream.write('{"dataset": "a.j')
    Quarantine(100, 0.1, ledger).add([odd, BAD[2]])
    assert json_lines(ledger) == [asdict(odd), asdict(BAD[1]), asdict(BAD[2])]
    pipe = tmp_path / "pipe"
    waiting = Quarantine(100, 0.1, pipe)
    os.mkfifo(pipe)
    for use in (lambda: waiting.add([odd]), lambda: Quarantine(100, 0.1, pipe)):
        with pytest.raises(UserError, match=r"pipe cannot be written .*not a regular file.*remove it"):
            use()
    ledger.write_text("something\n")
    with pytest.raises(UserError, match=r"quarantine.jsonl: is not a list of an earlier run's bad samples"):
        Quarantine(100, 0.1, ledger)


def test_a_rank_that_does_not_write_counts_too() -> None:
    quarantine = Quarantine(20, 0.0, None)
    quarantine.add([])
    with pytest.raises(UserError, match="1 of 20 samples"):
        quarantine.add(BAD[:1])
