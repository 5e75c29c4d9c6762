"""``--async-save``: a thread of each rank writes a checkpoint from copies in host memory while training continues.

No thread communicates.  Each step's update tells all ranks whether any of them is still writing (``Ballot``), so they
commit after the same step.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from mm.device.device import Device
from mm.errors import AgreedError, collected
from mm.formats.host_copies import HostCopies
from mm.formats.pipelined_write import ON_HOST
from mm.formats.training import CheckpointTensor
from mm.formats.training_writer import Retention
from mm.parallel.agreement import together
from mm.parallel.mesh import Mesh
from mm.training.save import BegunSave, ToWrite


@dataclass(frozen=True)
class _WrittenSave:
    """A save that a thread writes."""

    begun: BegunSave
    retention: Retention
    tensors: ToWrite
    """Copies in host memory."""
    written: Future[list[CheckpointTensor]]

    def run(self) -> None:
        """Write the files, in the thread."""
        try:
            self.written.set_result(self.begun.write(self.tensors, ON_HOST))
        except BaseException as error:  # raised on all ranks by the commit
            self.written.set_exception(error)


class BackgroundSaves:
    """The saves that are being written: all of one iteration, so one copy in memory is enough."""

    def __init__(self, device: Device) -> None:
        self._copies = HostCopies(device.runtime)
        self._pending: list[_WrittenSave] = []

    @property
    def iteration(self) -> int | None:
        """The iteration being saved; None if no save is pending.  The same on all ranks."""
        return self._pending[0].begun.manifest.iteration if self._pending else None

    @property
    def is_writing(self) -> bool:
        """Whether this rank has files to write."""
        return any(not one.written.done() for one in self._pending)

    @property
    def copy_bytes(self) -> int:
        """Host memory that the copies take on this rank."""
        return self._copies.num_bytes

    def begin(self, begun: BegunSave, retention: Retention, mesh: Mesh) -> None:
        """Copy the tensors and start writing.  Pending saves must be of the same iteration; they share their copy.

        Raises UserError on every rank if one has too little memory.
        """
        assert self.iteration in (None, begun.manifest.iteration), "the earlier save must be committed first"
        before = list(self._pending)
        copies = [values for _, values in before[0].tensors] if before else together(
            mesh, lambda: self._copies.take([values for _, values in begun.tensors]))
        tensors = [(tensor, values) for (tensor, _), values in zip(begun.tensors, copies, strict=True)]
        begun = replace(begun, tensors=())  # frees them: they may be copies in host memory too
        pending = _WrittenSave(begun, retention, tensors, Future())
        self._pending.append(pending)
        threading.Thread(target=_run, args=(pending, before), name="save", daemon=True).start()

    def commit(self, mesh: Mesh, saved: Callable[[Path], object] = lambda _: None) -> None:
        """Commit what is pending, together with all ranks, and tell ``saved``; waits until they are written.

        Raises AgreedError, after all have been tried, if one rank could not write one of them.
        """
        pending, self._pending = self._pending, []
        problems: list[str] = []
        for one in pending:
            with collected(problems):
                saved(one.begun.commit(mesh, one.written.result, one.retention))
        if problems:
            raise AgreedError(problems)


def _run(pending: _WrittenSave, before: Sequence[_WrittenSave]) -> None:
    """Write one save after another, so that they do not compete for the disk."""
    for one in before:
        one.written.exception()  # waits
    pending.run()
