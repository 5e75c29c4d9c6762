"""Writes the table of ``docs/verified.md`` and its Chinese page, and the picture of the demo's losses, from the cards.

    python -m verified.page
"""

import math
from collections.abc import Sequence

from mm.files import write_whole
from verified.card import FOLDER, Card, cards

DOCS = FOLDER.parent / "docs"
BEGIN = "<!-- made from the cards: written by python -m verified.page -->"
END = "<!-- end of what is made from the cards -->"
PICTURE = "golden_losses.svg"
PAGES = ("verified.md", "zh/verified.md")
_NUM_COLUMNS = 7
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _MARGIN = 640, 300, 56, 40, 16
_COLOURS = ("#2a6fb0", "#c2571a", "#3a8a3a")


def main() -> None:
    write_pages()


def write_pages() -> None:
    """Replace what lies between the marks of both pages, and the picture."""
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
    top = math.ceil(max((max(one.losses) for one in curves), default=1))
    num_steps = max((len(one.losses) for one in curves), default=2)

    def place(step: int, loss: float) -> tuple[float, float]:
        across = (step - 1) / (num_steps - 1) * (_WIDTH - _LEFT - _MARGIN)
        return _LEFT + across, _HEIGHT - _BOTTOM - loss / top * (_HEIGHT - _BOTTOM - _MARGIN)

    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
             f'height="{_HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
             f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>']
    for loss in range(top + 1):
        x, y = place(1, loss)
        lines += [f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{_WIDTH - _MARGIN}" y2="{y:.1f}" stroke="#d5dae0"/>',
                  _text(x - 8, y + 4, str(loss), "end")]
    lines += [_text(place(step, 0)[0], _HEIGHT - _BOTTOM + 18, str(step)) for step in range(1, num_steps + 1)]
    lines.append(_text((_LEFT + _WIDTH - _MARGIN) / 2, _HEIGHT - 6, "step of the demo; loss per answer token"))
    for number, card in enumerate(curves):
        points = " ".join("{:.1f},{:.1f}".format(*place(*one)) for one in enumerate(card.losses, start=1))
        colour = _COLOURS[number]
        lines += [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
                  _text(_WIDTH - _MARGIN, 28 + 16 * number, f"{card.device} ({card.device_name})", "end", colour)]
    return "\n".join([*lines, "</svg>", ""])


def _text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "#5a6673") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


if __name__ == "__main__":
    main()
