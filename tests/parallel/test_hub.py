"""The hub and the meeting of ranks, over real sockets: what comes in wrong, too late, or not at all."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from mm.errors import UserError
from mm.parallel import hub as hubs
from mm.parallel.door import LOOPBACK, allow_open_files, own_address
from mm.parallel.hub import Hub
from mm.parallel.lines import Lines, call
from mm.parallel.meeting import Meeting
from tests.files import ROOT


def join(hub: Hub, rank: int) -> Lines:
    return call("localhost", hub.port, 0, "joins", hub.token, rank)


def next_words(lines: Lines) -> list | None:
    """The next message, which must come."""
    for _ in range(60):
        for _, words in lines.receive(1.0):
            return words
    raise AssertionError("nothing came")


def leave(hub: Hub, *ranks: Lines) -> None:
    for lines in ranks:
        lines.send(0, "leaves")
    hub.join()
    for lines in ranks:
        lines.close()


def raw(hub: Hub, data: bytes) -> socket.socket:
    connection = socket.create_connection(("localhost", hub.port))
    connection.sendall(data)
    return connection


def test_all_begin_once_all_are_ready() -> None:
    hub = Hub(2, 60.0)
    first, second = join(hub, 0), join(hub, 1)
    second.send(0, "ready")
    assert not second.receive(0.3)
    first.send(0, "ready")
    assert next_words(first) == next_words(second) == ["begins"]
    leave(hub, first, second)


@pytest.mark.parametrize("line", [
    b"no JSON at all", b"\xff\xfe\x00", b"[" * 5000, b"{}", b"7", b"[]", b'["fails"]', b'["fails", "text", "status"]',
    b'["is at"]', b'["never heard of it", 1]', b'["joins", "token", 0]'], ids=repr)
def test_a_line_that_is_no_message_is_reported_and_the_hub_goes_on(line: bytes, capfd: pytest.CaptureFixture) -> None:
    hub = Hub(2, 60.0)
    first = join(hub, 0)
    with raw(hub, json.dumps(["joins", hub.token, 1]).encode() + b"\n") as second:
        assert second.recv(64) == b'["welcome"]\n'
        second.sendall(line + b"\n" + b'["ready"]\n')
        first.send(0, "ready")
        assert next_words(first) == ["begins"]
        second.sendall(b'["leaves"]\n')
        leave(hub, first)
    assert "the hub ignores a message of rank 1 that it does not understand: " in capfd.readouterr().err


def other_addresses() -> list[str]:
    """This machine's addresses besides its loopback."""
    found = [one.address for addresses in psutil.net_if_addrs().values() for one in addresses
             if one.family == socket.AF_INET and not one.address.startswith("127.")]
    return found or [pytest.skip("this machine has no network")]


def test_the_hub_of_one_machine_is_closed_to_the_network() -> None:
    hub = Hub(1, 60.0)
    for address in other_addresses():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, hub.port), timeout=5)
    leave(hub, join(hub, 0))


def test_the_hub_of_several_machines_listens_where_the_launcher_says() -> None:
    address = other_addresses()[0]
    hub = Hub(1, 60.0, address=own_address(address))
    assert hub.address == address
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, hub.port), timeout=5)
    leave(hub, call(hub.address, hub.port, 0, "joins", hub.token, 0))


def test_at_all_addresses_where_the_launchers_name_is_of_no_use() -> None:
    """The address of another machine (one for documentation), as behind a load balancer, or no known name."""
    assert own_address("203.0.113.9") is None and own_address("no-such-host.invalid") is None
    assert own_address("127.0.1.1") is None  # how Debian resolves a machine's own name
    assert own_address("localhost") == own_address(LOOPBACK) == LOOPBACK
    hub = Hub(1, 60.0, address=None)
    with socket.create_connection((other_addresses()[0], hub.port), timeout=5):
        leave(hub, join(hub, 0))


def test_strangers_come_and_go(capfd: pytest.CaptureFixture) -> None:
    """Who has no token, a rank that is there already or that no run has is not let in, whatever it says."""
    hub = Hub(1, 60.0)
    first = join(hub, 0)
    for words in (b"GET / HTTP/1.1\r\n\r\n", b'["joins", "another token", 0]\n', b"x" * 5000,
                  *(json.dumps(["joins", hub.token, rank]).encode() + b"\n" for rank in (0, 1, -1))):
        with raw(hub, words) as stranger, suppress(ConnectionError):
            assert stranger.recv(64) == b"", words
    raw(hub, b"").close()
    first.send(0, "ready")
    assert next_words(first) == ["begins"]
    leave(hub, first)
    assert not capfd.readouterr().err


