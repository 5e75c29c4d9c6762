"""``mm-page``, which is ``python -m mm.page``: the page of a run, or of several side by side.

    mm-page logs
    mm-page logs_a logs_b --html both.html
"""

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

from annotated_types import MinLen
from pydantic import Field
from pydantic.dataclasses import dataclass

from mm.config.command_line import CommandLine
from mm.config.outputs import PAGE_FILE
from mm.config.schema import STRICT, Positional
from mm.ending import run_command
from mm.errors import UserError, collected, refuse
from mm.report import check_page, write_page


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PageFlags:
    """``mm-page``."""

    runs: Annotated[tuple[Path, ...], MinLen(1), Positional("RUN_DIR")] = Field(
        title="one or more directories", description="the --log-dir of a run, or the metrics_*.jsonl of an earlier run "
                                                     "in it")
    html: Path | None = Field(None, description=(
        f"the file to write; absent = {PAGE_FILE} in RUN_DIR; needed with several runs and with an earlier run"))


PAGE = CommandLine(
    "mm-page", "Write one HTML file about a run: facts, curves, tables, timeline, answers and settings; or about "
    "several runs, side by side.  A run may have ended or not.", PageFlags, "RUN_DIR ... [--html PAGE]")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status: 0, or 2 for errors that the user can fix."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _run(words), lambda: "the page is as it was; run the same command again")


def _run(words: Sequence[str]) -> int:
    flags = PAGE.read(PAGE.split(words))
    from mm.page.pages import run_page, runs_page
    from mm.page.plot import COLOURS
    from mm.page.record import ASIDE, read_run, run_names

    folders, (first, *_) = flags.runs, flags.runs
    path = flags.html or (first if first.is_dir() else first.parent) / PAGE_FILE
    if len(folders) > len(COLOURS):
        raise UserError(f"{len(folders)} runs are given; expected at most {len(COLOURS)}, because no more colours can "
                        f"be told apart; make several pages")
    if len(folders) > 1 and flags.html is None:
        raise UserError("--html is missing: the page of several runs belongs to none of them; name its file, such as "
                        "--html runs.html")
    if first.match(ASIDE) and flags.html is None:
        raise UserError(f"--html is missing: {path} is the page of a later run than {first.name}; name another "
                        f"file, such as --html old.html")
    check_page(flags.html)
    problems: list[str] = []
    runs = []
    for folder, name in zip(folders, run_names(folders), strict=True):
        with collected(problems):
            runs.append(read_run(folder, name))
    refuse(problems)
    now = datetime.now()
    print(write_page(path, run_page(runs[0], now) if len(runs) == 1 else runs_page(runs, now)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
