"""``mm-plan``'s predictions of whole steps on one device, beside measured ones.

    python -m benchmarks.plan.device [--device cuda] [--size 3b] [--tokens 4134] [--num-microbatches 2]

Three predictions, none of which uses the measured step: by published figures, by the kernels that the meta device
counts, and by a calibration on the same device just before.  The first two need a device whose figures are known.
Each kernel takes the longer of its FLOPs and its bytes at the assumed fractions of the published figures, and its
launch.
"""

import multiprocessing
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.measure import command, report, step_arguments
from benchmarks.records import Records, add_record_flags
from mm.batch import BatchTotals, image_pairs, window_pairs
from mm.config.data import DataConfig
from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.cost.by_device import ATTENTION, LAYER_SECONDS, MEMORY, PRODUCTS, calibration_by_device
from mm.cost.predict import Predictor, StepPrediction
from mm.cost.workload import Workload, counts_of, sample_counts
from mm.data.sample import Lengths
from mm.device.device import Device, known_device
from mm.device.platform import KnownDevice
from mm.plan.layouts import WINDOW
from tests.meta.device import Tally
from tests.meta.step import Case, trace
from tests.workload import SAMPLE, SAMPLE_TOKENS, Sample, equal_samples, num_patches, num_targets, num_tokens

FROZEN = ("vision", "projector")
KERNEL_SECONDS = LAYER_SECONDS / 20
"""``LAYER_SECONDS`` is that of about twenty kernels."""


def seconds_of(operators: Mapping[str, Tally], device: KnownDevice) -> float:
    """The seconds of these operators' kernels.  Each operator counts as if all of its kernels were alike."""
    assert device.peak_flops is not None, "devices are chosen among those with a peak"
    found = 0.0
    for name, tally in operators.items():
        peak = device.peak_flops * (ATTENTION if "attention" in name else PRODUCTS)
        found += max(tally.flops / peak, tally.num_bytes / (MEMORY * device.memory_bandwidth))
        found += tally.kernels * KERNEL_SECONDS
    return found


def predicted_step(model: ModelConfig, microbatches: Sequence[Sequence[Sample]], device: KnownDevice) -> StepPrediction:
    """What ``mm-plan`` predicts of a step of one rank in bf16 with these microbatches, by published figures."""
    run = Run(step_arguments("--use-distributed-optimizer", "--bf16"), model, DataConfig("hf", ("data.json",)), 1)
    counts = np.stack([sample_counts(_lengths(samples)).sum(axis=0) for samples in microbatches])
    return Predictor(run, calibration_by_device(run, device, device.links)).predict(Workload(((counts,),)))


def _lengths(samples: Sequence[Sample]) -> Lengths:
    rows = [(num_tokens(one), num_targets(one), len(one[0]), num_patches(one), sum(map(image_pairs, one[0])),
             sum(window_pairs(grid, WINDOW) for grid in one[0])) for one in samples]  # fmt: skip
    return Lengths(*np.array(rows).T)


def predicted(case: Case, known: KnownDevice | None) -> dict[str, float | None]:
    """Seconds of a step by published figures and by kernels; None if the device has none."""
    if known is None or known.peak_flops is None:
        return {"by_figures": None, "by_kernels": None}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        operators = pool.submit(trace, case).result().operators
    by_figures = predicted_step(case.model(), [[SAMPLE] * case.num_samples] * case.num_microbatches, known)
    return {"by_figures": by_figures.seconds,
            "by_kernels": sum(seconds_of(phase, known) for phase in operators.values())}  # fmt: skip


def measured(case: Case, device: Device, is_quick: bool, num_warmup: int, num_steps: int) -> dict[str, Any]:
    """The calibrated prediction of a step, and its measured time.  ``is_quick``: calibrate in one round."""
    from benchmarks.sides import Ours, random_tensors
    from mm.parallel.megatron import DTYPES
    from mm.plan.measure import NUM_ROUNDS, measure
    from tests.microbatches import random_microbatch

    model, precision = case.model(), "fp32" if device.platform.name == "cpu" else "bf16"
    batch = [random_microbatch(model, equal_samples(case.num_samples * SAMPLE_TOKENS), seed)
             for seed in range(case.num_microbatches)]
    args = step_arguments("--use-distributed-optimizer", *([f"--{precision}"] if precision != "fp32" else []))
    began = time.perf_counter()
    calibration = measure(device, args, model, [1], batch[0].num_tokens, batch[0].num_patches,
                          1 if is_quick else NUM_ROUNDS)
    calibrated = time.perf_counter() - began
    counts = counts_of([BatchTotals.of([one], model.vision) for one in batch])
    prediction = Predictor(Run(args, model, DataConfig("hf", ("data.json",)), 1), calibration).predict(
        Workload(((counts,),)))
    ours = Ours(model, device, precision, random_tensors(model, device.torch_device, DTYPES[precision]))
    own, seconds = ours.batches(batch), list[float]()
    for _ in range(num_warmup + num_steps):
        device.runtime.synchronize()
        start = time.perf_counter()
        ours.step(own)
        device.runtime.synchronize()
        seconds.append(time.perf_counter() - start)
    ours.close()
    (low, high), timed = prediction.interval, seconds[num_warmup:]
    return {"calibrated": prediction.seconds, "low": low, "high": high, "calibration_seconds": calibrated,
            "measured": statistics.median(timed), "spread": [min(timed), max(timed)],
            "tokens": sum(one.num_tokens for one in batch)}  # fmt: skip


def main(argv: list[str]) -> None:
    parser = command(__doc__)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "npu"))
    parser.add_argument("--size", default="3b", choices=("tiny", "3b", "7b"))
    parser.add_argument("--tokens", type=int, default=6 * SAMPLE_TOKENS, help="of a microbatch, in samples of 689")
    parser.add_argument("--num-microbatches", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="calibrate in one round: shows that it runs")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    add_record_flags(parser, "predictions")
    flags = parser.parse_args(argv)
    device = Device.pick(flags.device)
    whole = Case(flags.size, max(1, round(flags.tokens / SAMPLE_TOKENS)), flags.num_microbatches)
    records, rows = Records(flags.records, flags.label, device.name, flags.size), []
    for name, case in (("all trained", whole), ("ViT frozen", replace(whole, freeze=FROZEN))):
        found = {"case": name, **predicted(case, known_device(device.name)),
                 **measured(case, device, flags.quick, flags.warmup, flags.steps)}  # fmt: skip
        records.write("prediction", **found)
        rows.append(found)
    report(rows, flags.output, prints=False)


if __name__ == "__main__":
    main(sys.argv[1:])
