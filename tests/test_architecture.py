"""docs/architecture.md shows the folders that exist, on the floors that the layering test enforces."""

import re

import pytest

from tests.test_layering import FLOORS, ROOMS, ROOT

PAGE = ROOT / "docs/architecture.md"
TEXT = PAGE.read_text(encoding="utf-8")
PATH = re.compile(r"\b(?:mm|checkpoint|demo)/[\w./]*")


def as_path(room: str) -> str:
    """``mm.weights`` -> ``mm/weights/``, ``mm.batch`` -> ``mm/batch.py``."""
    path = room.replace(".", "/")
    return f"{path}/" if (ROOT / path).is_dir() else f"{path}.py"


def folders() -> set[str]:
    """Every folder of the two packages that holds code; ``mm/`` itself is the house."""
    files = [path for package in ("mm", "checkpoint") for path in (ROOT / package).rglob("*.py")]
    return {f"{path.parent.relative_to(ROOT)}/" for path in files} - {"mm/"}


def rooms(text: str = TEXT) -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)


def num_lines(room: str) -> int:
    """Lines of Python below a room's path."""
    files = (ROOT / room).rglob("*.py") if (ROOT / room).is_dir() else [ROOT / room]
    return sum(file.read_bytes().count(b"\n") for file in files)


def plans() -> list:
    """The part of the page with each floor plan, and the floors that it has to show."""
    _, *parts = re.split(r"^## Inside `", TEXT, flags=re.MULTILINE)
    inside = {part.partition("`")[0]: part.partition("\n## ")[0] for part in parts}
    house = TEXT.partition("\n## Inside ")[0]
    return [pytest.param(house, FLOORS, id="house"),
            *(pytest.param(inside[as_path(folder)], floors, id=folder) for folder, floors in ROOMS.items())]


@pytest.mark.parametrize(("text", "floors"), plans())
def test_each_picture_has_the_floors_of_the_layering_test(text: str, floors: dict[str, int]):
    drawn = {}
    for floor, names in re.findall(r"^floor (\d+) +(.+)$", text, flags=re.MULTILINE):
        drawn |= {name: int(floor) for name in names.split()}
    assert drawn == {as_path(room): floor for room, floor in floors.items()}


def test_every_folder_has_one_sentence():
    named = rooms()
    assert len(named) == len(set(named))
    assert set(named) == folders() | {as_path(room) for floors in (FLOORS, *ROOMS.values()) for room in floors}


def test_the_page_says_how_large_each_room_is():
    """To a tenth, or 30 lines, so that not each change touches the page."""
    said = {room: int(lines) for room, lines in re.findall(r"^\| `([^`]+)` \|.*\| (\d+) \|$", TEXT, flags=re.MULTILINE)}
    assert set(said) == set(rooms())
    wrong = {room: num_lines(room) for room, lines in said.items()
             if abs(num_lines(room) - lines) > max(30, lines / 10)}
    assert not wrong, "the lines to write instead"


@pytest.mark.parametrize(("text", "floors"), plans())
def test_rooms_stand_in_the_order_of_the_floors(text: str, floors: dict[str, int]):
    of_path = {as_path(room): floor for room, floor in floors.items()}
    order = [of_path[room] for room in rooms(text) if room in of_path]
    assert order == sorted(order)


@pytest.mark.parametrize("path", sorted(set(PATH.findall(TEXT))))
def test_what_is_named_exists(path: str):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", TEXT))))
def test_link_leads_somewhere(link: str):
    assert (PAGE.parent / link).exists()
