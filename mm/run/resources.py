"""Checks whether a node has the resources for its part of a run: open files, shared and host memory, versions.

One process per node checks, before anything is loaded.  A shortage that would certainly end the run is a problem, one
that may end it is a note; each includes the command that fixes it.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.version import Version

from mm.config.run import Run
from mm.cost.layer_memory import WIDTHS
from mm.cost.stage_memory import activation_bytes_on_host, stage_sizes
from mm.device.device import PLATFORMS, installed_versions
from mm.device.platform import MachineFinding
from mm.environment import Launched, declared
from mm.errors import counted
from mm.process import open_file_limit

FILES_OF_A_RANK = 256
"""Open files for a process besides its connections to other ranks, generously."""
RANK_BYTES = 3 << 27
"""Host memory of a process with torch, megatron-core and transformers imported, on the CPU."""
_PIXEL_BYTES = 4
"""Bytes per pixel: pixels are fp32 between workers, owner and device."""
_SHARED_MEMORY = "/dev/shm"
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class Node:
    """The resources of a node, and the ranks that run on it."""

    first_rank: int
    num_ranks: int
    open_files: int
    """Hard limit per process; a process raises its soft limit to that itself."""
    shared_bytes: int | None
    """Free bytes in /dev/shm; None if it does not exist."""
    host_bytes: int
    """Memory that processes can still allocate, within the system and the container's limit."""
    versions: Mapping[str, str]
    """Versions of installed packages, and of the devices' libraries as ``Platform.versions`` names them."""

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> "Node":
        launched = Launched.here(environment)
        shared_bytes = psutil.disk_usage(_SHARED_MEMORY).free if os.path.isdir(_SHARED_MEMORY) else None
        return cls(launched.rank - launched.local_rank, launched.num_local_ranks or 1, open_file_limit(), shared_bytes,
                   min((psutil.virtual_memory().available, *_container_bytes())), installed_versions())


def node_problems(run: Run, node: Node, notes: list[str]) -> list[str]:
    """Shortages that would certainly end the run on this ``node``; those that may end it are added to ``notes``."""
    found = [*_open_files(run, node), *_shared_memory(run, node), *_host_memory(run, node), *_versions(node)]
    place = f"node of rank {node.first_rank}: " if run.world_size > node.num_ranks else ""
    notes += [f"{place}{text}" for is_certain, text in found if not is_certain]
    return [f"{place}{text}" for is_certain, text in found if is_certain]


def has_lazy_gloo(torch_version: str | None) -> bool:
    """Whether gloo can connect two ranks when they first communicate (pytorch/pytorch#151031)."""
    return torch_version is not None and Version(torch_version) >= Version("2.8")


def _open_files(run: Run, node: Node) -> Iterator[MachineFinding]:
    """gloo connects a rank to all others of a group, or if it is lazy to log N; the largest are all ranks and the
    owners of data."""
    is_lazy = has_lazy_gloo(node.versions.get("torch")) and os.environ.get("TORCH_GLOO_LAZY_INIT", "1") == "1"
    least = sum(size.bit_length() if is_lazy else size for size in (run.world_size, run.dp_size) if size > 1)
    wanted = least + FILES_OF_A_RANK
    if node.open_files < wanted and run.world_size > 1:
        yield node.open_files < least, (
            f"a process may open {node.open_files:,} files, but one of {run.world_size:,} ranks needs about "
            f"{wanted:,}: let root raise the hard limit to {wanted} (nofile in /etc/security/limits.conf), or use "
            f"`docker run --ulimit nofile={wanted}`")


def microbatch_pixel_bytes(run: Run) -> int:
    """Bytes of pixels in a microbatch with only visual tokens, the maximum."""
    vision = run.model.vision
    num_patches = run.args.seq_length * run.args.micro_batch_size * vision.spatial_merge_size**2
    if run.data.packing_max_patches is not None:
        num_patches = min(num_patches, run.data.packing_max_patches)
    return num_patches * vision.patch_elements * _PIXEL_BYTES


def _ranks(run: Run, node: Node) -> range:
    return range(node.first_rank, min(node.first_rank + node.num_ranks, run.world_size))


def _num_owners(run: Run, node: Node) -> int:
    """Ranks of the node that own the data of their replica."""
    step = run.tp_size * run.cp_size
    return sum(rank % step == 0 and rank < step * run.dp_size for rank in _ranks(run, node))


