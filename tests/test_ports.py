"""A free port is one that nobody else gets or has."""

import socket
from pathlib import Path

from mm import process
from mm.process import free_port


def test_a_port_is_free_and_none_that_the_system_gives_away(monkeypatch) -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert free_port() < first
    with socket.socket() as taken, socket.socket() as other:
        taken.bind(("localhost", 0))
        other.bind(("", 0))
        number, free = taken.getsockname()[1], other.getsockname()[1]
        other.close()
        monkeypatch.setattr(process, "_PORTS", [number, free])
        assert {free_port() for _ in range(20)} == {free}
