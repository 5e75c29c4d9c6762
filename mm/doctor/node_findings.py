"""Findings about several nodes, from what each of them reported and measured.  Pure functions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from mm.doctor.diagnosis import Diagnosis, fault, ok, warning
from mm.doctor.machine import CLOCK_SECONDS

SLOW_BYTES, FAR_SECONDS = 100e6, 2e-3
"""A TCP stream below ``SLOW_BYTES`` per second is slow, and so is a round trip above ``FAR_SECONDS``."""
_UNEVEN = 0.5
"""A stream below this share of the median of the nodes is slow, too."""


@dataclass(frozen=True)
class Facts:
    """What a node reports about itself."""

    host: str
    address: str
    port: int
    """Where it answers the other nodes."""
    trial_port: int
    """A free port for the trial."""
    num_processes: int
    versions: Mapping[str, str]
    """What must be the same on all nodes."""
    variables: Mapping[str, str]
    """Environment variables that usually are the same on all nodes."""


@dataclass(frozen=True)
class Route:
    """What a node measured on the network."""

    sender: int
    """The node from which it received bytes."""
    problem: str
    """Why the rest could not be measured; empty if it was."""
    round_trip_seconds: float
    """To node 0."""
    skew_seconds: float
    """How far its clock is ahead of node 0's."""
    bytes_per_second: float
    """Received from ``sender`` in one TCP stream, while all nodes received."""


def between_findings(facts: Sequence[Facts], routes: Sequence[Route]) -> Iterator[Diagnosis]:
    """``routes``: one of each node, or fewer if a node was late."""
    names = [f"node {node} ({one.host}, {one.address})" for node, one in enumerate(facts)]
    yield ok("nodes", ", ".join(names))
    if len(routes) < len(facts):
        yield fault("nodes", "a node ended before it sent its measurements", "see its own output")
        return
    yield from _different([one.versions for one in facts], names, fault,
                          "install the same on every node, and copy the same code there")
    yield from _different([one.variables for one in facts], names, warning,
                          "export the same on every node")
    if len({one.num_processes for one in facts}) > 1:
        counts = ", ".join(f"{one.num_processes} on {name}" for one, name in zip(facts, names, strict=True))
        yield fault("nodes differ", f"devices: {counts}", "make the same number visible on each, or leave a node out")
    for node, route in enumerate(routes):
        if route.problem:
            yield fault("network", f"{names[node]} does not reach node 0 or {names[route.sender]}: "
                        f"{route.problem}", "open all ports between the nodes (iptables -L), and give each its own "
                        "address in the network that they share")
    good = {node: route for node, route in enumerate(routes) if not route.problem}
    if good:
        yield from _clocks(good, names)
        yield from _speeds(good, names)


def _different(
    of_nodes: Sequence[Mapping[str, str]], names: Sequence[str], level: Callable[[str, str, str], Diagnosis], cure: str
) -> Iterator[Diagnosis]:
    """For each node, the entries of its mapping that differ from those of node 0."""
    first = of_nodes[0]
    for node, own in enumerate(of_nodes[1:], 1):
        found = [f"{key} is {own.get(key, 'absent')}, on node 0 {first.get(key, 'absent')}"
                 for key in sorted({*own, *first}) if own.get(key) != first.get(key)]
        if found:
            yield level("nodes differ", f"{names[node]}: {'; '.join(found)}", cure)


def _clocks(routes: Mapping[int, Route], names: Sequence[str]) -> Iterator[Diagnosis]:
    is_good = True
    for node, route in routes.items():
        if abs(route.skew_seconds) > CLOCK_SECONDS + route.round_trip_seconds:
            is_good = False
            yield warning("clock", f"{names[node]} is {route.skew_seconds:+.1f} s from node 0",
                          "let all nodes follow one time server (chronyc makestep)")
    if is_good:
        largest = max(abs(route.skew_seconds) for route in routes.values())
        yield ok("clock", f"at most {largest:.3f} s between node 0 and the others")


def _speeds(routes: Mapping[int, Route], names: Sequence[str]) -> Iterator[Diagnosis]:
    usual, is_good = median(route.bytes_per_second for route in routes.values()), True
    for node, route in routes.items():
        if route.round_trip_seconds > FAR_SECONDS:
            is_good = False
            yield warning("network", f"{names[node]} has {1000 * route.round_trip_seconds:.1f} ms to node 0 and back",
                          "put the nodes behind one switch, and see that nothing else fills the network")
        if route.bytes_per_second < max(SLOW_BYTES, _UNEVEN * usual):
            is_good = False
            yield warning("network", f"one TCP stream from {names[route.sender]} to {names[node]} brings "
                          f"{route.bytes_per_second / 1e6:,.0f} MB/s, the median is {usual / 1e6:,.0f}",
                          "choose the fast network (GLOO_SOCKET_IFNAME), and look at the cable and switch (ethtool)")
    if is_good:
        farthest = max(route.round_trip_seconds for route in routes.values())
        slowest = min(route.bytes_per_second for route in routes.values())
        yield ok("network", f"at most {1000 * farthest:.2f} ms to node 0 and back, at least {slowest / 1e6:,.0f} MB/s "
                 f"in one TCP stream")
