"""What ranks tell each other in the launcher's store, and why they end; whole runs are in test_watchdog.py."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from mm.parallel.health import heartbeat as heartbeats
from mm.parallel.health import rendezvous
from mm.parallel.health.heartbeat import SILENT_SECONDS, Cause, Heartbeat, Judge, Record, State, ranks_text
from mm.parallel.health.rendezvous import ATTEMPT, END, NOTHING, Rendezvous
from mm.parallel.health.watchdog import Watchdog
from mm.process import free_port, own_identity
from tests.files import ROOT

RUNS = Record(1, "begun", process=own_identity())
"""A rank that runs, as this process does."""


def ended(process: int) -> tuple[str, int, str]:
    node, _, _ = own_identity()
    return node, process, "0"


def judged(records: Mapping[int, Record], *times: float, rank: int = 0) -> Cause | None:
    """What a judge of three ranks says at the last of ``times``; the counts of ``records`` do not change meanwhile."""
    judge, found = Judge(rank, 3, start_seconds=60.0, end_seconds=30.0, doubt_seconds=5.0), None
    for now in times:
        found = judge.cause(records, now)
    return found


@pytest.mark.parametrize(("records", "times", "rank", "text"), [
    ({1: replace(RUNS, process=ended(1))}, (0.0,), 1, "rank 1 died without an error message"),
    ({1: replace(RUNS, state="leaving", process=ended(1))}, (0.0, 20.0), None, ""),
    ({1: replace(RUNS, seconds_left=8.0, lateness="step 3 is late")}, (0.0, 10.0), None, ""),
    ({1: replace(RUNS, seconds_left=8.0, lateness="step 3 is late")}, (0.0, 12.0), 1, "step 3 is late"),
    ({}, (0.0, SILENT_SECONDS + 1), 0, "rank 0 has given no sign of life for 301 s"),
    ({2: replace(RUNS, lost="rank 2 failed with RuntimeError: closed by peer")}, (0.0, 4.0), None, ""),
    ({1: Record(), 2: Record()}, (0.0, 59.0), None, ""),
    ({1: Record(), 2: Record()}, (0.0, 61.0), 1, "ranks 1 to 2 of 3 did not connect within 1 minutes after rank 0; "),
    ({2: replace(RUNS, state="leaving")}, (0.0, 31.0), 0, "ranks 0 to 1 did not end within 30 s after the first; "),
    (dict.fromkeys(range(3), replace(RUNS, state="leaving")), (0.0,), 0, ""),
], ids=["dead", "left", "in time", "late", "silent", "lost", "awaited", "absent", "does not end", "all have left"])
def test_causes(records: dict[int, Record], times: tuple[float, ...], rank: int | None, text: str) -> None:
    found = judged(dict.fromkeys(range(3), RUNS) | records, *times)
    assert (None if found is None else found.rank) == rank
    assert found is None or (found.text.startswith(text) and (found.status == 0) == (not text))


@pytest.mark.parametrize("silent", [(), (1,)], ids=["nobody", "rank 1"])
def test_a_broken_connection_waits_for_a_silent_rank(silent: tuple[int, ...]) -> None:
    judge = Judge(0, 3, 60.0, 30.0, doubt_seconds=5.0)
    for beat in range(7):
        records = {rank: RUNS if rank in silent else replace(RUNS, count=beat + 1) for rank in range(3)}
        records[2] = replace(records[2], lost="rank 2 failed with RuntimeError: connection closed by peer")
        found = judge.cause(records, float(beat))
        assert (found is None) == (beat < 5)
        if beat == 5:
            break
    assert found is not None and "rank 2 failed with RuntimeError: connection closed by peer" in found.text
    assert found.rank == (1 if silent else 2) and ("rank 1 gave no sign of life" in found.text) == bool(silent)


class Ranks:
    """Ranks that are threads of this process, on one store."""

    def __init__(self, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_ranks, self.store, self.statuses = num_ranks, dist.HashStore(), list[int]()
        self.have_ended = threading.Semaphore(0)
        monkeypatch.setattr(heartbeats, "leave", self._leave)
        monkeypatch.setattr(heartbeats, "GRACE_SECONDS", 0.0)

    def _leave(self, status: int) -> None:
        self.statuses.append(status)
        self.have_ended.release()

    def join(self, rank: int, **facts: str) -> Heartbeat:
        rendezvous = Rendezvous(rank, self.num_ranks, lambda: self.store, timeout=timedelta(minutes=1))
        return Heartbeat(rendezvous, facts, lambda: f"place {rank}", lambda: None, 60.0)

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.have_ended.acquire(timeout=60)


def say(rank: Heartbeat, state: State) -> None:
    rank.state = state
    rank.beat()


def test_all_begin_once_all_are_ready_and_end_once_all_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2, monkeypatch)
    second, first = ranks.join(1), ranks.join(0)
    say(second, "ready")
    assert not second.begun.wait(0.5)
    say(first, "ready")
    assert first.begun.wait(60) and second.begun.wait(60)
    say(first, "leaving")
    assert not first.finished.wait(0.5)
    say(second, "leaving")
    assert first.finished.wait(60) and second.finished.wait(60) and not ranks.statuses


def test_the_first_cause_counts_and_a_rank_that_joins_later_ends_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    ranks = Ranks(3, monkeypatch)
    first, second = ranks.join(0), ranks.join(1)
    assert second.joined.wait(60)
    second.end_all(Cause(1, "rank 1 is the cause", shows_stacks=True))
    ranks.wait(1)
    first.end_all(Cause(0, "rank 0 is late"))
    ranks.join(2)
    ranks.wait(2)
    text = capfd.readouterr().err
    assert ranks.statuses == [1, 1, 1] and "rank 0 is late" not in text
    assert text.startswith("error: rank 1 is the cause\nWhere the ranks were:\n  rank 1, place 1\n  rank 0, place 0\n")
    assert "\n  rank 2, last known: has not joined the others\n\nStacks of rank 0:\n" in text


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_are_set_up_differently_are_named(
    late: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    ranks = Ranks(2, monkeypatch)
    for rank in sorted(range(2), key=lambda rank: rank == late):
        ranks.join(rank, torch=f"2.1{rank}.0", seed="1", **({"more": "1"} if rank else {}))
    ranks.wait(2)
    assert ranks.statuses == [2, 2]
    assert ": torch is 2.11.0 instead of 2.10.0; more is 1 instead of None. Give every " in capfd.readouterr().err


def test_a_rank_that_is_faster_than_rank_0_does_not_join_an_earlier_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun keeps the store when it starts the ranks again."""
    ranks = Ranks(2, monkeypatch)
    old = ranks.join(0), ranks.join(1)
    assert old[1].joined.wait(60)
    new = ranks.join(1)
    assert not new.joined.wait(0.5)
    before = json.loads(ranks.store.get(ATTEMPT))
    first = ranks.join(0)
    assert new.joined.wait(60) and new.attempt is not None and first.attempt is not None
    assert new.attempt.prefix == first.attempt.prefix != before["prefix"]
    for rank in (*old, new, first):
        say(rank, "ready")
    for rank in (*old, new, first):
        assert rank.begun.wait(60)
        say(rank, "leaving")
    assert all(rank.finished.wait(60) for rank in (*old, new, first))


