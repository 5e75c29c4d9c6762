"""Runs verified cards again, and compares with what they have.

    python -m verified.check verified/tiny-cpu-train.yaml

Losses may differ by the card's tolerance, answers not at all.  Figures such as tokens/s are not compared.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mm.ending import refused, run_command
from mm.errors import UserError, refuse
from verified.card import ANSWERS, LOSSES, Card, read_card
from verified.compare import check_answers, check_losses
from verified.outcome import Outcome, read_outcome, refuse_other_device, run_commands


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 after a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cards", nargs="+", type=Path, metavar="CARD")
    parser.add_argument("--ran", action="store_true", help="the commands ran already: read only")
    flags = parser.parse_args(sys.argv[1:] if argv is None else argv)

    def command() -> int:
        problems = list[str]()
        for path in flags.cards:
            try:
                print(f"{path}: {check(path, Path.cwd(), ran=flags.ran)}", flush=True)
            except UserError as error:
                problems += error.problems
        try:
            refuse(problems)
        except UserError as error:
            return refused(error)
        return 0

    return run_command(command, lambda: "no card was changed")


def check(path: Path, directory: Path, *, ran: bool) -> str:
    """Run the card at ``path`` from ``directory`` and compare; returns what was found.  Raises UserError."""
    card = read_card(path)
    if not card.is_verified:
        raise UserError(f"{path}: is unverified, so there is nothing to compare with; {card.fill_command} fills it")
    refuse_other_device(card)
    if not ran:
        run_commands(card, directory)
    return compare(card, read_outcome(card, directory))


def compare(card: Card, outcome: Outcome) -> str:
    """What was found, in words.  Raises UserError where ``outcome`` is not what ``card`` has."""
    cure = f"If that is intended, fill the card again ({card.fill_command}) and explain it in the commit"
    if card.data_digest != outcome.data_digest:
        raise UserError(f"{card.name}: {card.data} has the digest {outcome.data_digest}; the card has "
                        f"{card.data_digest}, so the data differ and the results cannot be compared. {cure}")
    if card.job in LOSSES:
        difference = check_losses(card, outcome.losses, cure)
        return f"{len(card.losses)} losses differ by at most {difference:.1e} (allowed: {card.tolerance:.0e})"
    if card.job in ANSWERS:
        check_answers(card, outcome.answers, cure)
        return f"{len(card.answers)} answers are the same"
    return "the commands succeeded"


if __name__ == "__main__":
    sys.exit(main())
