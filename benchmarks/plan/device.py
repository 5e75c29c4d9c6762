"""``mm-plan``'s predictions of whole steps on one device, beside measured ones.

    python -m benchmarks.plan.device [--device cuda] [--size 3b] [--tokens 4134] [--num-microbatches 2]

Three predictions, none of which uses the measured step: by published figures, by the kernels that the meta device
counts (``benchmarks.plan.meta``), and by a calibration on the same device just before.  The first two need a device
whose figures are known.
"""

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from benchmarks.measure import command, report, step_arguments
from benchmarks.plan.meta import by_laws, seconds_of
from benchmarks.records import Records, add_record_flags
from mm.batch import BatchTotals
from mm.config.data import DataConfig
from mm.config.run import Run
from mm.device.device import Device
from mm.device.platforms import known_device
from tests.meta.device import Tally
from tests.meta.step import Case, trace
from tests.workload import SAMPLE_TOKENS, equal_samples

FROZEN = ("vision", "projector")


def predicted(
    case: Case, device: Device, operators_of: Callable[[Case], Mapping[str, Mapping[str, Tally]]]
) -> dict[str, float | None]:
    """Seconds of a step by published figures and by kernels; None if the device is not known.

    ``operators_of`` counts the kernels of a case, which takes a while, so it is called for a known device only.
    """
    known = known_device(device.name)
    if known is None or known.peak_flops is None:
        return {"by_figures": None, "by_kernels": None}
    return {"by_figures": by_laws(case, known).seconds,
            "by_kernels": sum(seconds_of(phase, known) for phase in operators_of(case).values())}  # fmt: skip


def measured(case: Case, device: Device, is_quick: bool, num_warmup: int, num_steps: int) -> dict[str, Any]:
    """The calibrated prediction of a step, and its measured time.  ``is_quick``: calibrate in one round."""
    from benchmarks.sides import Ours, random_tensors
    from mm.parallel.megatron import DTYPES
    from mm.plan.predict import Predictor
    from mm.plan.workload import Workload, counts_of
    from mm.planner.measure import NUM_ROUNDS, ProbeSizes, measure
    from tests.microbatches import random_microbatch

    model, precision = case.model(), "fp32" if device.platform.name == "cpu" else "bf16"
    batch = [random_microbatch(model, equal_samples(case.num_samples * SAMPLE_TOKENS), seed)
             for seed in range(case.num_microbatches)]
    args = step_arguments("--use-distributed-optimizer", *([f"--{precision}"] if precision != "fp32" else []))
    began = time.perf_counter()
    calibration = measure(device, args, model, [1], ProbeSizes(batch[0].num_tokens, batch[0].num_patches),
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
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        def operators_of(case: Case) -> Mapping[str, Mapping[str, Tally]]:
            return pool.submit(trace, case).result().operators

        for name, case in (("all trained", whole), ("ViT frozen", replace(whole, freeze=FROZEN))):
            found = {"case": name, **predicted(case, device, operators_of),
                     **measured(case, device, flags.quick, flags.warmup, flags.steps)}  # fmt: skip
            records.write("prediction", **found)
            rows.append(found)
    report(rows, flags.output, prints=False)


if __name__ == "__main__":
    main(sys.argv[1:])
