"""What follows from what the nodes have told each other and measured: a pure function."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from mm.doctor.diagnosis import Diagnosis, fault, ok, warning
from mm.doctor.machine import CLOCK_SECONDS

SLOW_BYTES, FAR_SECONDS = 100e6, 2e-3
"""A stream of fewer bytes per second, or a way there and back of more seconds, is called slow."""
_UNEVEN = 0.5
"""A stream below so much of the nodes' median is called slow, too."""


@dataclass(frozen=True)
class Facts:
    """What a node tells the others about itself."""

    host: str
    address: str
    port: int
    """Where it answers."""
    trial_port: int
    """A port that is free."""
    num_processes: int
    versions: Mapping[str, str]
    """What must be the same on all nodes."""
    variables: Mapping[str, str]
    """Those that usually are."""


@dataclass(frozen=True)
class Way:
    """What a node has measured."""

    onward: int
    """The node from which it received bytes."""
    problem: str
    """Why the rest is unknown; empty if it is not."""
    seconds: float
    """To node 0 and back."""
    skew: float
    """From node 0's clock to its own, in seconds."""
    speed: float
    """Bytes per second that it received from the node ``onward``, while all others did the same."""


def between_findings(facts: Sequence[Facts], ways: Sequence[Way]) -> Iterator[Diagnosis]:
    """``ways``: of every node; fewer if a node became late."""
    names = [f"node {node} ({one.host}, {one.address})" for node, one in enumerate(facts)]
    yield ok("nodes", ", ".join(names))
    if len(ways) < len(facts):
        yield fault("nodes", "a node has ended before it told what it measured", "see its own output")
        return
    yield from _different([one.versions for one in facts], names, fault,
                          "install the same on every node, and copy the same code there")
    yield from _different([one.variables for one in facts], names, warning,
                          "export the same on every node")
    if len({one.num_processes for one in facts}) > 1:
        counts = ", ".join(f"{one.num_processes} on {name}" for one, name in zip(facts, names, strict=True))
        yield fault("nodes differ", f"devices: {counts}", "make the same number visible on each, or leave a node out")
    for node, way in enumerate(ways):
        if way.problem:
            yield fault("way between nodes", f"{names[node]} does not reach node 0 or {names[way.onward]}: "
                        f"{way.problem}", "open all ports between the nodes (iptables -L), and give each its own "
                        "address in the network that they share")
    good = {node: way for node, way in enumerate(ways) if not way.problem}
    if good:
        yield from _clocks(good, names)
        yield from _speeds(good, names)


def _different(
    of_nodes: Sequence[Mapping[str, str]], names: Sequence[str], level: Callable[[str, str, str], Diagnosis], cure: str
) -> Iterator[Diagnosis]:
    """Of a mapping that each node has, what is not as on node 0."""
    first = of_nodes[0]
    for node, own in enumerate(of_nodes[1:], 1):
        found = [f"{key} is {own.get(key, 'absent')}, on node 0 {first.get(key, 'absent')}"
                 for key in sorted({*own, *first}) if own.get(key) != first.get(key)]
        if found:
            yield level("nodes differ", f"{names[node]}: {'; '.join(found)}", cure)


def _clocks(ways: Mapping[int, Way], names: Sequence[str]) -> Iterator[Diagnosis]:
    is_good = True
    for node, way in ways.items():
        if abs(way.skew) > CLOCK_SECONDS + way.seconds:
            is_good = False
            yield warning("clock", f"{names[node]} is {way.skew:+.1f} s from node 0",
                          "let all nodes follow one time server (chronyc makestep)")
    if is_good:
        yield ok("clock", f"at most {max(abs(way.skew) for way in ways.values()):.3f} s between node 0 and the others")


def _speeds(ways: Mapping[int, Way], names: Sequence[str]) -> Iterator[Diagnosis]:
    usual, is_good = median(way.speed for way in ways.values()), True
    for node, way in ways.items():
        if way.seconds > FAR_SECONDS:
            is_good = False
            yield warning("way between nodes", f"{names[node]} has {1000 * way.seconds:.1f} ms to node 0 and back",
                          "put the nodes behind one switch, and see that nothing else fills the network")
        if way.speed < max(SLOW_BYTES, _UNEVEN * usual):
            is_good = False
            yield warning("way between nodes", f"one TCP stream from {names[way.onward]} to {names[node]} brings "
                          f"{way.speed / 1e6:,.0f} MB/s, the median is {usual / 1e6:,.0f}",
                          "choose the fast network (GLOO_SOCKET_IFNAME), and look at the cable and switch (ethtool)")
    if is_good:
        yield ok("way between nodes", f"at most {1000 * max(way.seconds for way in ways.values()):.2f} ms to node 0 "
                 f"and back, at least {min(way.speed for way in ways.values()) / 1e6:,.0f} MB/s in one TCP stream")