def _shared_memory(run: Run, node: Node) -> Iterator[MachineFinding]:
    owners, workers = _num_owners(run, node), run.args.num_workers
    if not owners or not workers or node.shared_bytes is None:
        return
    pixel_bytes = microbatch_pixel_bytes(run)
    wanted = owners * workers * run.data.prefetch_factor * pixel_bytes
    if node.shared_bytes < wanted:
        size = f"{-(-wanted // (1 << 30))}g"
        yield node.shared_bytes < pixel_bytes, (
            f"{_SHARED_MEMORY} has {_gib(node.shared_bytes)} GiB free, but workers pass pixels through it: "
            f"{counted(owners, 'data owner')} x --num-workers {workers} x prefetch_factor {run.data.prefetch_factor} "
            f"microbatches of only images take {_gib(wanted)} GiB. Without enough room a worker dies with a bus error: "
            f"use `docker run --shm-size {size}` (or --ipc=host), `mount -o remount,size={size} {_SHARED_MEMORY}`, or "
            f"fewer --num-workers (0 needs none)")


def _host_memory(run: Run, node: Node) -> Iterator[MachineFinding]:
    in_stage = run.tp_size * run.cp_size * run.dp_size
    stages = [rank // in_stage for rank in _ranks(run, node)]
    sizes, activations = stage_sizes(run, run.model.placement()), activation_bytes_on_host(run, run.model.placement())
    states = sum(sizes[stage].host_bytes for stage in stages)
    least = RANK_BYTES * node.num_ranks + states
    # the current step, the next one, which is prepared meanwhile, and microbatches in flight from workers
    workers, owners = run.args.num_workers, _num_owners(run, node)
    held = 2 * run.held_microbatches + workers * run.data.prefetch_factor
    of_owners = owners * (RANK_BYTES * workers + held * microbatch_pixel_bytes(run))
    wanted = least + of_owners + _copy_bytes(run, node) + sum(activations[stage] for stage in stages)
    if node.host_bytes < wanted:
        yield node.host_bytes < least, (
            f"{_gib(node.host_bytes)} GiB of host memory are free, but the {counted(node.num_ranks, 'rank')} of this "
            f"node may need up to {_gib(wanted)} GiB: {_gib(least - states)} for their processes, {_gib(states)} for "
            f"optimizer states, {_gib(of_owners)} for data, and the rest for offloaded activations and copies of what "
            f"is saved. Give the container more (`docker run --memory`), or lower --num-workers, prefetch_factor, "
            f"--global-batch-size, --optimizer-offload-fraction or --cpu-offloading-num-layers")


def _copy_bytes(run: Run, node: Node) -> int:
    """Host memory for what the node's ranks copy before they save it: weights if they keep shards of them, and with
    ``--async-save`` weights and optimizer states."""
    if run.args.save is None or not (run.args.async_save or run.shards_weights):
        return 0
    in_stage, total = run.tp_size * run.cp_size * run.dp_size, 0
    sizes = stage_sizes(run, run.model.placement())
    for rank in _ranks(run, node):
        size, is_writer = sizes[rank // in_stage], rank % in_stage < run.tp_size
        num_saved = size.num_trainable_params if run.model.lora.is_on else size.num_params  # see ``saved_weights``
        total += WIDTHS[run.args.precision] * num_saved * is_writer
        if run.args.async_save and (is_writer or run.args.splits_optimizer):
            total += size.optimizer_bytes + size.host_bytes
    return total


def _versions(node: Node) -> Iterator[MachineFinding]:
    for requirement in declared():
        version = node.versions.get(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            yield False, (f"{requirement.name} {version} is outside the tested range, {requirement.specifier}: "
                          f"`python -m pip install '{requirement.name}{requirement.specifier}'`")
    for platform in PLATFORMS:
        yield from platform.version_findings(node.versions)


def _container_bytes() -> Iterator[int]:
    """Bytes left under the container's memory limit; empty without a limit."""
    for path in _CGROUP_LIMITS:
        text = _text(path).strip()
        if text.isdigit():
            used = _text(path.with_name("memory.current" if path.name == "memory.max" else "memory.usage_in_bytes"))
            files = re.search(r"^(?:total_)?inactive_file (\d+)$", _text(path.with_name("memory.stat")), re.MULTILINE)
            yield max(0, int(text) - int(used.strip() or 0) + int(files[1] if files else 0))  # page cache


def _text(path: Path) -> str:
    """Content of a system file; empty if it does not exist or cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f}"
