"""What states in 16 bits change about a training, beside what another seed changes.

    python -m benchmarks.states [--iters 400] [--last 100] [--without NAME ...]

Trains the demo's model on the demo's digits in bf16, through the user's script, on one rank each, two at a time: with
fp32 copies and moments, with moments in bf16, with bf16 weights without fp32 copies, with both, and with fp32 states
and another seed, which shuffles the samples.  Compares the losses of the last steps.  Remainders in place of copies
are exact, so they are not trained here.
"""

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measure import command, report, versions
from demo.run import FULL, TENSOR, Layout, Run, prepare, variables
from demo.stages import run_script
from tests.workload import NO_COPIES, ROUNDED_MOMENTS

ALONE = Layout(tensor=1, pipeline=1, vision=(8,), language=(4,))
CASES: dict[str, tuple[str, ...]] = {
    "fp32": (), "bf16 moments": ROUNDED_MOMENTS, "no copies": NO_COPIES, "both": (*ROUNDED_MOMENTS, *NO_COPIES),
    "fp32, another seed": ("--seed", "1"),
}  # fmt: skip


def compared(
    folder: Path, names: Sequence[str], num_iters: int, num_last: int, max_samples: int | None
) -> dict[str, Any]:
    """The mean loss of the last steps of each training, its standard error, and how far it is from the first one's.

    ``max_samples``: the trainings see so many; None: all.
    """
    files = Run(folder, "cpu")
    prepare(files, FULL)
    if max_samples is not None:
        data = json.loads(files.data_json.read_text())
        data["dataset_param"]["basic_parameters"]["max_samples"] = max_samples
        files.data_json.write_text(json.dumps(data))
    shutil.copy(files.model_json(TENSOR), files.model_json(ALONE))  # its lists are of one stage too
    with ThreadPoolExecutor(2) as pool:
        losses = dict(zip(names, pool.map(lambda name: _losses(files, name, num_iters), names), strict=True))
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
    run_script(values, ("--bf16", "--no-save-optim", *CASES[name]), files / f"{label}.log", 1, num_iters)
    rows = map(json.loads, (files / f"{label}/logs/metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "step"]


def main(argv: list[str]) -> None:
    parser = command(__doc__)
    parser.add_argument("--iters", type=int, default=400, help="steps of each training")
    parser.add_argument("--last", type=int, default=100, help="steps at the end whose losses are compared")
    parser.add_argument("--without", nargs="*", default=[], choices=[*CASES][1:], metavar="NAME",
                        help="trainings to leave out")
    parser.add_argument("--max-samples", type=int, help="train on the first so many samples (default: all)")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name in CASES if name not in flags.without]
        report(compared(Path(folder), names, flags.iters, flags.last, flags.max_samples), flags.output)


if __name__ == "__main__":
    main(sys.argv[1:])
