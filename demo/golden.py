"""The golden losses: those of the demo's first steps on each device, which detect unintended changes of the training.

They are on the demo's card of the device, ``verified/tiny-<device>-demo.yaml``.  All layouts train the same model, so
the losses must match whichever layouts took these steps.
"""

from collections.abc import Sequence

from demo.stages import DemoError
from mm.errors import UserError
from verified.card import Card, path_of, read_card
from verified.compare import check_losses

NUM_STEPS = 20


def card_of(device: str) -> Card:
    """The card of the demo on ``device``."""
    return read_card(path_of(f"tiny-{device}-demo"))


def check(losses: Sequence[float], card: Card) -> float | None:
    """The largest relative difference of ``losses`` from those of ``card``; None if it has none yet.

    Raises DemoError above the tolerance of the card.
    """
    if not card.is_verified:
        return None
    cure = f"If that is intended, fill the card again ({card.fill_command}) and explain it in the commit"
    try:
        return check_losses(card, losses, cure)
    except UserError as error:
        raise DemoError(str(error)) from error


def compare(losses: Sequence[float], card: Card) -> float | None:
    """``check`` the first steps, and print the result."""
    difference = check(losses[:NUM_STEPS], card)
    print(f"    {said(difference, card)}", flush=True)
    return difference


def said(difference: float | None, card: Card) -> str:
    """The result of the comparison as a sentence."""
    if difference is None:
        return f"There are no golden losses for {card.device} yet; this command records them: {card.fill_command}"
    return (f"The losses of the first {len(card.losses)} steps differ by at most {difference:.1e} from the golden ones "
            f"for {card.device} ({card.date}, {card.device_name}; allowed: {card.tolerance:.0e}).")
