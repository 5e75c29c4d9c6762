"""The goals on accelerators, each with its measurement."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.kernels.attention import LOOP, MASK
from benchmarks.records import OURS, PEER, Results
from benchmarks.step.floors import OPTIMIZER_BYTES_PER_PARAM

GIB, GB = 2**30, 1e9
MAX_WINDOW_ERROR = 1e-6
GOAL_WORKERS = 8


@dataclass(frozen=True)
class Goal:
    """One line of the table."""

    name: str
    what: str
    bound: float
    is_least: bool
    """Whether ``bound`` is the least value that reaches the goal; otherwise it is the largest."""
    value: float | None
    """None: not measured."""
    unit: str = "x"

    @property
    def is_reached(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bound if self.is_least else self.value <= self.bound


def goals(results: Results) -> Iterator[Goal]:
    """Every goal, measured or not."""
    yield from _speed(results)
    yield from _utilization(results)
    yield from _memory(results)
    waits = [one for one in results.of("loader", num_workers=GOAL_WORKERS) if "wait_share" in one]
    waited = 100 * waits[-1]["wait_share"] if waits else None
    yield Goal("G13", f"share of a step spent waiting for the loader, {GOAL_WORKERS} workers", 1, False, waited, "%")
    yield from _windows(results)
    yield from _frozen(results)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _speed(results: Results) -> Iterator[Goal]:
    for label, what in (("mixed", "mixed samples, where transformers pads"), ("equal", "equal samples")):
        sides = (results.step(label, OURS), results.step(label, PEER))
        rates = [side["tokens_per_second"] if side else None for side in sides]
        yield Goal("G9", f"tokens/s relative to transformers, {what}", 1.5, True, _ratio(*rates))
    for tower, bound in (("LLM", 1.15), ("ViT", 3.0)):
        times = [(results.of("tower", tower=tower, name=name) or [{}])[-1].get("ms") for name in (PEER, OURS)]
        what = f"speed relative to transformers, the {tower} alone, forward and backward"
        yield Goal("G9", what, bound, True, _ratio(*times))


def _utilization(results: Results) -> Iterator[Goal]:
    small, large = results.step("step", OURS), results.step("large", OURS)

    def share(step: dict | None, with_recompute: bool = False) -> float | None:
        if step is None or step["share_of_measured_ceiling"] is None:
            return None
        flops = step["hardware_flops"] if with_recompute else step["model_flops"]
        return 100 * step["share_of_measured_ceiling"] * flops / step["model_flops"]

    what = "share of the measured matrix-product rate"
    yield Goal("G10", f"3B: model FLOP/s, {what}", 55, True, share(small), "%")
    yield Goal("G10", f"7B, ViT frozen, recomputed: model FLOP/s, {what}", 45, True, share(large), "%")
    yield Goal("G10", f"7B, the same with FLOPs of recomputation, {what}", 58, True, share(large, True), "%")
    value = None
    if small and small["phases_ms"] and results.copy_gbps:
        floor_ms = OPTIMIZER_BYTES_PER_PARAM * small["params_trained"] / results.copy_gbps / 1e6
        value = small["phases_ms"]["optimizer"] / floor_ms
    what = "optimizer, time relative to moving 30 bytes per weight at the measured copy rate"
    yield Goal("G11", what, 1.5, False, value)


def _memory(results: Results) -> Iterator[Goal]:
    for label, what in (("step", "3B"), ("recompute", "3B, recomputed"), ("large", "7B, ViT frozen, recomputed")):
        step = results.step(label, OURS)
        value = 100 * abs(step["max_memory_gib"] / sum(step["expected_memory_gib"].values()) - 1) if step else None
        yield Goal("G12", f"peak memory, deviation from the formula, {what}", 10, False, value, "%")


def _windows(results: Results) -> Iterator[Goal]:
    case, part = "ViT windows, one size", "forward and backward"
    times = {name: (results.kernel("attention", case, name, part=part) or {}).get("ms") for name in (OURS, MASK, LOOP)}
    yield Goal("G14", "window attention, speed relative to one masked call", 10, True, _ratio(times[MASK], times[OURS]))
    what = "window attention, speed relative to one call per window"
    yield Goal("G14", what, 3, True, _ratio(times[LOOP], times[OURS]))
    errors = results.of("window error")
    error = errors[-1]["difference"] if errors else None
    yield Goal("G14", "relative error of window attention in fp32", MAX_WINDOW_ERROR, False, error, "")


def _frozen(results: Results) -> Iterator[Goal]:
    trained, frozen = results.step("step", OURS), results.step("frozen", OURS)
    time_over_flops = memory = None
    if trained and frozen:
        time_ratio = frozen["step_seconds"]["median"] / trained["step_seconds"]["median"]
        time_over_flops = 100 * (time_ratio - frozen["model_flops"] / trained["model_flops"])
        memory = (trained["max_memory_gib"] - frozen["max_memory_gib"]) * GIB / GB
    what = "ViT frozen: share of the full step's time, minus its share of FLOPs"
    yield Goal("G15", what, 5, False, time_over_flops, "points")
    yield Goal("G15", "ViT frozen: memory saved", 10, True, memory, "GB")
