"""Environment variables that make runs fail or slow.

A pure function of the variables, the network interfaces and the number of cores.
"""

from collections.abc import Iterator, Mapping, Sequence

from mm.console import whole_number
from mm.doctor.diagnosis import Diagnosis, fault, ok, warning
from mm.launched import launcher_problems

SHOWN = ("ACLNN_", "ASCEND_", "ATB_", "CANN_", "COMBINED_", "CPU_AFFINITY", "CUDA_", "GLOO_", "HCCL_", "MASTER_",
         "MKL_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_", "TASK_QUEUE", "TORCH_", "TP_")
"""Prefixes of the names that matter."""
_PATTERNS = ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
_INTERFACES = (*_PATTERNS, "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_ADDRESSES = ("HCCL_IF_IP",)
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_SLOW = {"CUDA_LAUNCH_BLOCKING": "1", "ASCEND_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
         "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}  # fmt: skip
"""Values that are for debugging, or that turn a fast link off."""
_CONNECT_SECONDS = range(120, 7201)
"""HCCL's documentation of HCCL_CONNECT_TIMEOUT."""


def variable_findings(
    environment: Mapping[str, str], interfaces: Mapping[str, Sequence[str]], num_cores: int, num_processes: int
) -> Iterator[Diagnosis]:
    """``interfaces``: the addresses of each network interface; ``num_processes``: ranks on this machine."""
    for name in _INTERFACES:
        if (value := environment.get(name)) and not _names_an_interface(name, value, interfaces):
            yield fault(name, f"{value!r} names no interface of this machine, which has {', '.join(interfaces)}",
                        f"unset {name}, or set it to the interface of the training network")
    known = {address for some in interfaces.values() for address in some}
    for name in _ADDRESSES:
        if (value := environment.get(name)) and value not in known:
            yield fault(name, f"{value} is not an address of this machine",
                        f"unset {name}, or set it to one that `ip addr` shows")
    for name in _DEVICES:
        if environment.get(name) == "":
            yield warning(name, "set and empty, which hides all devices", f"unset {name}")
    for name, value in _SLOW.items():
        if environment.get(name, "").upper() == value:
            yield warning(name, f"{value} makes runs slow", f"unset {name} when nothing is to be debugged")
    yield from _numbers(environment, num_cores, num_processes)
    for problem in launcher_problems(environment):
        yield fault("launcher", problem, "unset it: torchrun sets it in each rank that it starts")
    shown = sorted(f"{name}={value}" for name, value in environment.items() if name.startswith(SHOWN))
    yield ok("variables", ", ".join(shown) or "none that matter")


def _names_an_interface(name: str, value: str, interfaces: Mapping[str, Sequence[str]]) -> bool:
    """Whether the ``value`` of variable ``name`` is valid here.

    NCCL and HCCL take a list of prefixes of names, of which one must exist; ^ excludes them, and = demands whole names.
    gloo takes a list of prefixes, all of which must exist, and knows neither ^ nor = (seen with torch 2.13).
    """
    if name not in _PATTERNS:
        return all(word and any(one.startswith(word) for one in interfaces) for word in value.split(","))
    if value.startswith("^"):
        return True
    exact, words = value.startswith("="), value.lstrip("=").split(",")
    return any(one == word if exact else one.startswith(word) for one in interfaces for word in words if word)


def _numbers(environment: Mapping[str, str], num_cores: int, num_processes: int) -> Iterator[Diagnosis]:
    connect = environment.get("HCCL_CONNECT_TIMEOUT")
    if connect is not None and whole_number(connect) not in _CONNECT_SECONDS:
        yield fault("HCCL_CONNECT_TIMEOUT", f"{connect!r}; HCCL takes 120 to 7200 seconds",
                    "export HCCL_CONNECT_TIMEOUT=1200")
    given = environment.get("OMP_NUM_THREADS")
    threads = None if given is None else whole_number(given)
    if given is not None and not threads:
        yield fault("OMP_NUM_THREADS", f"{given!r} is not a positive number", "export OMP_NUM_THREADS=1")
    elif threads is not None and threads > 1 and threads * num_processes > num_cores:
        yield warning("OMP_NUM_THREADS", f"{threads} threads in each of {num_processes} processes are more than the "
                      f"{num_cores} cores", f"export OMP_NUM_THREADS={max(1, num_cores // num_processes)}")
