"""One rank of ``mm-doctor``: ``python -m mm.doctor.rank FOLDER DEVICE`` under a launcher, or as the only rank.

Tries the device, its kernels, the links to the other ranks, and a training step.  Rank 0 writes each finding at once,
and every rank what it begins, so that both are known after a crash or a hang, also one in the import of torch.
"""

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from mm.doctor.machine import Diagnosis, fault, ok, warning
from mm.doctor.trial import FOUND, begun_file
from mm.environment import Launched, launcher_problems, software
from mm.errors import refuse
from mm.process import end_with_launcher, is_first_rank, run_command, status_of

if TYPE_CHECKING:
    from mm.device.device import Device


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
        from mm.device.device import Device, installed_versions

        device = Device.pick(wanted)
        begin("meeting the other ranks")
        # megatron looks at the device while it is imported, so everything built on it comes after this
        from mm.doctor.device_checks import link_findings, model, step_findings
        from mm.parallel import mesh as parallel
        from mm.parallel.agreement import by_rank

        mesh = parallel.start(device, model(), tp_size=1)
        names = by_rank(mesh, f"rank {mesh.rank} ({device.torch_device} of {socket.gethostname()})")
        facts = by_rank(mesh, {**software(), **installed_versions()})
        with open(folder / FOUND if is_first_rank() else os.devnull, "w", encoding="utf-8", buffering=1) as found:
            found.writelines(one.line() for one in chain(
                _device(device), _different(facts, names), link_findings(device, mesh, names, begin),
                step_findings(device, mesh, begin)))
        begin("end")
        parallel.stop()
    return 0


def _device(device: "Device") -> Iterator[Diagnosis]:
    from mm.device.device import kernel_name

    yield ok("device", f"{device.platform.name}: {device.name}")
    for note in device.notes:
        yield warning("device", note, "follow the advice in this note")
    yield ok("kernels", ", ".join(f"{field.name} {kernel_name(getattr(device.kernels, field.name))}"
                                  for field in fields(device.kernels)))


def _different(facts: Sequence[Mapping[str, str]], names: Sequence[str]) -> Iterator[Diagnosis]:
    """Ranks with other versions or other code than rank 0."""
    for name, own in zip(names, facts, strict=True):
        found = [f"{key} is {own.get(key, 'absent')}, on rank 0 {facts[0].get(key, 'absent')}"
                 for key in sorted({*own, *facts[0]}) if own.get(key) != facts[0].get(key)]
        if found:
            yield fault("nodes differ", f"{name}: {'; '.join(found)}",
                        "install the same on every node, and copy the same code there")


if __name__ == "__main__":
    sys.exit(main())
