"""Replaces names in torch and megatron as a platform declares, so that code for CUDA runs elsewhere.

This is the only file that patches.  megatron-core is written for CUDA; on NPUs ``torch_npu``'s ``transfer_to_npu``
redirects it, and the tables of ``npu.py`` and ``cpu.py`` do the rest.
"""

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock

import torch
from packaging.version import Version
from torch.distributed import ProcessGroupGloo, Store  # pyright: ignore[reportPrivateImportUsage]

_make = ProcessGroupGloo.__init__
_PRINTS_REPORT = Version("2.8") <= Version(torch.__version__) < Version("2.13")
"""Whether gloo prints which ranks a new group is connected to: torch 2.10 does, 2.7.1 and 2.13 do not."""
_output = Lock()
"""Held by the thread that has replaced the process's standard output."""


@contextmanager
def _in_batch_policy() -> Iterator[None]:
    """Let threads that start in this block have the policy SCHED_BATCH: when they wake, they preempt no other thread.

    A group's loop thread wakes for each message; if it preempts the sending worker, which holds the connection's lock,
    it only polls until its time slice ends (``Pair::handleEvents`` in gloo's ``transport/tcp/pair.cc``).  This saves
    more than a third of the CPU time of tiny models with tensor parallelism on two cores (docs/performance.md).
    """
    policy = os.sched_getscheduler(0)
    if policy != os.SCHED_OTHER:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, os.sched_param(0))


@_in_batch_policy()
def with_one_worker(
    group: ProcessGroupGloo, store: Store, rank: int, size: int, timeout: timedelta, enable_reconfigure: bool = False
) -> None:
    """Construct ``group`` as torch does, also on the interfaces in GLOO_SOCKET_IFNAME, but with one worker thread.

    After each collective a worker writes the collective's name into a string that both workers of a group share, and
    takes no lock (``ProcessGroupGloo::runLoop`` in ``ProcessGroupGloo.cpp``; seen with torch 2.13 and 2.15, not 2.7.1).
    Two collectives with names of more than 15 characters that end at the same time corrupt the heap: megatron's
    coalesced buckets killed processes on the CPU with "malloc(): unaligned tcache chunk detected".  One worker runs the
    collectives of a group in order, as NCCL and HCCL do.

    ``enable_reconfigure``: torch 2.15 passes it; it is true only for groups that our code never makes.
    """
    assert not enable_reconfigure
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]  (the stub has another name)
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [ProcessGroupGloo.create_device(interface=name) for name in interfaces] or [
        ProcessGroupGloo.create_default_device()]
    options._timeout, options._threads = timeout, 1
    with _without_report() if _PRINTS_REPORT else nullcontext():
        _make(group, store, rank, size, options)


@contextmanager
def _without_report() -> Iterator[None]:
    """Drop gloo's report from the standard output: it calls ranks that connect later "NOT connected"."""
    with _output, os.fdopen(os.memfd_create("output"), "w+b") as kept, os.fdopen(os.dup(1), "wb") as output:
        sys.stdout.flush()
        os.dup2(kept.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(output.fileno(), 1)
            kept.seek(0)
            output.writelines(line for line in kept if not line.startswith(b"[Gloo] Rank "))


@dataclass(frozen=True)
class Shim:
    """One replaced name.  ``target`` is "module:attribute"; a test checks that every target exists."""

    target: str
    replacement: object
    reason: str


COMMON_SHIMS: tuple[Shim, ...] = (
    Shim("megatron.core.optimizer:Adam", torch.optim.AdamW,
         "megatron takes TransformerEngine's or apex's Adam where it can be imported; neither clips and guards in its "
         "kernel, and Ascend's apex has no kernel behind it and raises"),
    Shim("megatron.core.optimizer:USING_PYTORCH_OPTIMIZER", True, "goes with the line above"),
    Shim("megatron.core.optimizer.distrib_optimizer:HAVE_APEX_OR_TE", False, "goes with the lines above"),
    Shim("torch.distributed:ProcessGroupGloo.__init__", with_one_worker, "two workers corrupt the heap"),
)
"""torch's fused AdamW on every machine, whatever else is installed (the same arithmetic and states), and safe gloo."""


def apply_shims(shims: Sequence[Shim]) -> None:
    """Apply ``shims`` in order.  Call it before anything else imports megatron."""
    _import_megatron()
    for shim in shims:
        module_name, attribute = shim.target.split(":")
        owner: object = importlib.import_module(module_name)
        *parents, name = attribute.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        assert hasattr(owner, name), f"shim target {shim.target} does not exist"
        setattr(owner, name, shim.replacement)


def _import_megatron() -> None:
    """Import megatron without torch.compile, with which it decorates functions that our kernels replace.

    torch.compile would build code for every new shape.  megatron's own switch comes too late for functions decorated at
    the package's import, and torch.compile alone takes 2.4 s to load its compiler.
    """
    torch_compile = torch.compile
    torch.compile = lambda function: function
    try:
        importlib.import_module("megatron.core.jit").disable_jit_fuser()
    finally:
        torch.compile = torch_compile
