"""Time and memory of whole steps on one device, ours and transformers' in turn, and what formulas say of them.

Started by ``python -m benchmarks.step speed``.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Memory, Phases, model_config, profiled, reset_peak_memory, versions
from benchmarks.records import LOSS, NORM, OURS, PEER, Results, together
from mm.batch import BatchTotals, Microbatch
from mm.config.model import ModelConfig
from mm.cost.layer_memory import FP32, WIDTHS
from mm.cost.memory import ChunkMemory, MicrobatchSizes
from mm.cost.stage_memory import StageMemory
from mm.device.device import Device
from mm.model.flops import blocks, training_flops
from mm.weights.table import Place, model_weights
from mm.weights.trained import GradientPath, is_frozen
from tests.workload import microbatches_of

NUM_WARMUP, NUM_TIMED = 3, 7
DEFAULT_TOKENS = {"7b": 4096}
"""Tokens of a microbatch by model size; 8192 for all others.  On 141 GB, 7B also needs ``--freeze vision projector
--recompute``."""
SPEED_TOLERANCES = {"fp32": {LOSS: 1e-4, NORM: 1e-3}, "bf16": {LOSS: 1e-2, NORM: 5e-2}}
GIB = 2**30
OPTIMIZER_BYTES_PER_PARAM = 30
"""Least memory traffic of one update, in one pass: fp32 weight and both moments read and written, gradient read, bf16
weight written.  ``mm.cost.by_device`` has what our kernels move."""
FROZEN_BYTES_PER_PARAM = WIDTHS["bf16"]
STATE_BYTES_PER_PARAM = FROZEN_BYTES_PER_PARAM + 4 * FP32
"""bf16 weight, and in fp32 gradient, weight and two moments."""


def time_side(flags: argparse.Namespace, device: Device) -> dict:
    """Build one side, warm up, and time its steps."""
    from benchmarks.sides import Ours, Peer, peer_attention, random_tensors
    from mm.parallel.megatron import DTYPES
    from tests.microbatches import random_microbatch

    model = model_config(flags.size, flags.freeze, flags.recompute, flags.offload)
    precision = flags.precision or ("fp32" if device.platform.name == "cpu" else "bf16")
    tokens = flags.tokens or DEFAULT_TOKENS.get(flags.size, 8192)
    batch = [random_microbatch(model, samples, seed)
             for seed, samples in enumerate(microbatches_of(tokens, flags.num_microbatches, flags.mix))]
    totals = BatchTotals.of(batch, model.vision)
    tensors = random_tensors(model, device.torch_device, DTYPES[precision])
    if flags.side == OURS:
        side, attention = Ours(model, device, precision, tensors), device.kernels.attention.__name__
        arguments: tuple = (side.batches(batch),)
    else:
        attention = peer_attention()
        side = Peer(model, device.torch_device, precision, tensors, attention, flags.recompute)
        arguments = (side.batches(batch), totals.num_target_tokens)
    del tensors
    reset_peak_memory(device)
    phases = Phases(device)
    if flags.phases:
        side.report_phases(phases.begin)
    results, found = [], []
    for _ in range(flags.warmup + flags.steps):
        device.runtime.synchronize()
        phases.begin("start")
        results.append(side.step(*arguments))
        found.append(phases.milliseconds())
    memory = Memory.peak(device)
    profile = {}
    if flags.profile and flags.round == 0:
        with profiled(profile_path(flags)) as profile:
            side.step(*arguments)
            device.runtime.synchronize()
    timed = found[flags.warmup :]
    phases_ms = {name: statistics.median(one[name] for one in timed) for name in timed[0]}
    seconds = [sum(one.values()) / 1000 for one in found]
    return {
        "attention": attention,
        "precision": precision,
        "first_loss": results[0][0],
        "first_grad_norm": results[0][1],
        "last_loss": results[-1][0],
        "steps_seconds": seconds[flags.warmup :],
        "warmup_seconds": seconds[: flags.warmup],
        "phases_ms": phases_ms if flags.phases else None,
        "max_memory_gib": memory.allocated_bytes / GIB,
        "max_reserved_gib": None if memory.reserved_bytes is None else memory.reserved_bytes / GIB,
        "tokens": totals.num_tokens,
        "target_tokens": totals.num_target_tokens,
        "patches": totals.num_patches,
        "device": device.name,
        **profile,
        **expectations(model, batch),
    }


def profile_path(flags: argparse.Namespace) -> Path:
    """Path of this side's profile: ``--profile`` for ours, a file beside it for transformers'."""
    return flags.profile if flags.side == OURS else flags.profile.with_stem(f"{flags.profile.stem}_{PEER}")


def expectations(model: ModelConfig, batch: list[Microbatch]) -> dict:
    """FLOPs, trained weights and memory of the step, computed by the formulas."""
    totals = BatchTotals.of(batch, model.vision)
    largest = BatchTotals.of([max(batch, key=lambda m: m.num_tokens)], model.vision)
    memory = ExpectedMemory.of(model, largest)
    return {
        "model_flops": training_flops(model, totals),
        "hardware_flops": hardware_flops(model, totals),
        "params_trained": Params.of(model).trained,
        "expected_memory_gib": {name: value / GIB for name, value in vars(memory).items()},
    }


@dataclass(frozen=True)
class Params:
    """Numbers of trained and of frozen weights of a model."""

    trained: int
    frozen: int

    @classmethod
    def of(cls, model: ModelConfig) -> "Params":
        sizes = [(math.prod(weight.shape), is_frozen(weight, model)) for weight in model_weights(model)]
        return cls(sum(n for n, frozen in sizes if not frozen), sum(n for n, frozen in sizes if frozen))


@dataclass(frozen=True)
class ExpectedMemory:
    """Bytes on one device at the peak of a bf16 step without parallelism, as ``--dry-run`` computes them."""

    states: int
    activations: int
    at_work: int
    """Logits, or the temporary tensors of one layer."""

    @classmethod
    def of(cls, model: ModelConfig, largest: BatchTotals) -> "ExpectedMemory":
        """``largest``: the counts of the largest microbatch."""
        params, placement = Params.of(model), model.placement()
        memory = StageMemory(tuple(ChunkMemory(model, placement, placement[0, chunk], tp_size=1, precision="bf16")
                                   for chunk in range(placement.num_chunks)))
        rows = MicrobatchSizes(largest.num_tokens, largest.num_patches, largest.num_target_tokens)
        states = STATE_BYTES_PER_PARAM * params.trained + FROZEN_BYTES_PER_PARAM * params.frozen
        kept = memory.kept_bytes(rows, num_microbatches=1)
        return cls(states, kept, memory.peak_bytes(rows, num_microbatches=1, state_bytes=0) - kept)


def hardware_flops(model: ModelConfig, totals: BatchTotals) -> float:
    """FLOPs of one step including full recomputation.  Frozen layers without a backward pass are not recomputed."""
    path, flops = GradientPath.of(model), training_flops(model, totals)
    trained = {(weight.place, weight.layer) for weight in model_weights(model) if not is_frozen(weight, model)}
    recomputes = {Place.VISION_LAYER: model.vision.recompute.granularity == "full",
                  Place.LANGUAGE_LAYER: model.language.recompute.granularity == "full"}  # fmt: skip
    for block in blocks(model, totals):
        needs = path.needs_input_gradient(block.place, block.layer) or (block.place, block.layer) in trained
        flops += block.forward * (recomputes.get(block.place, False) and needs)
    return flops


def speed(flags: argparse.Namespace, own_arguments: list[str]) -> tuple[dict, bool]:
    """Time both sides in turn.  A side that fails is reported with its error; then there is no ratio."""
    ceiling_tflops = Results.read(flags.ceilings).gemm_tflops if flags.ceilings else None
    sides = [OURS] if flags.no_peer else [OURS, PEER]
    rounds: list[dict[str, dict]] = [
        {side: run_side(side, number, own_arguments) for side in sides} for number in range(flags.rounds)
    ]
    found: dict[str, Any] = {}
    for side in sides:
        runs = [one[side] for one in rounds]
        broken = [run for run in runs if "error" in run]
        found[side] = broken[0] if broken else together(runs, ceiling_tflops)
    result = {
        "size": flags.size, "frozen": flags.freeze, "recompute": flags.recompute, "offload": flags.offload,
        "mix": flags.mix, "num_microbatches": flags.num_microbatches, "rounds": flags.rounds, "versions": versions(),
        **found,
    }  # fmt: skip
    passed = all("error" not in side for side in found.values())
    if passed and not flags.no_peer:
        ours, theirs, limits = found[OURS], found[PEER], SPEED_TOLERANCES[found[OURS]["precision"]]
        result["our_speed_over_transformers"] = ours["tokens_per_second"] / theirs["tokens_per_second"]
        result["our_speed_over_transformers_by_round"] = [
            statistics.median(one[PEER]["steps_seconds"]) / statistics.median(one[OURS]["steps_seconds"])
            for one in rounds
        ]
        result[LOSS] = abs(ours["first_loss"] - theirs["first_loss"]) / theirs["first_loss"]
        result[NORM] = abs(ours["first_grad_norm"] - theirs["first_grad_norm"]) / theirs["first_grad_norm"]
        passed = all(result[key] <= limit for key, limit in limits.items())
    return result, passed


def run_side(side: str, number: int, own_arguments: list[str]) -> dict:
    """Run one round of one side in a new process."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / f"{side}.json"
        command = [sys.executable, "-m", "benchmarks.step", "speed", *own_arguments, "--side", side,
                   "--round", str(number), "--output", str(output)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return json.loads(output.read_text())
    sys.stderr.write(done.stderr)
    lines = [line for line in done.stderr.splitlines() if "Error" in line]
    return {"error": lines[-1] if lines else f"status {done.returncode}"}
