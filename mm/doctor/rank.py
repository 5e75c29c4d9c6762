"""One rank of ``mm-doctor``: ``python -m mm.doctor.rank FOLDER DEVICE`` under a launcher, or as the only rank.

Tries the device, its kernels, the links to the other ranks, and a training step.  Rank 0 writes each finding at once,
and every rank what it begins, so that both are known after a crash or a hang.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm.doctor.begun import FOUND, begun_file
from mm.doctor.diagnosis import Diagnosis, fault, ok, warning
from mm.ending import end_with_launcher, is_first_rank, run_command, status_of
from mm.errors import refuse
from mm.launched import Launched, launcher_problems

if TYPE_CHECKING:
    from mm.device.device import Device
    from mm.parallel.mesh import Mesh


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if this device cannot be used."""
    end_with_launcher()
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: status_of(lambda: _examine(Path(words[0]), words[1])), lambda: "nothing was written",
                       is_rank=True)


def _examine(folder: Path, wanted: str) -> int:
    refuse(launcher_problems(os.environ))
    with open(begun_file(folder, Launched.here().rank), "w", encoding="utf-8", buffering=1) as stream:
        def begin(task: str) -> None:
            stream.write(f"{task}\n")

        begin("device")
        from mm.device.device import Device

        device = Device.pick(wanted)
        begin("meeting the other ranks")
        # megatron looks at the device while it is imported, so everything built on it comes after this
        from mm.doctor.links import link_findings
        from mm.doctor.step import model
        from mm.parallel import mesh as parallel
        from mm.parallel.agreement import by_rank

        mesh = parallel.start(device, model(), tp_size=1)
        names = by_rank(mesh, _name(device, mesh))
        with open(folder / FOUND if is_first_rank() else os.devnull, "w", encoding="utf-8", buffering=1) as found:
            found.writelines(one.line() for one in chain(
                _device(device), link_findings(device, mesh, names, begin), _steps(device, mesh, begin)))
        begin("end")
        parallel.stop()
    return 0


def _name(device: "Device", mesh: "Mesh") -> str:
    """This rank with its device, and among several machines with its own."""
    is_one_machine = Launched.here().num_local_ranks in (None, mesh.world_size)
    place = "" if is_one_machine else f" of {socket.gethostname()}"
    return f"rank {mesh.rank} ({device.torch_device}{place})"


def _device(device: "Device") -> Iterator[Diagnosis]:
    yield ok("device", f"{device.kind}: {device.name}")
    for note in device.notes:
        yield warning("device", note, "follow the advice in this note")
    names = {field.name: getattr(device.kernels, field.name) for field in fields(device.kernels)}
    yield ok("kernels", ", ".join(f"{name} {_named(one)}" for name, one in names.items()
                                  if callable(one) and name != "rounded_at_random"))


def _named(kernel: Any) -> str:
    """Where a function comes from, also through ``functools.partial``."""
    inner = getattr(kernel, "func", kernel)
    return f"{inner.__module__}.{inner.__qualname__}" if hasattr(inner, "__qualname__") else type(inner).__name__


def _steps(device: "Device", mesh: "Mesh", begin: Callable[[str], None]) -> Iterator[Diagnosis]:
    from mm.doctor.step import GOLDEN, TOLERANCE, trained_step

    for precision, tolerance in TOLERANCE.items():
        begin(f"training step in {precision}")
        found = trained_step(device, mesh, precision)
        text = ", ".join(f"{name} {found[name]:.6f} (expected {GOLDEN[name]:.6f})" for name in GOLDEN)
        if all(abs(found[name] / GOLDEN[name] - 1) <= tolerance for name in GOLDEN):
            yield ok(f"training step in {precision}", text)
        else:
            yield fault(f"training step in {precision}", text,
                        "this device computes something else: compare with --device cpu, update the driver and the "
                        "device's libraries to a pair of versions that was tested, and report it (mm-doctor --report)")


if __name__ == "__main__":
    sys.exit(main())
