"""The cheapest flags with which a run fits the memory of a device that is too small for it as it is.

Peaks come from ``mm.plan.sizes``.  The order of the changes is a preference, not measured: exact and nearly free ones
first, then those that take time or round, the roughest last.  Layouts stay as they are; ``mm-plan`` searches
for others.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from mm.config.activations import OffloadConfig, RecomputeConfig
from mm.config.flags import Arguments
from mm.config.run import Run
from mm.plan.sizes import activation_bytes_on_host, peaks, stage_sizes

NEARLY_EQUAL = 0.9
"""Devices with at least this share of the largest memory of their group get one answer, for the smallest of them."""


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
    peak_bytes: int
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
"""The cheapest first.  Each counts as dearer than all before it together, so it is added only if those are not enough.
"""


def cheapest_fits(run: Run, memories: Iterable[int]) -> list[Fit]:
    """For each of ``memories`` (bytes) that is too small for ``run``, the cheapest changes with which it fits.

    Nearly equal memories get one answer, for the smallest of them.
    """
    present = _peak(run)
    known: dict[int, int | None] = {0: present}
    return [_cheapest(run, max_bytes, known) for max_bytes in _distinct(one for one in memories if one < present)]


def _cheapest(run: Run, max_bytes: int, known: dict[int, int | None]) -> Fit:
    """``known``: peaks by set of changes (bit n: ``CHANGES[n]``), None if they conflict; new ones are added."""
    for changes in range(1, 1 << len(CHANGES)):
        if changes not in known:
            changed = _changed(run, changes)
            known[changes] = None if changed is None else _peak(changed)
        peak = known[changes]
        if peak is not None and peak <= max_bytes:
            changed = _changed(run, changes)
            assert changed is not None, "it has a peak"
            flags = tuple(one.flags for bit, one in enumerate(CHANGES) if changes >> bit & 1)
            return Fit(max_bytes, flags, peak, _host_bytes(changed))
    return Fit(max_bytes, (), min(peak for peak in known.values() if peak is not None))


def _changed(run: Run, changes: int) -> Run | None:
    for bit, change in enumerate(CHANGES):
        if changes >> bit & 1:
            changed = change.applied(run)
            if changed is None:
                return None
            run = changed
    return run


def _peak(run: Run) -> int:
    placement = run.model.placement()
    return max(peaks(run, placement, stage_sizes(run, placement)).values())


def _host_bytes(run: Run) -> int:
    placement = run.model.placement()
    states, activations = stage_sizes(run, placement), activation_bytes_on_host(run, placement)
    return max(size.host_bytes + num_bytes for size, num_bytes in zip(states, activations, strict=True))


def _distinct(memories: Iterable[int]) -> list[int]:
    """The smallest of each group of nearly equal memories, largest group first."""
    groups: list[list[int]] = []
    for one in sorted(set(memories), reverse=True):
        if groups and one >= NEARLY_EQUAL * groups[-1][0]:
            groups[-1].append(one)
        else:
            groups.append([one])
    return [min(group) for group in groups]
