"""Writes the table of ``docs/verified.md``, and the picture of the demo's losses, from the cards.

    python -m verified.page
"""

from collections.abc import Sequence

from mm.files import write_whole
from mm.page.curve import Bin
from mm.page.plot import COLOURS, Plot, Series
from verified.card import FOLDER, Card, cards

DOCS = FOLDER.parent / "docs"
BEGIN = "<!-- made from the cards: written by python -m verified.page -->"
END = "<!-- end of what is made from the cards -->"
PICTURE = "golden_losses.svg"
PAGES = ("verified.md",)
_NUM_COLUMNS = 7


def main() -> None:
    write_pages()


def write_pages() -> None:
    """Write the table between the marks of the page, and the picture."""
    found = cards()
    for page in PAGES:
        path = DOCS / page
        write_whole(path, with_table(path.read_text(encoding="utf-8"), page, found).encode())
    write_whole(DOCS / PICTURE, picture(found).encode())


def with_table(text: str, page: str, found: Sequence[Card]) -> str:
    """``text`` of ``page`` with a row for each of these cards; the two lines of the table's head, which are in the
    language of the page, stay."""
    before, mark, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    assert mark and end, f"{page} has lost its marks {BEGIN} and {END}"
    head = [line for line in inside.splitlines() if line.startswith("|")][:2]
    assert len(head) == 2, f"{page} has lost the head of its table"
    up = "../" * (page.count("/") + 1)
    rows = (f"| {' | '.join(_row(card, up))} |" for card in found)
    lines = "\n".join([*head, *rows])
    return f"{before}{mark}\n\n{lines}\n\n{end}{after}"


def _row(card: Card, up: str) -> list[str]:
    cells = [f"[{card.name}]({up}verified/{card.name}.yaml)", f"`{card.status}`"]
    if not card.is_verified:
        return [*cells, *[""] * (_NUM_COLUMNS - len(cells))]
    ran_on = ", ".join([card.device_name or card.device, *(f"{name} {one}" for name, one in card.versions.items())])
    losses = f"{card.losses[0]:.4f} .. {card.losses[-1]:.4f}" if card.losses else ""
    speed = card.figures.get("tokens_per_second_per_device")
    assert card.commit is not None
    return [*cells, ran_on, losses, _allowed(card), "" if speed is None else f"{speed:,.0f}",
            f"{card.date}, {card.commit[:9]}, {card.by}"]


def _allowed(card: Card) -> str:
    if card.tolerance is None:
        return ""
    error = "" if card.measured_error is None else f" ({card.measured_error:.1e})"
    return f"{card.tolerance:.0e}{error}".replace("e-0", "e-").replace("e+00", "")


def picture(found: Sequence[Card]) -> str:
    """The losses of the demo's first steps on each device that has them, as SVG."""
    curves = [one for one in found if one.job == "demo" and one.losses]
    series = [Series(f"{card.device} ({card.device_name})",
                     [_bin(step, loss) for step, loss in enumerate(card.losses, start=1)], colour, is_noisy=False)
              for card, colour in zip(curves, COLOURS, strict=False)]
    num_steps = max((len(one.losses) for one in curves), default=1)
    return Plot("loss per answer token", "", series, (), (1, num_steps)).file()


def _bin(step: int, loss: float) -> Bin:
    found = Bin(step, step)
    found.add(step, loss)
    return found


if __name__ == "__main__":
    main()
