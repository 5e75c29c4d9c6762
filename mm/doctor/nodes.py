"""What ``mm-doctor`` finds between nodes: the same command runs on each of them, and all meet at node 0.

Each node reports what must be the same everywhere, and answers the others: with the time of its clock, and with bytes.
Every node prints all findings.
"""

import json
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Thread

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mm.doctor.diagnosis import Diagnosis, Level, fault
from mm.doctor.node_findings import Facts, Route, between_findings
from mm.files import json_object
from mm.version import software

_CONNECT_SECONDS, _LOOK_SECONDS, _LEAVE_SECONDS = 20.0, 0.1, 30.0
_NUM_QUESTIONS = 20
_PROBE_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_TIME, _BYTES = b"t", b"b"
"""What a node may ask of another: its time, or ``_PROBE_BYTES`` bytes."""
_OWN_TO_EACH = ("HCCL_IF_IP", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_SHARED = ("GLOO_", "HCCL_", "NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "ASCEND_")
"""Prefixes of the variables that are usually the same on all nodes."""


@dataclass(frozen=True)
class Nodes:
    """This node among all, and node 0 as this one reaches it."""

    node: int
    num_nodes: int
    host: str
    port: int
    seconds: float
    """How long this node waits for the others."""

    def findings(self, num_processes: int, versions: Mapping[str, str], environment: Mapping[str, str],
                 trial_ports: list[int]) -> Iterator[Diagnosis]:
        """``num_processes``: ranks of this node.  ``versions``: of the devices' libraries.

        Appends a free port of node 0 to ``trial_ports`` if a trial over all nodes makes sense.
        """
        try:
            store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  (torch documents it)
                self.host, self.port, is_master=self.node == 0, timeout=timedelta(seconds=self.seconds),
                wait_for_workers=False)
        except dist.DistError as error:
            yield fault("nodes", f"node {self.node} cannot {'reach' if self.node else 'open'} {self.host}:{self.port}: "
                        f"{str(error).splitlines()[0]}",
                        "start the same command on every node, with an address and a free port of node 0 "
                        "(--master-addr, --master-port); `getent hosts` and `ping` must find it from here")
            return
        with closing(socket.create_server(("", 0), backlog=self.num_nodes)) as door:
            Thread(target=_answer, args=(door,), name="answers to other nodes", daemon=True).start()
            with closing(socket.create_server(("", 0))) as trial:
                trial_port = trial.getsockname()[1]
            own = Facts(
                socket.gethostname(), self._own_address(), door.getsockname()[1], trial_port, num_processes,
                {**software(), **versions}, {name: value for name, value in environment.items()
                                             if name.startswith(_SHARED) and name not in _OWN_TO_EACH})
            facts = [Facts(**one) for one in self._exchanged(store, "facts", asdict(own))]
            if len(facts) < self.num_nodes:
                yield self._absent(store)
                return
            routes = [Route(**one) for one in self._exchanged(store, "route", asdict(self._route(facts)))]
            found = list(between_findings(facts, routes))
            yield from found
            self._leave(store)
        if all(one.level is not Level.FAULT for one in found):
            trial_ports.append(facts[0].trial_port)

    def _own_address(self) -> str:
        """The address at which others reach this node: the one they know of node 0, else that of the route there."""
        if self.node == 0:
            return socket.gethostbyname(self.host)
        with socket.create_connection((self.host, self.port), _CONNECT_SECONDS) as connection:
            return connection.getsockname()[0]

    def _exchanged(self, store: Store, name: str, own: Mapping[str, object]) -> list[dict]:
        """``own`` of every node, or [] if a node is late."""
        store.set(f"{name}/{self.node}", json.dumps(own))
        keys = [f"{name}/{node}" for node in range(self.num_nodes)]
        until = time.monotonic() + self.seconds
        while not store.check(keys):
            if time.monotonic() > until:
                return []
            time.sleep(_LOOK_SECONDS)
        return [json_object(store.get(key)) for key in keys]

    def _absent(self, store: Store) -> Diagnosis:
        late = [str(node) for node in range(self.num_nodes) if not store.check([f"facts/{node}"])]
        which = f"node{'s' * (len(late) > 1)} {', '.join(late)} of {self.num_nodes}"
        return fault("nodes", f"{which} {'have' if len(late) > 1 else 'has'} not come within {self.seconds:.0f} s",
                     f"start the same command there, with --node-rank {late[0] if late else ''}")

    def _route(self, facts: Sequence[Facts]) -> Route:
        """What this node measures: the time of node 0, and the bytes of the next node."""
        sender = (self.node + 1) % self.num_nodes
        try:
            seconds, skew = (0.0, 0.0) if self.node == 0 else _time_of(facts[0])
            return Route(sender, "", seconds, skew, _speed_of(facts[sender]))
        except OSError as error:
            return Route(sender, error.strerror or str(error), 0.0, 0.0, 0.0)

    def _leave(self, store: Store) -> None:
        """Node 0 holds the store until the others have read it."""
        store.set(f"left/{self.node}", "")
        until = time.monotonic() + _LEAVE_SECONDS
        while self.node == 0 and not store.check([f"left/{node}" for node in range(self.num_nodes)]):
            if time.monotonic() > until:
                return
            time.sleep(_LOOK_SECONDS)


def _answer(door: socket.socket) -> None:
    """Answer every node that connects, until the door is closed."""
    with suppress(OSError):
        while True:
            connection, _ = door.accept()
            Thread(target=_answer_one, args=(connection,), daemon=True).start()


def _answer_one(connection: socket.socket) -> None:
    with connection, suppress(OSError):  # the other node reports it
        connection.settimeout(_CONNECT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while question := connection.recv(1):
            if question == _TIME:
                connection.sendall(struct.pack("d", time.time()))
            elif question == _BYTES:
                block = bytes(_BLOCK_BYTES)
                for _ in range(_PROBE_BYTES // _BLOCK_BYTES):
                    connection.sendall(block)


def _connected(facts: Facts) -> socket.socket:
    connection = socket.create_connection((facts.address, facts.port), _CONNECT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _time_of(facts: Facts) -> tuple[float, float]:
    """Seconds of a round trip to that node, and how far this clock is ahead of its own; from the fastest trip."""
    answers, answer = list[tuple[float, float]](), memoryview(bytearray(struct.calcsize("d")))
    with _connected(facts) as connection:
        for _ in range(_NUM_QUESTIONS):
            asked, began = time.time(), time.perf_counter()
            connection.sendall(_TIME)
            _receive(connection, answer)
            its, = struct.unpack("d", answer)
            seconds = time.perf_counter() - began
            answers.append((seconds, asked + seconds / 2 - its))
    return min(answers)


def _speed_of(facts: Facts) -> float:
    """Bytes per second of one TCP stream from that node."""
    block = memoryview(bytearray(_BLOCK_BYTES))
    with _connected(facts) as connection:
        began = time.perf_counter()
        connection.sendall(_BYTES)
        for _ in range(_PROBE_BYTES // _BLOCK_BYTES):
            _receive(connection, block)
        return _PROBE_BYTES / (time.perf_counter() - began)


def _receive(connection: socket.socket, target: memoryview) -> None:
    """Fill ``target``.  Raises ConnectionError if the other node closes the connection too early."""
    while target:
        num_new = connection.recv_into(target)
        if not num_new:
            raise ConnectionError("the other node closed the connection")
        target = target[num_new:]
