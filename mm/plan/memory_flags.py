"""The cheapest flags with which a run fits the memory of a device that is too small for it as it is.

The order of the changes is a preference, not measured: exact and nearly free ones first, then those that take time or
round.  Layouts stay as they are; ``mm-plan`` searches for others.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

from mm.config.activations import OffloadConfig, RecomputeConfig
from mm.config.args import Arguments
from mm.config.run import Run
from mm.cost.model_states import stage_sizes
from mm.cost.stage_memory import activation_bytes_on_host, peaks

NEARLY_EQUAL = 0.9
"""Devices whose smallest memory has at least this share of the others' get one answer, for the smallest."""


@dataclass(frozen=True)
class Change:
    """One or more flags that take less memory."""

    flags: str
    applied: Callable[[Run], Run | None]
    """The run with them; None if it has them, if they do not apply, or if its other settings exclude them."""


@dataclass(frozen=True)
class Fit:
    """The changes with which a run fits a device; none if no changes are enough."""

    max_bytes: int
    flags: tuple[str, ...]
    peak_bytes: float
    """With these changes; if none are enough, the smallest that any set of changes reaches."""
    host_bytes: int = 0
    """Host memory for the optimizer states and activations of a rank with these changes."""


def _with(run: Run, **fields: object) -> Run:
    return replace(run, args=replace(run.args, **fields))


def _sharded(strategy: str, before: tuple[str, ...]) -> Callable[[Run], Run | None]:
    def applied(run: Run) -> Run | None:
        if run.num_copies == 1 or run.args.sharding not in before:
            return None
        if strategy == "optim_grads_params" and run.num_stages > 1:
            return None
        return _with(run, data_parallel_sharding_strategy=strategy)

    return applied


def _recomputed(recompute: RecomputeConfig) -> Callable[[Run], Run | None]:
    def applied(run: Run) -> Run | None:
        towers = {name: tower for name in ("vision", "language")
                  if (tower := getattr(run.model, name)).recompute == RecomputeConfig()}
        if not towers:
            return None
        changed = {name: replace(tower, recompute=recompute) for name, tower in towers.items()}
        return replace(run, model=replace(run.model, **changed))

    return applied


def _offloaded(run: Run) -> Run | None:
    """Offload layers that are recomputed, so only their inputs: all else is computed again sooner than it crosses the
    link to the host."""
    towers = {name: getattr(run.model, name) for name in ("vision", "language")}
    if any(tower.recompute.granularity != "full" or tower.offload != OffloadConfig() for tower in towers.values()):
        return None
    changed = {name: replace(tower, offload=OffloadConfig(activations=True)) for name, tower in towers.items()}
    return replace(run, model=replace(run.model, **changed))


def _in_bf16(suits: Callable[[Arguments], bool], **fields: object) -> Callable[[Run], Run | None]:
    """A change for a run in bf16 whose flags satisfy ``suits``."""
    return lambda run: _with(run, **fields) if run.args.bf16 and suits(run.args) else None


CHANGES = (
    Change("--data-parallel-sharding-strategy optim", _sharded("optim", ("no_shard",))),
    Change("--store-param-remainders", _in_bf16(lambda args: args.kept_copy == "fp32", store_param_remainders=True)),
    Change("--recompute-granularity selective", _recomputed(RecomputeConfig("selective"))),
    Change("--data-parallel-sharding-strategy optim_grads", _sharded("optim_grads", ("no_shard", "optim"))),
    Change("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", _in_bf16(
        lambda args: "fp32" in (args.exp_avg_dtype, args.exp_avg_sq_dtype),
        exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")),
    Change("--data-parallel-sharding-strategy optim_grads_params",
           _sharded("optim_grads_params", ("no_shard", "optim", "optim_grads"))),
    Change("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
           _recomputed(RecomputeConfig("full", "uniform", 1))),
    Change("--cpu-offload-activations", _offloaded),
    Change("--optimizer-cpu-offload --optimizer-offload-fraction 1",
           lambda run: None if run.args.host_share == 1.0 else _with(
               run, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)),
    Change("--grad-reduce-in-bf16", _in_bf16(lambda args: not args.grad_reduce_in_bf16, grad_reduce_in_bf16=True)),
    Change("--main-params-dtype bf16", _in_bf16(lambda args: args.kept_copy == "fp32", main_params_dtype="bf16")),
)
"""The cheapest first.  A change is tried only if all cheaper ones together are not enough."""


def cheapest_fits(run: Run, memories: Iterable[int]) -> list[Fit]:
    """For each of ``memories`` (bytes) that is too small for ``run``, the cheapest changes with which it fits.

    Nearly equal memories get one answer, for the smallest of them; the largest comes first.
    """
    @cache
    def peak(changes: int) -> float:
        one = changed(run, changes)
        return math.inf if one is None else peak_of(one)

    small, distinct = sorted({one for one in memories if one < peak(0)}), list[int]()
    for one in small:
        if not distinct or one * NEARLY_EQUAL > distinct[-1]:
            distinct.append(one)
    found, every = list[Fit](), range(1 << len(CHANGES))
    for max_bytes in reversed(distinct):
        changes = next((one for one in every if peak(one) <= max_bytes), 0)
        flags = tuple(one.flags for bit, one in enumerate(CHANGES) if changes >> bit & 1)
        fitting = changed(run, changes)
        assert fitting is not None, "it has a peak"
        found.append(Fit(max_bytes, flags, peak(changes), _host_bytes(fitting)) if changes else
                     Fit(max_bytes, (), min(map(peak, every))))
    return found


def changed(run: Run, changes: int) -> Run | None:
    """``run`` with a set of changes (bit n: ``CHANGES[n]``); None if they conflict."""
    for bit, change in enumerate(CHANGES):
        if changes >> bit & 1:
            other = change.applied(run)
            if other is None:
                return None
            run = other
    return run


def peak_of(run: Run) -> int:
    """Memory of the fullest rank."""
    placement = run.model.placement()
    return max(peaks(run, placement, stage_sizes(run, placement)).values())


def _host_bytes(run: Run) -> int:
    placement = run.model.placement()
    states, activations = stage_sizes(run, placement), activation_bytes_on_host(run, placement)
    return max(size.host_bytes + num_bytes for size, num_bytes in zip(states, activations, strict=True))