def test_a_token_that_is_no_text_is_refused(capfd: pytest.CaptureFixture) -> None:
    """JSON may contain half of a surrogate pair, which has no bytes in UTF-8."""
    hub = Hub(2, 60.0)
    with raw(hub, b'["joins", "\\ud800", 1]\n') as stranger:
        assert stranger.recv(64) == b""
    leave(hub, join(hub, 0), join(hub, 1))
    assert not capfd.readouterr().err


EXHAUST = """
import os, resource, socket, sys
from mm.parallel.hub import Hub
hub = Hub(3, 60.0)
family, *_, address = socket.getaddrinfo("localhost", hub.port, type=socket.SOCK_STREAM)[0]
ranks = [socket.socket(family) for _ in range(3)]
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
first_free = os.dup(0)
os.close(first_free)
resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))  # no more can be opened
for rank, one in enumerate(ranks):
    one.connect(address)
    one.sendall(b'["joins", "%s", %d]\\n' % (hub.token.encode(), rank))
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
for one in ranks:
    assert one.recv(64) == b'["welcome"]\\n'
    one.sendall(b'["ready"]\\n')
for one in ranks:
    assert one.recv(64) == b'["begins"]\\n'
    one.sendall(b'["leaves"]\\n')
hub.join()
print("all were watched")
"""


