"""The trial of ``mm-doctor``: a small job on the devices, and where it fails, each device alone."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mm.doctor.begun import FOUND, begun, behind_text
from mm.doctor.diagnosis import Diagnosis, Level, fault, ok, read_lines

RANK = "mm.doctor.rank"
_END_SECONDS, _BEAT_SECONDS = 20.0, 0.1
_PATIENCE = 2.0
"""A device may take this many times as long as the first that has passed, and ``_END_SECONDS`` more."""
_ERRORS = "errors.txt"
_OF_A_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK",
             "NNODES")  # fmt: skip
"""Variables by which a launcher places a process in a job."""
_ERROR = re.compile(r"^(?:\[rank ?(\d+)\]:? )?([\w.]*Error: .+|error: .+)$", re.MULTILINE)
_ROOT = re.compile(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL)
"""Finds the rank that failed first, and its status, in torchrun's report."""


@dataclass(frozen=True)
class TrialNode:
    """This machine among those of a trial."""

    node: int = 0
    num_nodes: int = 1
    host: str = "localhost"
    port: int = 0

    def words(self) -> list[str]:
        """For the launcher."""
        if self.num_nodes == 1:
            return ["--standalone", "--nnodes", "1"]
        return ["--nnodes", str(self.num_nodes), "--node_rank", str(self.node), "--master_addr", self.host,
                "--master_port", str(self.port)]


def trial_findings(wanted: str, num_processes: int, seconds: float, own: TrialNode) -> Iterator[Diagnosis]:
    """What ``num_processes`` ranks of this machine find, together with those of the other machines, in ``seconds``.

    Node 0 has the findings of all ranks.
    """
    from mm.progress import ongoing  # not at the top: tqdm may be missing, and the other checks go on

    with TemporaryDirectory(prefix="mm-doctor-") as name:
        folder = Path(name)
        words = [sys.executable, "-m", "mm.launch", *own.words(), "--nproc_per_node", str(num_processes), "-m", RANK,
                 str(folder), wanted]
        process = _start(words, folder, environment())
        with ongoing(f"trial of {num_processes} processes, of at most {seconds:.0f} s"):
            errors = _errors(process, folder, seconds)
        found, by_rank = _found(folder), begun(folder)
        yield from found
        num_ranks = num_processes * own.num_nodes
        if errors is None:
            cure = ("" if num_processes == 1 else "see whether --num-processes 1 works; if so, ") + (
                "look at the network interface (GLOO_SOCKET_IFNAME, HCCL_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and at the "
                "links between the devices; slow devices need more --trial-seconds")
            yield fault("trial", f"{num_ranks} processes wait for each other: no end within {seconds:.0f} s; "
                        f"{behind_text(by_rank)}", cure)
        elif process.returncode or (not found and own.node == 0):
            again = " ".join(["mkdir -p /tmp/trial;", *words[:-2], "/tmp/trial", wanted])
            yield fault("trial", f"{num_ranks} processes ended with status {process.returncode}: "
                        f"{_first(errors, by_rank)}{cause(errors)}", f"to see all of it: {again}")
        elif not found:
            yield ok("trial", f"{num_ranks} processes on {own.num_nodes} nodes; node 0 prints what they found")
        if own.num_nodes == 1 and num_processes > 1 and (
            errors is None or process.returncode or any(one.level is Level.FAULT for one in found)):
            yield from _alone(wanted, num_processes, seconds)


def _alone(wanted: str, num_processes: int, seconds: float) -> Iterator[Diagnosis]:
    """Which devices fail alone: each runs the trial as the only rank, all at the same time."""
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(TemporaryDirectory(prefix="mm-doctor-"))) for _ in range(num_processes)]
        processes = [_start([sys.executable, "-m", RANK, str(folder), wanted], folder,
                            environment() | {"LOCAL_RANK": str(index)}) for index, folder in enumerate(folders)]
        for process in processes:  # they have no launcher that would end them after a signal
            stack.callback(end, process)
        _wait_for_all(processes, seconds)
        outputs = [_errors(process, folder, 0.0) for process, folder in zip(processes, folders, strict=True)]
        is_clean = True
        for index, (folder, process, errors) in enumerate(zip(folders, processes, outputs, strict=True)):
            found = [one for one in _found(folder) if one.level is Level.FAULT]
            at = next((some[-1] for some in begun(folder).values() if some), "its start")
            problem = f"no end, still at: {at}" if errors is None else (
                f"status {process.returncode} at: {at}: {cause(errors)}" if process.returncode else
                "; ".join(f"{one.name}: {one.what}" for one in found))
            if problem:
                is_clean = False
                yield fault("device alone", f"LOCAL_RANK {index} fails without the others, too: {problem}",
                            "leave this device out (CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES with the others "
                            "only), and have it repaired")
        if is_clean:
            yield ok("device alone", f"each of the {num_processes} passes without the others, so look at the links")


def _wait_for_all(processes: Sequence["subprocess.Popen[bytes]"], seconds: float) -> None:
    """Wait until all have ended, at most ``seconds``; once one has passed, not much longer than it took."""
    began = time.monotonic()
    while any(one.poll() is None for one in processes) and time.monotonic() < began + seconds:
        if any(one.poll() == 0 for one in processes):
            seconds = min(seconds, _PATIENCE * (time.monotonic() - began) + _END_SECONDS)
        time.sleep(_BEAT_SECONDS)


def environment() -> dict[str, str]:
    """This process's variables, without those by which a launcher or a pod places it in a larger job."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("PET_", "TORCHELASTIC_")) and name not in _OF_A_JOB}
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONWARNINGS": "ignore"}


def _start(words: Sequence[str], folder: Path, variables: dict[str, str]) -> "subprocess.Popen[bytes]":
    with open(folder / _ERRORS, "wb") as errors:
        return subprocess.Popen(words, env=variables, stdout=subprocess.DEVNULL, stderr=errors)


def _errors(process: "subprocess.Popen[bytes]", folder: Path, seconds: float) -> str | None:
    """The standard error of ``process``; None if it was still running after ``seconds`` and was ended."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)
    return (folder / _ERRORS).read_text(errors="replace")


def end(process: "subprocess.Popen[bytes]") -> None:
    """Let the launcher end its ranks; if it is killed instead, they notice (``end_with_launcher``)."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _found(folder: Path) -> list[Diagnosis]:
    output = folder / FOUND
    return read_lines(output.read_bytes()) if output.exists() else []


def _first(output: str, by_rank: dict[int, list[str]]) -> str:
    """Which rank failed first, and at what."""
    if (found := _ROOT.search(output)) is None:
        return ""
    begun_by_it = by_rank.get(int(found[1]), [])
    return f"rank {found[1]} failed first, with status {found[2]}, at: {(begun_by_it or ['its start'])[-1]}: "


def cause(output: str) -> str:
    """The first error of the rank that failed first, or else of any rank, or the last line."""
    root = _ROOT.search(output)
    errors = [(rank, text) for rank, text in _ERROR.findall(output) if "ChildFailedError" not in text]
    own = [text for rank, text in errors if root is not None and rank == root[1]]
    return (own or [text for _, text in errors] or output.strip().splitlines()[-1:] or ["no output"])[0]
