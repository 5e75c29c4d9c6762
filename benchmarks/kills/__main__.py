"""Runs one part: ``python -m benchmarks.kills PART``.  The exit status is 1 if anything is not as it must be."""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kills import phases
from benchmarks.kills.launch import Starter
from benchmarks.kills.runs import LAYOUTS, PHASES, Runs, write_all
from benchmarks.measure import command, report, versions

PARTS = ("phases",)


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
    inputs, starter, number = write_all(folder), Starter(flags.fresh), signal.Signals[flags.signal]
    limit = flags.limit if number == signal.SIGSTOP else 60
    found: dict[str, Any] = {}
    for layout in flags.layouts:
        runs = Runs(inputs, layout, starter, limit, flags.num_workers)

        def note_layout(result: dict[str, Any], layout: str = layout) -> None:
            found[layout] = result
            note(found)

        note_layout(phases.measure(runs, flags.phases, flags.times, number, flags.seed, note_layout))
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
