"""The pages have what the cards have."""

from dataclasses import replace

import pytest

from verified.card import cards
from verified.page import DOCS, PAGES, PICTURE, picture, with_table


@pytest.mark.parametrize("page", PAGES)
def test_the_table_is_that_of_the_cards(page: str):
    text = (DOCS / page).read_text(encoding="utf-8")
    found = cards()
    assert text == with_table(text, page, found), "write it again with python -m verified.page"
    for card in found:
        assert f"[{card.name}](" in text
    changed = [replace(card, date="2000-01-01") if card.is_verified else card for card in found]
    assert with_table(text, page, changed) != text


def test_the_picture_is_that_of_the_cards():
    found = cards()
    text = (DOCS / PICTURE).read_text(encoding="utf-8")
    assert text == picture(found), "write it again with python -m verified.page"
    devices = [card.device for card in found if card.job == "demo" and card.is_verified]
    assert text.count('stroke-width="1.8"') == len(devices) > 0
    assert all(f">{device} (" in text for device in devices)
