"""Fills cards with what comes out on this machine.

    python -m verified.fill verified/tiny-npu-train.yaml --by NAME

Each card's commands run twice; the difference of both is the measured error beside the tolerance.  The card gets the
losses or answers of the first run, figures, versions, commit, date and NAME, and the pages are written again.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from mm.ending import refused, run_command
from mm.errors import UserError
from verified.card import ANSWERS, FOLDER, LOSSES, Card, read_card, write_card
from verified.compare import loss_difference
from verified.outcome import Outcome, read_outcome, refuse_other_device, run_commands
from verified.page import write_pages

_WRITTEN = (":!verified/*.yaml", ":!docs/verified.md", ":!docs/*.svg")
"""Files that filling a card changes, so they make no tree dirty."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 after a message."""
    flags = _parse(sys.argv[1:] if argv is None else argv)

    def command() -> int:
        try:
            for path in flags.cards:
                fill(path, flags)
        except UserError as error:
            return refused(error)
        return 0

    return run_command(command, lambda: "the card that was running is as it was")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cards", nargs="+", type=Path, metavar="CARD")
    parser.add_argument("--by", required=True, metavar="NAME",
                        help="who runs it, as the card shows it to everyone; nothing is taken from git")
    parser.add_argument("--once", action="store_true", help="run once; the error stays unmeasured")
    parser.add_argument("--ran", action="store_true", help="the commands ran already, as on several nodes: read only")
    parser.add_argument("--allow-dirty", action="store_true", help="with changes that are not committed")
    return parser.parse_args(words)


def fill(path: Path, flags: argparse.Namespace) -> None:
    """Run the card at ``path`` and write it."""
    card, here = read_card(path), Path.cwd()
    refuse_other_device(card)
    commit = commit_of(FOLDER.parent, allow_dirty=flags.allow_dirty)
    num_runs = 1 if flags.ran or flags.once or card.job not in LOSSES else 2
    outcomes = []
    for _ in range(num_runs):
        if not flags.ran:
            run_commands(card, here)
        outcomes.append(read_outcome(card, here))
    filled = replace(with_outcomes(card, outcomes), status="verified", commit=commit, date=date.today().isoformat(),
                     by=flags.by)
    write_card(filled, path)
    read_card(path)
    print(f"{path} is filled", flush=True)
    if path.resolve().parent == FOLDER:
        write_pages()


def with_outcomes(card: Card, outcomes: Sequence[Outcome]) -> Card:
    """The card with the first of ``outcomes``, and the difference between them.

    A larger error that was measured before, as between other machines, stays.  Raises UserError if the result is
    incomplete, a loss is not a finite number, or the outcomes differ by more than the tolerance.
    """
    first = outcomes[0]
    if card.job in LOSSES and not (first.losses and all(map(math.isfinite, first.losses))):
        raise UserError(f"{card.name}: the losses of the run are {list(first.losses)}; expected a finite number for "
                        f"each step")
    if card.job in ANSWERS and not first.answers:
        raise UserError(f"{card.name}: the run has given no answers")
    error, between = card.measured_error, card.measured_between
    if len(outcomes) > 1:
        found = max(loss_difference(first.losses, one.losses) for one in outcomes[1:])
        assert card.tolerance is not None
        if not found <= card.tolerance:
            raise UserError(f"{card.name}: two runs of the same commands differ by {found:.1e}, more than the "
                            f"tolerance of {card.tolerance:.0e}; raise the card's tolerance, or add "
                            f"--deterministic-mode to its command")
        if error is None or found > error:
            error, between = found, "two runs"
    return replace(card, losses=first.losses, answers=first.answers, figures=first.figures,
                   device_name=first.device_name, versions=first.versions, data_digest=first.data_digest,
                   measured_error=error, measured_between=between)


def commit_of(repository: Path, *, allow_dirty: bool) -> str:
    """The commit that ``repository`` is at.  Raises UserError if files differ from it, unless ``allow_dirty``."""
    commit = _git(repository, "rev-parse", "HEAD")
    changed = _git(repository, "status", "--porcelain", "--untracked-files=no", "--", ".", *_WRITTEN)
    if not changed:
        return commit
    if not allow_dirty:
        raise UserError(f"these files differ from the commit that the card would name; commit them first, or give "
                        f"--allow-dirty:\n{changed}")
    return f"{commit}-dirty"


def _git(repository: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=repository, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"git {' '.join(words)} failed: {done.stderr.strip()}; a card is filled in a clone of the "
                        f"repository, because it names the commit")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