def test_without_a_free_file_the_hub_says_so_and_lets_ranks_in_later() -> None:
    with subprocess.Popen([sys.executable, "-c", EXHAUST], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout and process.stderr
        text = process.stderr.readline()
        process.stdin.write("\n")
        process.stdin.flush()
        rest, output = process.stderr.read(), process.stdout.read()
    assert text.startswith("warning: the hub of rank 0 cannot accept connections: Too many open files (ulimit -n is ")
    assert text.endswith("; 3 of 3 ranks are not watched and wait for a connection\n")
    assert rest == "note: the hub of rank 0 accepts connections again\n"
    assert output == "all were watched\n"


def test_a_hub_that_fails_says_so_to_all(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("nobody thought of it")

    monkeypatch.setattr(Hub, "_note_ready", fail)
    hub = Hub(2, 60.0)
    ranks = join(hub, 0), join(hub, 1)
    ranks[1].send(0, "ready")
    for one in ranks:
        assert next_words(one) == ["unwatched"] and next_words(one) is None
    hub.join()
    text = capfd.readouterr().err
    assert text.startswith("warning: the hub of rank 0 has failed, so ranks are no longer watched.")
    assert "ZeroDivisionError: nobody thought of it" in text


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[hubs.Cause] = []
    monkeypatch.setattr(Hub, "_end", lambda _, cause: ends.append(cause))
    hub = Hub(6, 0.0)
    first, fourth = join(hub, 0), join(hub, 3)
    fourth.send(0, "ready")
    first.send(0, "ready")
    hub.join()
    first.close()
    fourth.close()
    assert [cause.rank for cause in ends] == [1]
    assert ends[0].text.startswith("ranks 1 to 2, 4 to 5 of 6 did not connect within 0 minutes after rank 0; see ")


def test_ranks_that_are_set_up_differently_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever comes first; the first machine is that of rank 0."""
    ends: list[hubs.Cause] = []
    monkeypatch.setattr(Hub, "_end", lambda _, cause: ends.append(cause))
    for late in (0, 2):
        hub = Hub(3, 60.0)
        ranks = [join(hub, rank) for rank in range(3)]
        for rank in sorted(range(3), key=lambda rank: rank == late):
            facts = {"torch": "2.12.0" if rank == 2 else "2.13.0", "seed": "1"}
            ranks[rank].send(0, "is set up", f"n{rank}", facts | {"more": 1} if rank == 2 else facts)
        hub.join()
        for one in ranks:
            one.close()
    assert {(cause.rank, cause.text, cause.status) for cause in ends} == {
        (2, "rank 2 on n2 differs from rank 0 on n0: torch is 2.12.0 instead of 2.13.0; more is 1 instead of None. "
            "Give every machine the same packages, code, flags and JSON files, and start again.", 2)} and len(ends) == 2


def test_a_broken_connection_is_reported_soon_although_a_phase_has_hours_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[hubs.Cause] = []
    monkeypatch.setattr(Hub, "_end", lambda _, cause: ends.append(cause))
    hub = Hub(2, 60.0)
    first, second = join(hub, 0), join(hub, 1)
    second.send(0, "enters", 3600.0, "the phase 'load' has taken more than 3600 s on rank 1")
    second.send(0, "loses", "rank 1 failed with RuntimeError: connection closed by peer")
    hub.join(20.0)
    assert [(cause.rank, cause.text) for cause in ends] == [
        (1, "rank 1 failed with RuntimeError: connection closed by peer")]
    leave(hub, first, second)


def test_a_rank_that_joins_while_others_are_asked_is_asked_and_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(hubs, "end", lambda status, _: ends.append(status))
    hub = Hub(3, 60.0)
    first, second = join(hub, 0), join(hub, 1)
    second.close()
    assert next_words(first) == ["asks"]
    third = join(hub, 2)
    assert next_words(third) == ["asks"]
    for one in (first, third):
        one.send(0, "tells", "somewhere", "")
    hub.join(60.0)
    assert ends == [1]
    for one in (first, third):
        assert next_words(one) == ["ends", 1, 1, []]
        one.close()


@pytest.mark.parametrize("dies", [False, True], ids=["signal", "death and signal"])
def test_nobody_waits_long_after_a_signal_for_ranks_that_do_not_come(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sends it to all ranks when one has died; the third ends by it before it comes."""
    ends: list[int] = []
    monkeypatch.setattr(hubs, "_LATE_SECONDS", 3600.0)
    monkeypatch.setattr(hubs, "end", lambda status, _: ends.append(status))
    hub = Hub(3, 60.0)
    first, second = join(hub, 0), join(hub, 1)
    if dies:
        second.close()
        assert next_words(first) == ["asks"]
        first.send(0, "tells", "somewhere", "")
    first.send(0, "is interrupted", 143)
    hub.join(60)
    assert ends == [1 if dies else 143]
    assert next_words(first) == ["ends", ends[0], int(dies), []]
    for lines in (first, second):
        lines.close()


@pytest.mark.parametrize(("variables", "problems"), [
    ({"RANK": "0", "WORLD_SIZE": "1"}, [
        "MASTER_PORT is not set; expected a port of rank 0's host, 0 to 65535",
        "MASTER_ADDR is not set; expected rank 0's host"]),
    ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "65536"}, [
        "RANK is '2'; expected this rank's number, 0 to 1",
        "MASTER_PORT is '65536'; expected a port of rank 0's host, 0 to 65535"]),
    ({"RANK": "first", "MASTER_ADDR": "", "MASTER_PORT": "1"}, [
        "WORLD_SIZE is not set; expected the number of ranks", "RANK is 'first'; expected this rank's number",
        "MASTER_ADDR is ''; expected rank 0's host"]),
], ids=["without an address", "numbers too large", "no number"])
def test_launcher_variables_that_are_missing_or_wrong_are_named(
    variables: dict[str, str], problems: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(UserError) as raised:
        Meeting.of_launcher(10)
    assert list(raised.value.problems) == [f"The environment variable {one}, which torchrun sets" for one in problems]


WAITING = """
import signal, sys
from datetime import timedelta
from torch.distributed import TCPStore
from mm.parallel.meeting import Meeting

signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print("waits", flush=True)
Meeting(1, 2, "localhost", store, timedelta(minutes=10)).join(lambda: None, 1.0)
"""


def test_a_rank_that_waits_for_rank_0_handles_a_signal() -> None:
    """A launcher sends it when rank 0 has died before it was found."""
    with subprocess.Popen([sys.executable, "-c", WAITING], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "waits\n"
        time.sleep(1)
        process.terminate()
        try:
            assert process.wait(60) == 7
        finally:
            process.kill()


STOPPED = """
import os, signal, sys
from datetime import timedelta
from torch.distributed import TCPStore
from mm.parallel.meeting import Meeting

store = TCPStore("localhost", int(sys.argv[1]), is_master=False)
Meeting(0, 2, "127.0.0.1", store, timedelta(minutes=10)).join(lambda: None, 1.0)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_rank_names_and_kills_a_stopped_rank_0_that_does_not_let_it_in() -> None:
    """Rank 0 has told its address, and is stopped before the other rank comes."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with subprocess.Popen([sys.executable, "-c", STOPPED, str(store.port)], cwd=ROOT) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        with pytest.raises(UserError, match=r"rank 1 has waited 2 s to join rank 0 .* and rank 0 does not answer: "):
            Meeting(1, 2, "127.0.0.1", store, timedelta(minutes=10)).join(lambda: None, 1.0, answer_seconds=2.0)
        assert process.wait(60) == -signal.SIGKILL


def test_open_files_are_allowed_as_far_as_the_system_lets_them() -> None:
    """In a process of its own, whose limits it lowers for good."""
    program = ("import resource; from mm.parallel.door import allow_open_files as allow\n"
               "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 2000))\n"
               "print(allow(256), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
               "print(allow(700), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
               "print(*allow(4096))")
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
        "() 1024", "() 1912",
        "rank 0 of 4096 may open 2000 files (ulimit -Hn), but needs about 8704: two connections to each rank and 512 "
        "others; raise the limit of the process that starts the launcher"]
    assert allow_open_files(1) == ()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0
