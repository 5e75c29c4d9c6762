"""What moments in 16 bits change about a training, beside what another seed changes.

    python -m benchmarks.moments [--iters 400] [--last 100]

Trains the demo's model on the demo's digits three times through the user's script, on one rank each, two at a time:
with moments in fp32, with both in bf16, and with moments in fp32 and another seed, which shuffles the samples.
Compares the losses of the last steps.
"""

import json
import shutil
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measure import command, report, versions
from demo.run import FULL, TENSOR, Layout, Run, prepare, variables
from demo.stages import run_script
from tests.workload import ROUNDED_MOMENTS

ALONE = Layout(tensor=1, pipeline=1, vision=(8,), language=(4,))
CASES: dict[str, tuple[str, ...]] = {"fp32": (), "bf16": ROUNDED_MOMENTS, "fp32, another seed": ("--seed", "1")}


def compared(folder: Path, num_iters: int, num_last: int) -> dict[str, Any]:
    """The mean loss of the last steps of each training, its standard error, and how far it is from the first one's."""
    files = Run(folder)
    prepare(files, FULL)
    shutil.copy(files.model_json(TENSOR), files.model_json(ALONE))  # its lists are of one stage too
    with ThreadPoolExecutor(2) as pool:
        losses = dict(zip(CASES, pool.map(lambda name: _losses(files, name, num_iters), CASES), strict=True))
    last = {name: some[-num_last:] for name, some in losses.items()}
    means = {name: statistics.fmean(some) for name, some in last.items()}
    return {
        "versions": versions(), "num_iters": num_iters, "num_last": num_last, "mean_loss": means,
        "mean_loss_over_fp32": {name: one / means["fp32"] - 1 for name, one in means.items()},
        "standard_error": {name: statistics.stdev(some) / len(some) ** 0.5 for name, some in last.items()},
    }  # fmt: skip


def _losses(files: Run, name: str, num_iters: int) -> list[float]:
    label = name.replace(", ", "_").replace(" ", "_")
    values = variables(files, FULL, ALONE, files / "checkpoint") | {
        "NPUS_PER_NODE": "1", "TRAIN_ITERS": str(num_iters), "SAVE_PATH": str(files / f"{label}/save"),
        "LOG_DIR": str(files / f"{label}/logs"), "SAVE_INTERVAL": str(num_iters), "OMP_NUM_THREADS": "1"}  # fmt: skip
    run_script(values, ("--no-save-optim", *CASES[name]), files / f"{label}.log", 1, num_iters)
    rows = map(json.loads, (files / f"{label}/logs/metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "step"]


def main(argv: list[str]) -> None:
    parser = command(__doc__)
    parser.add_argument("--iters", type=int, default=400, help="steps of each training")
    parser.add_argument("--last", type=int, default=100, help="steps at the end whose losses are compared")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        report(compared(Path(folder), flags.iters, flags.last), flags.output)


if __name__ == "__main__":
    main(sys.argv[1:])
