"""A rank that marks each phase as it begins and ends: ``python -m benchmarks.kills.worker FLAGS...``, under mm.launch.

The program itself is mm.train; its classes are replaced by ones that add marks.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from benchmarks.kills import marks
from benchmarks.kills.marks import Marker
from mm import train
from mm.data.feed.owner import DataOwner
from mm.device.device import Device
from mm.signals import StopSignals

Device.pick("cpu")

from mm.parallel import watchdog  # noqa: E402
from mm.parallel.mesh import Mesh  # noqa: E402
from mm.parallel.watchdog import Watchdog  # noqa: E402
from mm.training import feed, save  # noqa: E402

_PHASES = {"load": marks.LOAD, "data": marks.OPEN, "save": marks.SAVE, "export": marks.EXPORT}
"""Phases of the watchdog and how they are marked; ``check`` and ``start`` are parts of START."""


class MarkedWatchdog(Watchdog):
    marker: Marker

    def __enter__(self) -> Watchdog:
        with self.marker.during(marks.JOIN):
            super().__enter__()
            self._beating.joined.wait()
        self.marker.write(marks.START, True)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)

    def place(self, mesh: Mesh) -> None:
        super().place(mesh)
        self.marker.write(marks.START, False)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name not in _PHASES:
            with super().phase(name):
                yield
            return
        with self.marker.during(_PHASES[name]), super().phase(name):
            yield

    @contextmanager
    def step(self, iteration: int, phase: str = "") -> Iterator[None]:
        name = phase or marks.STEP
        self.marker.write(name, True, iteration)
        with super().step(iteration, phase):
            yield
        samples = () if self.plan is None else tuple(one.samples for one in self.plan.microbatches)
        self.marker.write(name, False, iteration, samples)


class MarkedOwner(DataOwner):
    marker: Marker

    def _share_step(self):
        with self.marker.during(marks.DATA):
            return super()._share_step()


class MarkedSave(save.WrittenSave):
    marker: Marker

    def run(self) -> None:
        with self.marker.during(marks.BACKGROUND):
            super().run()


class MarkedSignals(StopSignals):
    marker: Marker

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.marker.write(marks.SIGNAL, True, number)
        super()._handle(number, frame)


def main(flags: list[str]) -> int:
    marker = Marker()
    MarkedWatchdog.marker = MarkedOwner.marker = MarkedSave.marker = MarkedSignals.marker = marker
    watchdog.Watchdog, feed.DataOwner, save.WrittenSave = MarkedWatchdog, MarkedOwner, MarkedSave
    train.StopSignals = MarkedSignals
    return train.main(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
