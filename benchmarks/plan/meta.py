"""A second prediction for accelerators: the kernels of a step, counted on the meta device, beside ``mm-plan``'s laws.

    python -m benchmarks.plan.meta [--device h100 h200 910b3]

Each kernel takes the longer of its FLOPs and its bytes at the assumed fractions of the device's published figures
(``mm.plan.by_device``), and its launch.  The laws know only rows and pairs of whole layers.  Both see one process
without collectives; the kernels are those of CUDA.  The steps that ``benchmarks.device_hour`` measures judge both.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.measure import command, report, step_arguments
from mm.batch import image_pairs, window_pairs
from mm.config.data import DataConfig
from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.data.lengths import Lengths
from mm.device.platform import KnownDevice
from mm.device.platforms import KNOWN_DEVICES
from mm.plan.by_device import ATTENTION, LAYER_SECONDS, MEMORY, PRODUCTS, calibration_by_device
from mm.plan.distributions import WINDOW
from mm.plan.predict import Predictor, StepPrediction
from mm.plan.workload import Workload, sample_counts
from tests.files import table
from tests.meta.device import PHASES, Tally
from tests.meta.step import Case, trace
from tests.workload import SAMPLE, Sample, num_patches, num_targets, num_tokens

KERNEL_SECONDS = LAYER_SECONDS / 20
"""``LAYER_SECONDS`` is that of about twenty kernels."""
CASES = {
    "3B": Case("3b"), "3B, ViT frozen": Case("3b", freeze=("vision", "projector")),
    "3B, recomputed": Case("3b", recompute="full"), "3B, four samples": Case("3b", 4),
    "7B": Case("7b"), "7B, ViT frozen": Case("7b", freeze=("vision", "projector")),
    "7B, ViT frozen, recomputed": Case("7b", freeze=("vision", "projector"), recompute="full"),
}  # fmt: skip


def seconds_of(operators: Mapping[str, Tally], device: KnownDevice) -> float:
    """The seconds of these operators' kernels.  Each operator counts as if all of its kernels were alike."""
    assert device.peak_flops is not None, "devices are chosen among those with a peak"
    found = 0.0
    for name, tally in operators.items():
        peak = device.peak_flops * (ATTENTION if "attention" in name else PRODUCTS)
        found += max(tally.flops / peak, tally.num_bytes / (MEMORY * device.memory_bandwidth))
        found += tally.kernels * KERNEL_SECONDS
    return found


def by_laws(case: Case, device: KnownDevice) -> StepPrediction:
    """What ``mm-plan`` predicts of the same step."""
    return predicted_step(case.model(), [[SAMPLE] * case.num_samples] * case.num_microbatches, device)


def predicted_step(model: ModelConfig, microbatches: Sequence[Sequence[Sample]], device: KnownDevice) -> StepPrediction:
    """What ``mm-plan`` predicts of a step of one rank in bf16 with these microbatches, by published figures."""
    run = Run(step_arguments("--use-distributed-optimizer", "--bf16"), model, DataConfig("hf", ("data.json",)), 1)
    counts = np.stack([sample_counts(_lengths(samples)).sum(axis=0) for samples in microbatches])
    return Predictor(run, calibration_by_device(run, device, device.links)).predict(Workload(((counts,),)))


def _lengths(samples: Sequence[Sample]) -> Lengths:
    rows = [(num_tokens(one), num_targets(one), len(one[0]), num_patches(one), sum(map(image_pairs, one[0])),
             sum(window_pairs(grid, WINDOW) for grid in one[0])) for one in samples]  # fmt: skip
    return Lengths(*np.array(rows).T)


def rows_of(labels: list[str], names: list[str]) -> Iterator[dict[str, Any]]:
    devices = [next(one for one in KNOWN_DEVICES if label in one.label.casefold() and one.peak_flops is not None)
               for label in labels]
    for name in names:
        case = CASES[name]
        traced = trace(case)
        for device in devices:
            passes = sum(seconds_of(traced.operators[phase], device) for phase in ("prepare", "forward", "backward"))
            rest = sum(seconds_of(traced.operators[phase], device) for phase in PHASES
                       if phase not in ("prepare", "forward", "backward"))
            laws = by_laws(case, device)
            yield {"case": name, "device": device.label, "passes_by_kernels": passes, "passes_by_laws": laws.pipeline,
                   "rest_by_kernels": rest, "update_by_laws": laws.update, "ratio": laws.pipeline / passes}  # fmt: skip


def main(argv: list[str]) -> None:
    parser = command(__doc__)
    parser.add_argument("--device", nargs="+", default=["h100", "h200", "910b3"])
    parser.add_argument("--step", nargs="+", choices=CASES, default=list(CASES))
    flags = parser.parse_args(argv)
    rows = list(rows_of(flags.device, flags.step))
    cells = [(row["case"], row["device"], f"{row['passes_by_kernels']:.4f}", f"{row['passes_by_laws']:.4f}",
              f"{row['ratio']:.3f}", f"{row['rest_by_kernels']:.4f}", f"{row['update_by_laws']:.4f}") for row in rows]
    print("\n".join(table(("step", "device", "passes by kernels, s", "by laws, s", "laws / kernels",
                           "rest by kernels, s", "update by laws, s"), cells)))
    report(rows, flags.output, prints=False)


if __name__ == "__main__":
    main(sys.argv[1:])
