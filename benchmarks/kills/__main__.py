"""Runs one part: ``python -m benchmarks.kills PART``.  The exit status is 1 if anything is not as it must be."""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kills import marks, phases, restarts, stops, writes
from benchmarks.kills.launch import Starter
from benchmarks.kills.runs import LAYOUTS, PHASES, Runs, write_all
from benchmarks.measure import command, report, versions

PARTS = ("phases", "stops", "restarts", "writes")


def flags_of_command() -> argparse.Namespace:
    parser = command(sys.modules["benchmarks.kills"].__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--times", type=int, default=10, help="signals for each phase and layout")
    parser.add_argument("--signal", choices=("SIGKILL", "SIGSTOP"), default="SIGKILL")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=10, help="seconds that a phase may take, with SIGSTOP")
    parser.add_argument("--num-workers", type=int, default=0, help="data workers of each rank that reads data")
    parser.add_argument("--fresh", action="store_true", help="start every process anew, as a user does")
    parser.add_argument("--keep", type=Path, help="directory for all files, which are then kept")
    return parser.parse_args()


def measured(flags: argparse.Namespace, folder: Path, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The result of the part, by layout."""
    number = signal.Signals[flags.signal]
    starter, limit = Starter(flags.fresh), flags.limit if number == signal.SIGSTOP else 60
    inputs = writes.write_large(folder) if flags.part == "writes" else write_all(folder)
    found: dict[str, Any] = {}
    for layout in flags.layouts:
        runs = Runs(inputs, layout, starter, limit, flags.num_workers)

        def note_layout(result: dict[str, Any], layout: str = layout) -> None:
            found[layout] = result
            note(found)

        match flags.part:
            case "phases":
                phases.measure(runs, flags.phases, flags.times, number, flags.seed, note_layout)
            case "stops":
                stops.measure(runs, flags.times, flags.seed, note_layout)
            case "restarts":
                restarts.measure(runs, flags.times, flags.seed, note_layout)
            case "writes":
                phases.measure(runs, (marks.BACKGROUND,), flags.times, number, flags.seed, note_layout)
                longer = Runs(inputs, layout, starter, limit, flags.num_workers, num_steps=100)
                found[f"{layout}, steps"] = writes.step_ratio(longer)
                note(found)
    if flags.part == "restarts":
        # micro-batches of 1, and a global batch that 4, 2 and 3 divide
        sized = Runs(inputs, "DP 2", starter, limit, flags.num_workers,
                     ("--micro-batch-size", "1", "--global-batch-size", "12"), num_steps=12)
        found["4, 2 and 3 ranks"] = restarts.resized(sized, flags.seed)
        note(found)
    return found


def main() -> int:
    flags = flags_of_command()
    about = {"part": flags.part, "signal": flags.signal, "date": time.strftime("%Y-%m-%d"), "versions": versions()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = flags.keep or Path(temporary)
        found = measured(flags, folder, lambda found: report({**about, **found}, flags.output, prints=False))
    report({**about, **found}, flags.output)
    return int(any(result["problems"] for result in found.values()))


if __name__ == "__main__":
    sys.exit(main())
