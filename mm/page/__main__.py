"""``mm-page``, which is ``python -m mm.page``: the page of a run, as in ``mm-page logs``."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from mm.config.command_line import CommandLine
from mm.config.schema import STRICT, Positional
from mm.files import PAGE_FILE
from mm.process import run_command
from mm.report import check_page


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PageFlags:
    """``mm-page``."""

    run: Annotated[Path, Positional("RUN_DIR")] = Field(description="the --log-dir of a run")
    html: Path | None = Field(None, description=f"the file to write; absent = {PAGE_FILE} in RUN_DIR")


PAGE = CommandLine(
    "mm-page", "Write one HTML file about a run, which may have ended or not: facts, curves, tables, timeline, answers "
    "and settings.", PageFlags, "RUN_DIR [--html PAGE]")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status: 0, or 2 for errors that the user can fix."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _run(words), lambda: "the page is as it was; run the same command again")


def _run(words: Sequence[str]) -> int:
    flags = PAGE.read(PAGE.split(words))
    from mm.page.pages import write_run_page

    check_page(flags.html)
    print(write_run_page(flags.run, flags.html))
    return 0


if __name__ == "__main__":
    sys.exit(main())
