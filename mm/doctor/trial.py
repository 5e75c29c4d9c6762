"""The trial of ``mm-doctor``: a small job on the devices, started here, and what each of its ranks does.

A rank is ``python -m mm.doctor.trial FOLDER DEVICE`` under a launcher, or alone.  It tries the device, its kernels, the
links to the other ranks, and a training step.  Rank 0 writes each finding at once, and every rank what it begins, so
that both are known after a crash or a hang, also one in the import of torch.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mm.doctor.machine import Diagnosis, fault, ok, read_lines, warning
from mm.environment import Launched, launcher_problems, software
from mm.errors import refuse
from mm.process import end_with_launcher, is_first_rank, run_command, status_of

if TYPE_CHECKING:
    from mm.device.device import Device

RANK = "mm.doctor.trial"
FOUND = "found.jsonl"
"""The findings, which rank 0 writes."""
_END_SECONDS = 20.0
_ERRORS = "errors.txt"
_OF_A_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK",
             "NNODES")  # fmt: skip
"""Variables by which a launcher places a process in a job."""
_ERROR = re.compile(r"^(?:\[rank ?\d+\]:? )?([\w.]*Error: .+|error: .+)$", re.MULTILINE)
_ROOT = re.compile(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL)
"""Finds the rank that failed first, and its status, in torchrun's report."""


@dataclass(frozen=True)
class TrialNode:
    """This machine among those of a trial."""

    num_processes: int
    """Its ranks."""
    node: int = 0
    num_nodes: int = 1
    host: str = "localhost"
    port: int = 0

    def words(self) -> list[str]:
        """For the launcher."""
        nodes = ["--standalone", "--nnodes", "1"] if self.num_nodes == 1 else [
            "--nnodes", str(self.num_nodes), "--node_rank", str(self.node), "--master_addr", self.host,
            "--master_port", str(self.port)]
        return [*nodes, "--nproc_per_node", str(self.num_processes)]


def begun_file(folder: Path, rank: int) -> Path:
    """Where a rank of the trial writes what it begins, so that its place is known after a crash or a hang."""
    return folder / f"begun.{rank}"


def trial_findings(wanted: str, seconds: float, own: TrialNode) -> Iterator[Diagnosis]:
    """What the ranks of this machine find, together with those of the other machines, in at most ``seconds``.  Node 0
    has the findings of all ranks."""
    from mm.console import ongoing  # not at the top: tqdm may be missing, and the other checks go on

    num_ranks = own.num_processes * own.num_nodes
    with TemporaryDirectory(prefix="mm-doctor-") as name:
        folder = Path(name)
        words = [sys.executable, "-m", "mm.launch", *own.words(), "-m", RANK, name, wanted]
        with ongoing(f"trial of {num_ranks} processes, of at most {seconds:.0f} s"):
            status, errors = _run(words, folder, seconds)
        found = read_lines((folder / FOUND).read_bytes()) if (folder / FOUND).exists() else []
        yield from found
        if status is None:
            yield fault("trial", f"no end of {num_ranks} processes within {seconds:.0f} s; {_places(folder)}",
                        "see whether --num-processes 1 works; if so, look at the network interface "
                        "(GLOO_SOCKET_IFNAME, HCCL_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), the links and the other "
                        "nodes; slow devices need more --trial-seconds")
        elif status or (not found and own.node == 0):
            root = _ROOT.search(errors)
            first = "" if root is None else f"rank {root[1]} failed first, with status {root[2]}; "
            again = " ".join(["mkdir -p /tmp/trial;", *words[:-2], "/tmp/trial", wanted])
            yield fault("trial", f"{num_ranks} processes ended with status {status}: {first}{cause(errors)}; "
                        f"{_places(folder)}", f"to see all of it: {again}; CUDA_VISIBLE_DEVICES or "
                        f"ASCEND_RT_VISIBLE_DEVICES with one device and --num-processes 1 tries it alone")
        elif not found:
            yield ok("trial", f"{num_ranks} processes on {own.num_nodes} nodes; node 0 prints what they found")


def environment() -> dict[str, str]:
    """This process's variables, without those by which a launcher or a pod places it in a larger job."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("PET_", "TORCHELASTIC_")) and name not in _OF_A_JOB}
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONWARNINGS": "ignore"}


def _run(words: list[str], folder: Path, seconds: float) -> tuple[int | None, str]:
    """Exit status and standard error of the launcher; None if it still ran after ``seconds`` and was ended."""
    with open(folder / _ERRORS, "wb") as errors:
        process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=errors)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        process.terminate()  # the launcher ends its ranks; if it is killed instead, they notice (``end_with_launcher``)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return status, (folder / _ERRORS).read_text(errors="replace")


def _places(folder: Path) -> str:
    """What each rank of this machine began last."""
    begun = {int(path.suffix[1:]): path.read_text().splitlines() for path in folder.glob("begun.*")}
    return ", ".join(f"rank {rank} was at: {some[-1]}" for rank, some in sorted(begun.items()) if some) or (
        "no rank has begun")


def cause(output: str) -> str:
    """The first error of any rank, or else the last line."""
    errors = [text for text in _ERROR.findall(output) if "ChildFailedError" not in text]
    return (errors or output.strip().splitlines()[-1:] or ["no output"])[0]


# One rank


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
