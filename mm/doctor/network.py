"""Whether this machine reaches others, as far as that can be tried without a process there."""

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from mm.console import whole_number
from mm.doctor.diagnosis import Diagnosis, fault, ok, warning

_CONNECT_SECONDS = 3.0
_LOCAL_NAMES = ("localhost", "127.0.0.1")
_PORTS = range(1, 1 << 16)


def name_findings(environment: Mapping[str, str], *, is_one_of_several: bool) -> Iterator[Diagnosis]:
    """Whether this machine can resolve its own name, as gloo does unless GLOO_SOCKET_IFNAME is set.

    ``is_one_of_several``: whether other machines must reach this one.
    """
    name = socket.gethostname()
    has_interface = bool(environment.get("GLOO_SOCKET_IFNAME"))
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        yield fault("host name", f"{name} has no address ({error.strerror}); gloo looks it up",
                    f"add `127.0.0.1 {name}` to /etc/hosts for one machine, its own address for several")
        return
    if not address.startswith("127.") or has_interface:
        yield ok("host name", f"{name} is {address}")
    elif is_one_of_several:
        yield fault("host name", f"{name} is {address}, which other machines cannot reach",
                    f"give {name} its own address in /etc/hosts, or set GLOO_SOCKET_IFNAME to its interface")
    else:
        yield warning("host name", f"{name} is {address}, which other machines cannot reach",
                      f"nothing for one machine; for several, give {name} its own address in /etc/hosts, or set "
                      f"GLOO_SOCKET_IFNAME")


def host_findings(hosts: Sequence[str], default_port: int) -> Iterator[Diagnosis]:
    """Whether each ``HOST`` or ``HOST:PORT`` answers.  A refused connection is an answer."""
    for host in hosts:
        name, _, port = host.partition(":")
        port = port or str(default_port)
        if whole_number(port) not in _PORTS:
            yield fault(f"host {host}", f"{port!r} is not a port", f"give a number from 1 to {_PORTS[-1]}")
            continue
        try:
            address = socket.gethostbyname(name)
        except OSError as error:
            yield fault(f"host {host}", f"has no address ({error.strerror})",
                        f"correct the name, or add it to /etc/hosts; `getent hosts {name}` must find it on every node")
            continue
        if address.startswith("127.") and name not in (*_LOCAL_NAMES, socket.gethostname()):
            yield fault(f"host {host}", f"is {address} here, which is this machine itself",
                        f"give {name} its own address in /etc/hosts")
            continue
        yield _reached(host, address, int(port))


def _reached(host: str, address: str, port: int) -> Diagnosis:
    began = time.perf_counter()
    try:
        with suppress(ConnectionRefusedError):  # it answered
            socket.create_connection((address, port), _CONNECT_SECONDS).close()
    except OSError as error:
        return fault(f"host {host}", f"{address} does not answer on port {port} ({error.strerror or error})",
                     f"open the ports between the nodes (iptables -L), and see that `ping {address}` works")
    return ok(f"host {host}", f"{address} answers in {1000 * (time.perf_counter() - began):.1f} ms")
