"""How long ``mm-plan`` searches: 7B on 32 devices and 72B on 1,024, with an index of 100,000 samples.

    python -m benchmarks.plan.search [--rounds 3] [--size 7b ...]

The samples are a mix of LLaVA-like ones, documents and videos; the devices are H200s.  The longest of the rounds
counts.
"""

import sys
import time
from dataclasses import replace
from typing import Any

from benchmarks.measure import command, report, versions
from benchmarks.plan.shipped import DATA, MEMORY_SHARE, NUM_STEPS, run_of
from mm.device.platforms import KNOWN_DEVICES
from mm.plan.by_device import calibration_by_device
from mm.plan.choices import ENCODER_BATCH_SIZES, choices
from mm.plan.distributions import mixed
from mm.plan.search import LayoutSearch

CASES = {"7b": (32, 768), "72b": (1024, 8192)}
"""By the size of the model: number of devices, and samples per step."""
NUM_SAMPLES, NUM_KEPT = 100_000, 5


def searched(size: str, world_size: int, global_batch_size: int) -> dict[str, Any]:
    """Seconds of one search, and what it found."""
    device = next(one for one in KNOWN_DEVICES if one.label == "H200")
    assert device.memory_bytes is not None, "devices with a peak have a memory"
    run = replace(run_of(size, "llava"), world_size=world_size)
    run = replace(run, args=replace(run.args, global_batch_size=global_batch_size))
    lengths = mixed(DATA["mix"], NUM_SAMPLES, run.args.seed, run.args.seq_length)
    legal = list(choices(run, {}, device.links.node_size))
    began = time.perf_counter()
    search = LayoutSearch(run, lambda one: calibration_by_device(one, device, device.links), lengths,
                          int(MEMORY_SHARE * device.memory_bytes), NUM_STEPS)
    found = search.best(legal, NUM_KEPT, encoder_batch_sizes=ENCODER_BATCH_SIZES)
    seconds, best = time.perf_counter() - began, found.ranking[0]
    return {"size": size, "world_size": world_size, "num_layouts": len(legal), "seconds": seconds,
            "step_seconds": best.step.seconds, "bound": found.least}  # fmt: skip


def main(argv: list[str]) -> None:
    parser = command(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", nargs="+", choices=CASES, default=list(CASES))
    flags = parser.parse_args(argv)
    results = [max((searched(size, *CASES[size]) for _ in range(flags.rounds)), key=lambda one: one["seconds"])
               for size in flags.size]
    report({"versions": versions(), "searches": results}, flags.output)


if __name__ == "__main__":
    main(sys.argv[1:])
