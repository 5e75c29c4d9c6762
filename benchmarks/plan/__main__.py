"""How right ``mm-plan`` predicts step times: calibrated on the spot, predicted, and measured.

    python -m benchmarks.plan [--rounds 3] [--output F]

A model of 8 ViT and 8 LLM layers is trained in memory on the CPU, on one process and on two, in several layouts.  Each
round calibrates, and then predicts and measures all cases of a number of processes, on the same three batches.  The
measured time is the mean of the batches, of each the median of the rounds; the error is the median prediction over it,
minus 1.  A step is in its interval if the prediction of its round says so.  The machine must be idle.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import command, report, run_ranks, versions
from mm.device.device import Device
from tests.files import table


def measure(rounds: int, is_quick: bool) -> dict[str, Any]:
    """Every case, by ranks in processes of their own."""
    rows: list[dict[str, Any]] = []
    for num_ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "rows.json"
            words = ["--rounds", str(rounds), *(["--quick"] if is_quick else []), "--is-rank", "--output", str(output)]
            run_ranks(num_ranks, "benchmarks.plan", words)
            rows += json.loads(output.read_text())
    errors = [abs(row["error"]) for row in rows]
    return {"versions": versions(), "rows": rows, "median_error": statistics.median(errors), "worst_error": max(errors),
            "share_in_interval": statistics.fmean(row["share_in_interval"] for row in rows)}  # fmt: skip


def shown(found: dict[str, Any]) -> str:
    """The figures as a table of Markdown."""
    rows = [(row["case"], row["num_ranks"], f"{row['predicted']:.2f}", f"{row['low']:.2f} .. {row['high']:.2f}",
             f"{row['measured']:.2f}", f"{row['error']:+.1%}") for row in found["rows"]]
    took = " and ".join(f"{one:.0f} s" for one in dict.fromkeys(row["calibration_seconds"] for row in found["rows"]))
    return "\n".join([*table(("case", "processes", "predicted, s", "interval", "measured, s", "error"), rows), "",
                      f"Error: median {found['median_error']:.1%}, worst {found['worst_error']:.1%}.  "
                      f"{found['share_in_interval']:.0%} of all steps lie in their interval.  "
                      f"A calibration, with and without LoRA, took {took}."])


def main(argv: list[str]) -> None:
    parser = command(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a far smaller model: shows that it runs, not how right")
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.is_rank:
        device = Device.pick("cpu")
        from benchmarks.plan.cases import rows_of_rank

        rows = rows_of_rank(device, flags.rounds, flags.quick)
        if rows is not None:
            report(rows, flags.output, prints=False)
        return
    found = measure(flags.rounds, flags.quick)
    print(shown(found))
    report(found, flags.output, prints=False)


if __name__ == "__main__":
    main(sys.argv[1:])
