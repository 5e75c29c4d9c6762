"""Problems are of one kind if their messages differ in paths, numbers and quotes only."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.data_tool.kinds import kind_of, pictures_by_kind
from mm.report import Problem
from tests.data.oracle import photo

NAMES = st.text("abc.-_ é", min_size=1).map(lambda name: f"/data/{name}x.png")


@pytest.mark.parametrize(("one", "other"), [
    ("image '/a/b.png' does not exist", "image '/c.png' does not exist"),
    ("image a/b.png: 2000 x 5 pixels, more than 200 times", "image ../c-d.jpeg: 1,201 x 3 pixels, more than 200 times"),
    ('role "usr" of turn 1 is unknown', 'role "a b" of turn 12 is unknown'),
])  # fmt: skip
def test_what_differs_between_samples_is_left_out(one: str, other: str) -> None:
    assert kind_of(one) == kind_of(other) and "…" in kind_of(one)


def test_what_is_wrong_stays() -> None:
    assert kind_of("image 'a.png' is empty") == "image … is empty" != kind_of("image 'a.png' does not exist")
    assert kind_of("/a b.png: is empty", "/a b.png") == "is empty"
    assert kind_of("has an empty message 1, and/or none") == "has an empty message …, and/or none"
    assert kind_of("Qwen2.5-VL's limit is 3.5") == "Qwen2.5-VL's limit is …"


@given(NAMES, NAMES, st.integers(), st.integers())
def test_names_with_spaces_and_all_numbers(one: str, other: str, first: int, second: int) -> None:
    for path, number in ((one, first), (other, second)):
        assert kind_of(f"image {path} has {abs(number)} pixels", path) == "image … has … pixels"


def test_a_picture_of_the_first_of_each_kind(tmp_path: Path) -> None:
    photo(400, 10).save(tmp_path / "strip.png")
    (tmp_path / "empty.png").touch()
    problems = [Problem("a:1", "x", "too long", str(tmp_path / "strip.png")), Problem("a:2", "x", "no picture"),
                Problem("a:3", "x", "empty", str(tmp_path / "empty.png")),
                Problem("a:4", "x", "no picture", str(tmp_path / "strip.png"))]
    found = pictures_by_kind(problems)
    assert list(found) == ["too long"] and found["too long"].startswith(b"\xff\xd8")
