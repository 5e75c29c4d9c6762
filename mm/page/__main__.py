"""``mm-page``, which is ``python -m mm.page``: the page of a run, as in ``mm-page logs``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mm.config.misspelt import parse
from mm.config.outputs import PAGE_FILE
from mm.console import add_common_flags
from mm.environment import version_line
from mm.errors import UserError
from mm.process import refused, run_command
from mm.report import check_page

PROGRAM = "mm-page"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status: 0, or 2 for errors that the user can fix."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _run(words), lambda: "the page is as it was; run the same command again")


def _run(words: Sequence[str]) -> int:
    from mm.page.pages import write_run_page

    try:
        flags = parse(_parser(), words)
        check_page(flags.html)
        print(write_run_page(flags.run, flags.html))
    except UserError as error:
        return refused(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, allow_abbrev=False, description=(
        "Writes one HTML file about a run, which may have ended or not: facts, curves, tables, timeline, answers and "
        "settings."))
    add_common_flags(parser, version_line(PROGRAM), PROGRAM)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="the --log-dir of a run")
    parser.add_argument("--html", type=Path, metavar="PAGE",
                        help=f"the file to write (default: {PAGE_FILE} in RUN_DIR)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
