"""Compares what a run gave with what a card expects."""

from collections.abc import Sequence

from mm.errors import UserError, refuse
from verified.card import Card


def loss_difference(expected: Sequence[float], found: Sequence[float]) -> float:
    """The largest relative difference of a step's loss; NaN if a loss is."""
    differences = [abs(own - other) / abs(other) for own, other in zip(found, expected, strict=True)]
    return max(differences, key=lambda one: (one != one, one))  # NaN counts as the largest


def check_losses(card: Card, found: Sequence[float], cure: str) -> float:
    """The largest relative difference from the losses of ``card``.

    Raises UserError with the first step above its tolerance, and ``cure``.
    """
    if len(found) != len(card.losses):
        raise UserError(f"{card.name}: the run has {len(found)} steps, the card {len(card.losses)}. {cure}")
    assert card.tolerance is not None
    for step, (own, other) in enumerate(zip(found, card.losses, strict=True), start=1):
        difference = loss_difference([other], [own])
        if not difference <= card.tolerance:  # true for NaN too
            raise UserError(
                f"{card.name}: step {step} has loss {own!r}; the card has {other!r}, a relative difference of "
                f"{difference:.1e} where at most {card.tolerance:.0e} is allowed ({_measured(card)}). Something "
                f"changed the training: the model, the data, their order, the optimizer or a library. {cure}")
    return loss_difference(card.losses, found)


def check_answers(card: Card, found: Sequence[str], cure: str) -> None:
    """Raise UserError with every answer that differs from the card's."""
    if len(found) != len(card.answers):
        raise UserError(f"{card.name}: the run has {len(found)} answers, the card {len(card.answers)}. {cure}")
    refuse(f"{card.name}: answer {number} is {own!r}; the card has {other!r}. {cure}"
           for number, (own, other) in enumerate(zip(found, card.answers, strict=True), start=1) if own != other)


def _measured(card: Card) -> str:
    if card.measured_error is None:
        return "no difference has been measured yet"
    return f"measured between {card.measured_between}: {card.measured_error:.1e}"
