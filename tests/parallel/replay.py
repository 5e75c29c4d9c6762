"""Do a pipeline's messages pass under NCCL's rules, and for how long do its kernels sit on each device?  A simulation.

gloo finds the two halves of a message in any order, so a run on the CPU cannot show an order that hangs on a device.
The rules, which are HCCL's too:

- A group is one queue on each rank.  A batch of messages, started together, begins when the batch before it in its
  queue has ended and the device has come to the place where it was started.
- Halves of messages between two ranks meet in the order of their queues: there are no tags.
- A batch ends as a whole, once the other half of each of its messages has begun.  From its beginning to its end its
  kernels occupy processors of the device.
- The host starts batches ahead of the device.  Only the first message from one rank to another in a group holds it up:
  until the other host has come to its half, because the two connect.

Pure arithmetic on programs; what a real step does: ``tests.parallel.messages``.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """One half of a message."""

    is_sent: bool
    peer: int
    """The other stage."""
    content: tuple
    """What must be equal in both halves."""


@dataclass(frozen=True)
class Start:
    """A stage starts a batch of messages."""

    batch: int
    """Its number on the stage."""
    group: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Wait:
    """The device of a stage waits for the end of a batch; its host does not."""

    batch: int


@dataclass(frozen=True)
class Compute:
    """The device of a stage computes."""

    seconds: float


Event = Start | Wait | Compute
Program = Sequence[Event]
"""What a stage does, in its order."""


@dataclass(frozen=True)
class Replay:
    """Outcome of the programs."""

    stuck: tuple[str, ...]
    """Every stage that never ends, with the event at which it is stuck; empty if all stages end."""
    seconds: float
    """Time until the last stage has ended."""
    occupied: tuple[float, ...]
    """For each stage: the share of its computing time during which at least one batch occupied the device."""


def replay(programs: Sequence[Program], message_seconds: float = 0.0) -> Replay:
    """Run the programs of all stages.  ``message_seconds``: duration of a batch once the other halves have begun.

    Raises ValueError where the halves that meet are of different messages, or one has no other half.
    """
    run = _Run(programs, message_seconds)
    while run.advance():
        pass
    return run.result()


Key = tuple[int, int]
"""Stage and batch."""


class _Run:
    """Where every host and device is, and when each batch began and ended."""

    def __init__(self, programs: Sequence[Program], message_seconds: float) -> None:
        self._programs, self._message_seconds = programs, message_seconds
        self._partners, self._connecting = _matched(programs)
        self._host, self._device = [0] * len(programs), [0] * len(programs)
        """The next event of each stage."""
        self._clock = [0.0] * len(programs)
        """The time on each stage's device."""
        self._queues: defaultdict[tuple[int, str], list[Key]] = defaultdict(list)
        """Batches of a stage and group that have not begun, and before them the one that has."""
        self._reached: dict[Key, float] = {}
        """When the device came to the place where the batch was started."""
        self._began: dict[Key, float] = {}
        self._ended: dict[Key, float] = {}
        self._free: defaultdict[tuple[int, str], float] = defaultdict(float)
        """When the last batch of a queue ended."""
        self._computing: list[list[tuple[float, float]]] = [[] for _ in programs]

    def advance(self) -> bool:
        """Do whatever can happen now; returns whether anything did."""
        stages = range(len(self._programs))
        hosts = [self._advance_host(stage) for stage in stages]
        devices = [self._advance_device(stage) for stage in stages]
        return any([*hosts, *devices, *self._begin(), *self._end()])

    def _advance_host(self, stage: int) -> bool:
        program, before = self._programs[stage], self._host[stage]
        while self._host[stage] < len(program):
            event = program[self._host[stage]]
            if isinstance(event, Start):
                key = stage, event.batch
                if any(self._host[peer] < place for peer, place in self._connecting.get(key, ())):
                    break
                self._queues[stage, event.group].append(key)
            self._host[stage] += 1
        return self._host[stage] > before

    def _advance_device(self, stage: int) -> bool:
        before = self._device[stage]
        while self._device[stage] < self._host[stage]:
            match self._programs[stage][self._device[stage]]:
                case Wait(batch):
                    if (stage, batch) not in self._ended:
                        break
                    self._clock[stage] = max(self._clock[stage], self._ended[stage, batch])
                case Start(batch):
                    self._reached[stage, batch] = self._clock[stage]
                case Compute(seconds):
                    self._computing[stage].append((self._clock[stage], self._clock[stage] + seconds))
                    self._clock[stage] += seconds
            self._device[stage] += 1
        return self._device[stage] > before

    def _begin(self) -> Iterator[bool]:
        for place, queue in self._queues.items():
            if queue and queue[0] in self._reached and queue[0] not in self._began:
                self._began[queue[0]] = max(self._reached[queue[0]], self._free[place])
                yield True

    def _end(self) -> Iterator[bool]:
        for place, queue in self._queues.items():
            partners = self._partners[queue[0]] if queue else []
            if queue and all(key in self._began for key in (queue[0], *partners)):
                key = queue.pop(0)
                last = max(self._began[one] for one in (key, *partners))
                self._ended[key] = self._free[place] = last + self._message_seconds
                yield True

    def result(self) -> Replay:
        stuck = tuple(f"stage {stage} at {self._programs[stage][at]}" for stage, at in enumerate(self._device)
                      if at < len(self._programs[stage]))
        left = tuple(f"stage {stage}: batch {batch} of {group} never ends"
                     for (stage, group), queue in self._queues.items() for _, batch in queue)
        return Replay(stuck or left, max(self._clock), tuple(map(self._occupied, range(len(self._programs)))))

    def _occupied(self, stage: int) -> float:
        spans = sorted((began, self._ended[key]) for key, began in self._began.items()
                       if key[0] == stage and key in self._ended)
        merged: list[tuple[float, float]] = []
        for start, stop in spans:
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], stop)
            else:
                merged.append((start, stop))
        computing = self._computing[stage]
        shared = sum(max(0.0, min(stop, end) - max(start, begin)) for begin, end in computing for start, stop in merged)
        total = sum(end - begin for begin, end in computing)
        return shared / total if total else 0.0


def _matched(programs: Sequence[Program]) -> tuple[dict[Key, list[Key]], dict[Key, list[tuple[int, int]]]]:
    """For each batch: the batches with the other halves, and which other hosts it connects to at which event."""
    halves: defaultdict[tuple, list[tuple[Key, int, tuple]]] = defaultdict(list)
    partners: dict[Key, list[Key]] = {}
    for stage, program in enumerate(programs):
        for place, event in enumerate(program):
            if isinstance(event, Start):
                partners[stage, event.batch] = []
                for one in event.messages:
                    ends = (stage, one.peer) if one.is_sent else (one.peer, stage)
                    halves[(event.group, *ends, one.is_sent)].append(((stage, event.batch), place, one.content))
    connecting: defaultdict[Key, list[tuple[int, int]]] = defaultdict(list)
    for (group, source, target, is_sent), ours in list(halves.items()):
        others = halves.get((group, source, target, not is_sent), [])
        if len(ours) != len(others):
            raise ValueError(f"{group}: {len(ours)} halves from stage {source} to {target} meet {len(others)}")
        for number, ((key, _, content), (other, place, found)) in enumerate(zip(ours, others, strict=True)):
            if content != found:
                raise ValueError(f"{group}: from stage {source} to {target} {content} meets {found}")
            partners[key].append(other)
            if number == 0:
                connecting[key].append((other[0], place))
    return partners, connecting
