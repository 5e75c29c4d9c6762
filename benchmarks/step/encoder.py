"""Times steps of two tensor-parallel ranks, in turn with a ViT cut over both, with a whole ViT on each, and with whole
ViTs that encode the images of all microbatches together.

``mm-plan``'s ratio stands beside the measured one: this machine is calibrated first.  Started by ``python -m
benchmarks.step encoder``; import it after ``Device.pick``.
"""

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import median_ratio, step_arguments
from benchmarks.sides import Ours, random_tensors
from benchmarks.step.cpu import model_of
from mm.batch import BatchTotals, Microbatch
from mm.config.data import DataConfig
from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.cost.predict import Predictor
from mm.cost.workload import Workload, counts_of
from mm.device.device import Device
from mm.plan.measure import NUM_ROUNDS
from mm.plan.measure import measure as calibrate
from tests.microbatches import random_microbatch
from tests.workload import Sample

NUM_WARMUP, NUM_STEPS, NUM_MICROBATCHES = 1, 3, 2
NUM_TEXT_TOKENS = 40
PICTURES: dict[str, list[Sample]] = {
    "even": [(((1, 24, 16), (1, 16, 24)), NUM_TEXT_TOKENS)] * 3,
    "mixed": [(((1, 12, 16), (1, 24, 24)), NUM_TEXT_TOKENS), (((1, 16, 20),), NUM_TEXT_TOKENS),
              (((1, 20, 28), (1, 8, 12), (1, 16, 16)), NUM_TEXT_TOKENS)],
    "one": [(((1, 40, 56),), 3 * NUM_TEXT_TOKENS)],
}  # fmt: skip
"""Samples of a microbatch with little text, whose pictures two ranks can divide evenly, about evenly, or not at all."""
QUICK_PICTURES: dict[str, list[Sample]] = {
    "even": [(((1, 8, 4), (1, 4, 8)), 8)],
    "mixed": [(((1, 4, 8), (1, 8, 8)), 8), (((1, 8, 6),), 8)],
    "one": [(((1, 12, 16),), 16)],
}
CUT, WHOLE, TOGETHER = "cut", "whole", "together"
ENCODERS: dict[str, dict[str, Any]] = {
    CUT: {}, WHOLE: {"encoder_placement": "tensor_ranks"},
    TOGETHER: {"encoder_placement": "tensor_ranks", "encoder_batch_microbatches": NUM_MICROBATCHES},
}
"""Settings of the model JSON."""


def measure(device: Device, rounds: int, is_quick: bool, sequence_parallel: bool) -> list[dict[str, Any]] | None:
    """For each of ``PICTURES`` or ``QUICK_PICTURES``, the time of a step with each of ``ENCODERS``, and the processor
    time of the busier rank.  Ratios are cut / whole and cut / together.  Only the first rank returns a result."""
    torch.set_num_threads(1)
    model = model_of(1, is_quick)
    model = replace(model, vision=replace(model.vision, freeze=False))
    pictures = QUICK_PICTURES if is_quick else PICTURES
    batches = {name: batch_of(samples, model) for name, samples in pictures.items()}
    predicted = predicted_ratios(device, model, batches, sequence_parallel, 1 if is_quick else NUM_ROUNDS)
    tensors = random_tensors(model, device.torch_device, torch.float32)
    seconds = {name: {encoder: list[tuple[float, float]]() for encoder in ENCODERS} for name in batches}
    firsts: list[tuple[float, float]] = []
    for _ in range(rounds):
        for encoder, fields in ENCODERS.items():
            ours = Ours(replace(model, **fields), device, "fp32", tensors, 2, sequence_parallel)
            for name, batch in batches.items():
                times, first = times_of(ours, batch, 1 if is_quick else NUM_STEPS)
                seconds[name][encoder] += times
                firsts += [first] if name == next(iter(batches)) else []  # later ones start from other roundings
            ours.close()
    for values in zip(*firsts, strict=True):
        assert max(values) - min(values) < 1e-5 * max(values), f"not the same training: {firsts}"
    if dist.get_rank():
        return None
    return [
        {"pictures": name, "sequence_parallel": sequence_parallel, "predicted_ratio": predicted[name],
         **{f"{kind}_ratio": {encoder: median_ratio(*([one[number] for one in of[side]] for side in (CUT, encoder)))
                              for encoder in (WHOLE, TOGETHER)}
            for number, kind in enumerate(("time", "processor"))},
         **{f"{kind}_seconds": {encoder: statistics.median(one[number] for one in times)
                                for encoder, times in of.items()}
            for number, kind in enumerate(("time", "processor"))},
         **_sizes(batches[name], model)}
        for name, of in seconds.items()
    ]  # fmt: skip


def predicted_ratios(
    device: Device, model: ModelConfig, batches: dict[str, list[Microbatch]], sequence_parallel: bool, num_rounds: int
) -> dict[str, dict[str, float]]:
    """The predicted time of a step, cut / whole and cut / together, for each of ``batches``."""
    args = step_arguments("--use-distributed-optimizer", "--tensor-model-parallel-size", "2",
                          *(["--sequence-parallel"] if sequence_parallel else []))
    totals = {name: [BatchTotals.of([one], model.vision) for one in batch] for name, batch in batches.items()}
    num_tokens, num_patches = (max(getattr(one, name) for batch in totals.values() for one in batch)
                               for name in ("num_tokens", "num_patches"))
    calibration = calibrate(device, args, model, [1, 2], num_tokens, num_patches, num_rounds)
    found: dict[str, dict[str, float]] = {}
    for name, batch in totals.items():
        seconds = {
            encoder: Predictor(Run(args, replace(model, **fields), DataConfig("hf", ("data.json",)), 2),
                               calibration).predict(Workload(((counts_of(batch),),))).seconds
            for encoder, fields in ENCODERS.items()}
        found[name] = {encoder: seconds[CUT] / seconds[encoder] for encoder in (WHOLE, TOGETHER)}
    return found


def batch_of(samples: list[Sample], model: ModelConfig) -> list[Microbatch]:
    return [random_microbatch(model, samples, seed) for seed in range(NUM_MICROBATCHES)]


def times_of(
    ours: Ours, batch: list[Microbatch], num_steps: int
) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """On every rank: seconds and processor seconds of ``num_steps`` timed steps, and loss and gradient norm of the
    first warm-up step."""
    own, times, first = ours.batches(batch), list[tuple[float, float]](), (0.0, 0.0)
    for number in range(NUM_WARMUP + num_steps):
        dist.barrier()
        start, work_start = time.perf_counter(), time.process_time()
        result = ours.step(own)
        work = torch.tensor(time.process_time() - work_start)
        dist.barrier()
        taken = time.perf_counter() - start
        dist.all_reduce(work, op=dist.ReduceOp.MAX)
        first = result if number == 0 else first
        times += [(taken, float(work))] if number >= NUM_WARMUP else []
    return times, first


def _sizes(batch: list[Microbatch], model: ModelConfig) -> dict[str, int]:
    totals = BatchTotals.of(batch, model.vision)
    return {"tokens": totals.num_tokens, "patches": totals.num_patches, "images": totals.num_images}