def test_a_rank_beside_rank_0_sees_by_its_restarts_that_an_attempt_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers of other nodes count for themselves, so there only the end of the attempt tells."""
    store, second = dist.HashStore(), Rendezvous(1, 2)
    attempt = Rendezvous(0, 2).begin(store, {})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert second.find(store, lambda _: "joins") is None
    monkeypatch.setattr(rendezvous, "node_id", lambda: "another node")
    keys = dist.PrefixStore(attempt.prefix, store)
    keys.set(END, "it has ended")
    assert second.find(store, lambda _: "joins") is None
    keys.set(END, NOTHING)
    assert second.find(store, lambda _: "joins") == attempt and keys.get("1") == b"joins"


def test_no_port_is_opened_for_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides that of the launcher's store."""

    def listening() -> set[int]:
        return {one.laddr.port for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN}

    port, before = free_port(), listening()
    for name, text in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", str(port))):
        monkeypatch.setenv(name, text)
    with Watchdog(Rendezvous.of_launcher(1), None) as watchdog:
        store = watchdog.meet()
        assert listening() - before == {port} and store is not None


WAITING = """
import sys
from mm.process import run_command
from mm.parallel.health.rendezvous import Rendezvous
from mm.parallel.health.watchdog import Watchdog

def wait():
    with Watchdog(Rendezvous.of_launcher(10), None) as watchdog:
        print("waits", flush=True)
        watchdog.meet()

sys.exit(run_command(wait, lambda: "nothing is kept", is_rank=True))
"""


def test_a_rank_that_waits_for_the_store_of_rank_0_ends_by_a_signal() -> None:
    """Which a launcher sends when rank 0 has died; it used to act only after the time limit of the wait."""
    environment = os.environ | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
                                "MASTER_PORT": str(free_port())}  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", WAITING], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                          text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "waits\n"
            time.sleep(1)
            process.terminate()
            assert process.wait(60) == 143
        finally:
            process.kill()


@pytest.mark.parametrize(("ranks", "text"), [
    ([3], "rank 3"), ([0, 1], "ranks 0 to 1"), ([1, 3, 4, 5, 8], "ranks 1, 3 to 5, 8")])
def test_ranks_are_listed_in_spans(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
