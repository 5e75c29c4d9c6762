"""A group of gloo has one worker, because two of them corrupt the heap, and its threads have a policy of their own."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from mm.device import shims
from tests.files import ROOT


def test_collectives_that_end_together_leave_the_heap_whole() -> None:
    """With torch 2.13's two workers, nine of ten such processes died with "unaligned tcache chunk detected"."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.device.gloo_worker"], cwd=ROOT, text=True,
                          env=dict(os.environ), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("interfaces", "num_interfaces"), [("", 1), ("lo", 1), ("lo,lo", 2)])
def test_only_the_number_of_workers_differs(
    monkeypatch: pytest.MonkeyPatch, interfaces: str, num_interfaces: int
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    if not interfaces:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    ours, torchs = (_options(make) for make in (shims.with_one_worker, shims._make))
    assert ours == (1, num_interfaces, timedelta(minutes=3))
    assert torchs == (2 * num_interfaces, num_interfaces, timedelta(minutes=3))


def test_the_threads_of_a_group_preempt_no_other_thread() -> None:
    """The process keeps its policy.  If that is not the usual one, the threads have it too."""
    program = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
from mm.device.device import Device
Device.pick("cpu")
os.sched_setscheduler(0, int(sys.argv[1]), os.sched_param(0))
before = set(os.listdir("/proc/self/task"))
group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(minutes=3))
started = set(os.listdir("/proc/self/task")) - before
print(os.sched_getscheduler(0), len(started) > 1, {os.sched_getscheduler(int(one)) for one in started})
os._exit(sys.stdout.flush() or 0)
"""
    for own, threads in ((os.SCHED_OTHER, os.SCHED_BATCH), (os.SCHED_IDLE, os.SCHED_IDLE)):
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", program, str(own)], cwd=ROOT, text=True,
                              capture_output=True, check=False)
        assert done.stdout == f"{own} True {{{threads}}}\n", done.stderr


def test_only_gloos_report_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    with shims._without_report():
        os.write(1, b"before\n[Gloo] Rank 0 is connected to 0 peer ranks. Expected number of connected peer ranks is : "
                    b"1\n[Gloo] Rank 0 is NOT connected to: [1]\nwith no end")
    os.write(1, b", and more")
    assert capfd.readouterr().out == "before\nwith no end, and more"


def test_an_interface_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,none0")
    with pytest.raises(RuntimeError, match="none0"):
        _options(shims.with_one_worker)


def test_torch_2_15_asks_for_a_group_with_another_argument() -> None:
    """As its own ``init_process_group`` does, whatever the value."""
    assert _options(shims.with_one_worker, enable_reconfigure=False)[0] == 1


def _options(make: object, **more: bool) -> tuple[int, int, timedelta]:
    """Number of workers, number of interfaces and timeout of a group that ``make`` constructs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroupGloo, "__init__", make)
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(minutes=3), **more)
    return group.options._threads, len(group.options._devices), group.options._timeout
