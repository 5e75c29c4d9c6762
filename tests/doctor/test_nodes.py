"""``mm-doctor`` on several nodes, which are processes of this machine: what differs is found, and then is gone."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from mm.doctor.diagnosis import Diagnosis, Level
from mm.doctor.node_findings import Facts, Route, between_findings
from mm.doctor.nodes import Nodes
from mm.ports import free_port
from tests.doctor.whole import Examined, plain_environment
from tests.files import ROOT
from tests.launch import warm_python

FACTS = Facts("host", "10.0.0.4", 7000, 7001, 8, {"torch": "2.13.0"}, {"NCCL_DEBUG": "INFO"})
ROUTE = Route(sender=0, problem="", round_trip_seconds=1e-4, skew_seconds=0.01, bytes_per_second=1e9)


def bad(facts: Sequence[Facts], routes: Sequence[Route]) -> list[tuple[str, str]]:
    found = [one for one in between_findings(facts, routes) if one.level is not Level.OK]
    assert all(one.cure for one in found)
    return [(one.level, f"{one.name}: {one.what}") for one in found]


@pytest.mark.parametrize(("facts", "route", "expected"), [
    (FACTS, ROUTE, None),
    (replace(FACTS, versions={"torch": "2.12.0"}), ROUTE,
     ("fault", "nodes differ: node 1 (host, 10.0.0.4): torch is 2.12.0, on node 0 2.13.0")),
    (replace(FACTS, variables={}), ROUTE,
     ("warning", "nodes differ: node 1 (host, 10.0.0.4): NCCL_DEBUG is absent, on node 0 INFO")),
    (replace(FACTS, num_processes=7), ROUTE,
     ("fault", "nodes differ: devices: 8 on node 0 (host, 10.0.0.4), 7 on node 1 (host, 10.0.0.4)")),
    (FACTS, replace(ROUTE, skew_seconds=-30.0), ("warning", "clock: node 1 (host, 10.0.0.4) is -30.0 s from node 0")),
    (FACTS, replace(ROUTE, round_trip_seconds=0.01),
     ("warning", "network: node 1 (host, 10.0.0.4) has 10.0 ms to node 0 and back")),
    (FACTS, replace(ROUTE, bytes_per_second=9e7),
     ("warning", "network: one TCP stream from node 0 (host, 10.0.0.4) to node 1 (host, 10.0.0.4) brings "
      "90 MB/s, the median is 545")),
    (FACTS, replace(ROUTE, problem="timed out"),
     ("fault", "network: node 1 (host, 10.0.0.4) does not reach node 0 or node 0 (host, 10.0.0.4): "
      "timed out")),
])
def test_what_differs_is_named(facts: Facts, route: Route, expected: tuple[str, str] | None) -> None:
    assert bad([FACTS, facts], [replace(ROUTE, sender=1), route]) == ([expected] if expected else [])


def between(port: int, variables: Sequence[Mapping[str, str]]) -> list[tuple[list[Diagnosis], list[int]]]:
    """What each of several nodes finds, and the port of their trial."""
    def examine(node: int) -> tuple[list[Diagnosis], list[int]]:
        ports = list[int]()
        nodes = Nodes(node, len(variables), "127.0.0.1", port, 60.0)
        return list(nodes.findings(1, {}, variables[node], ports)), ports

    with ThreadPoolExecutor() as pool:
        return list(pool.map(examine, range(len(variables))))


def test_nodes_measure_their_network() -> None:
    found = between(free_port(), [{"NCCL_DEBUG": "INFO", "HCCL_IF_IP": "10.0.0.4"}, {"HCCL_IF_IP": "10.0.0.5"}, {}])
    texts = [[(one.level, one.name, one.what) for one in some] for some, _ in found]
    assert texts[0] == texts[1] == texts[2], "all nodes print the same"
    named = {one.name: one.what for one in found[0][0]}
    assert named["nodes"].count(socket.gethostname()) == 3 and "node 2" in named["nodes differ"]
    assert "HCCL_IF_IP" not in named["nodes differ"], "each node has its own"
    assert named["clock"].startswith("at most 0.0")
    assert "in one TCP stream" in named["network"] or "MB/s" in named["network"]
    assert len({ports[0] for _, ports in found}) == 1


def test_a_node_that_does_not_come_and_one_that_is_alone() -> None:
    port, ports = free_port(), list[int]()
    (late,) = Nodes(0, 3, "127.0.0.1", port, 0.5).findings(1, {}, {}, ports)
    assert (late.level, late.what) == ("fault", "nodes 1, 2 of 3 have not come within 0 s")
    assert late.cure == "start the same command there, with --node-rank 1"
    (alone,) = Nodes(1, 2, "127.0.0.1", port, 0.5).findings(1, {}, {}, ports)
    assert alone.level == "fault" and f"node 1 cannot reach 127.0.0.1:{port}" in alone.what
    assert not ports


def test_a_node_that_closes_the_connection() -> None:
    def close(door: socket.socket) -> None:
        door.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor() as pool:
        pool.submit(close, door)
        facts = replace(FACTS, address="127.0.0.1", port=door.getsockname()[1])
        route = Nodes(1, 2, "127.0.0.1", 0, 1.0)._route([facts, facts])
    assert route.problem and route.sender == 0


def test_a_node_with_another_clock_and_other_packages(tmp_path: Path) -> None:
    """The whole program on two nodes; its cure, the same everywhere, is ``test_the_nodes_of_a_hostfile``."""
    (tmp_path / "sitecustomize.py").write_text("import time\nnow = time.time\ntime.time = lambda: now() + 30\n")
    info = tmp_path / "transformers-5.8.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.8.1\n")
    port = str(free_port())

    def start(node: int, python: object, path: Sequence[Path], **variables: str) -> "subprocess.Popen[str]":
        words = [str(python), "-m", "mm.doctor.cli", "--device", "cpu", "--no-trial", "--num-processes", "1",
                 "--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port]
        return subprocess.Popen(words, cwd=ROOT, text=True, stdout=subprocess.PIPE, env=plain_environment() | variables
                                | {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))})

    both = [start(0, warm_python(), []), start(1, sys.executable, [tmp_path], NCCL_ALGO="Ring")]
    for process in both:
        output, _ = process.communicate(timeout=300)
        found = Examined(process.returncode, output).findings
        whats = [one.what for one in found if one.name == "nodes differ"]
        assert any("transformers is 5.8.1, on node 0 " in one for one in whats), output
        assert any("NCCL_ALGO is Ring, on node 0 absent" in one for one in whats), output
        (clock,) = [one for one in found if one.name == "clock" and "node 1" in one.what]
        assert clock.level == "warning" and "+30.0 s from node 0" in clock.what and process.returncode == 1


def test_the_nodes_of_a_hostfile(tmp_path: Path) -> None:
    """Started by ``ssh.sh`` (a shell in its place), with a trial over both nodes at the end."""
    (tmp_path / "hosts").write_text("127.0.0.1\nsecond\n")
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/bash\nexec bash -c "$2"\n')
    shell.chmod(0o755)
    done = subprocess.run(
        ["bash", "examples/cluster/ssh.sh", str(tmp_path / "hosts"), f"MASTER_PORT={free_port()}",
         "GLOO_SOCKET_IFNAME=lo", f"PYTHON={warm_python()}", "examples/cluster/doctor.sh", "--device", "cpu",
         "--num-processes", "1", "--directory", str(tmp_path)],
        cwd=ROOT, env=plain_environment() | {"SSH": str(shell), "PYTHONPATH": str(ROOT)}, text=True,
        capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (Examined(0, "\n".join(line.removeprefix(f"[node {node}] ") for line in done.stdout.splitlines()
                                           if line.startswith(f"[node {node}] "))) for node in (0, 1))
    for node in (first, second):
        assert not node.bad.keys() & {"nodes differ", "clock", "nodes", "trial"}, node.output
    host = socket.gethostname()
    assert f"rank 1 (cpu of {host})" in first.output or f"rank 0 (cpu of {host})" in first.output
    assert "all-reduce over 2 ranks: " in first.output and "all-reduce" not in second.output
    assert "2 processes on 2 nodes; node 0 prints what they found" in second.output
