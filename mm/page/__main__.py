"""``mm-page``, which is ``python -m mm.page``: the page of a run, or of several side by side.

    mm-page logs
    mm-page logs_a logs_b --html both.html
"""

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from mm.config.misspelt import parse
from mm.config.outputs import PAGE_FILE
from mm.console import add_common_flags
from mm.environment import version_line
from mm.errors import UserError, collected, refuse
from mm.process import refused, run_command
from mm.report import check_page, write_page

PROGRAM = "mm-page"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status: 0, or 2 for errors that the user can fix."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _run(words), lambda: "the page is as it was; run the same command again")


def _run(words: Sequence[str]) -> int:
    from mm.page.pages import run_page, runs_page
    from mm.page.plot import COLOURS
    from mm.page.record import read_run, run_names

    try:
        flags = parse(_parser(), words)
        folders: list[Path] = flags.runs
        if len(folders) > len(COLOURS):
            raise UserError(f"{len(folders)} runs are given; expected at most {len(COLOURS)}; make several pages")
        if len(folders) > 1 and flags.html is None:
            raise UserError("--html is missing; name the file for the page of several runs, such as --html runs.html")
        check_page(flags.html)
        problems: list[str] = []
        runs = []
        for folder, name in zip(folders, run_names(folders), strict=True):
            with collected(problems):
                runs.append(read_run(folder, name))
        refuse(problems)
        now = datetime.now()
        html = run_page(runs[0], now) if len(runs) == 1 else runs_page(runs, now)
        print(write_page(flags.html or folders[0] / PAGE_FILE, html))
    except UserError as error:
        return refused(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, allow_abbrev=False, description=(
        "Writes one HTML file about a run: facts, curves, tables, timeline, answers and settings; or about several "
        "runs, side by side.  A run may have ended or not."))
    add_common_flags(parser, version_line(PROGRAM), PROGRAM)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="the --log-dir of a run")
    parser.add_argument("--html", type=Path, metavar="PAGE", help=(
        f"the file to write (default: {PAGE_FILE} in RUN_DIR); needed with several runs"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
