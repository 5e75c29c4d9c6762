"""Reports: text and page show every number, histograms count every value, and the page contains no script."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mm.report import Histogram, Problem, Report, Table
from tests.browser import content_width, hidden_width, needs_browser
from tests.page_reader import PageReader

values = st.lists(st.integers(0, 100_000), max_size=60).map(lambda numbers: np.array(numbers, dtype=np.int64))


@given(values, st.integers(1, 30))
def test_bins_hold_every_value_once(numbers, num_bins) -> None:
    found = Histogram.of("x", "tokens", numbers, num_bins)
    assert sum(found.counts) == len(numbers) and len(found.edges) == len(found.counts) + 1 <= num_bins + 3
    (width,) = {upper - lower for lower, upper in pairwise(found.edges)}
    assert re.fullmatch("[125]0*", str(int(width))) and found.edges[0] % width == 0
    for (lower, upper), count in zip(pairwise(found.edges), found.counts, strict=True):
        assert count == sum(lower <= number < upper for number in numbers)


REPORT = Report(
    "A <b>file</b>.json",
    (("samples", "1,234"), ("tokens", "5 & more")),
    (Table("Samplers", ("sampler", "max / mean"), (("plain", "1.23"), ("balanced", "1.01"))),
     Table("Settings", ("name", "value"), (("seed", "1"),), is_folded=True)),
    (Histogram("Tokens", "a sample", (0, 10, 20), (3, 7)),),
    tuple(Problem(f"a.json:{number}", "has <script>alert(1)</script> in it") for number in range(25)),
    ("one note",),
)


def test_the_text_shows_everything() -> None:
    text = REPORT.text()
    for part in ("A <b>file</b>.json", "samples  1,234", "plain     1.23", "seed  1", "Tokens (a sample, from)",
                 "note: one note", "a.json:19: has", "... and 5 more problems; --html PAGE lists them all"):
        assert part in text
    assert " 0  ################## 3\n10  " + "#" * 40 + " 7" in text and "a.json:20:" not in text


def test_the_page_shows_everything_problems_first_and_has_no_script() -> None:
    html = replace(REPORT, sections=(Report("Training samples", (), REPORT.tables),)).html()
    text = PageReader(html).text
    for part in ("A <b>file</b>.json", "5 & more", "balanced", "highest bar: 7 samples", "<script>alert(1)"):
        assert part in text
    assert 'title="0 to 9: 3 samples"' in html and "<details><summary>Settings</summary>" in html
    places = [text.index(part) for part in ("1,234", "one note", "25 problems", "Samplers", "Training samples")]
    assert places == sorted(places)
    assert Report("x", ()).html().count("No problems") == 1


def test_the_page_groups_problems_by_kind() -> None:
    """The most frequent first; its samples are folded if there are many."""
    lost = [Problem(f"a.json:{number}", f"{number}.png is lost", "… is lost") for number in range(11)]
    strip = Problem("b.json:1", "is <too> long", "is <too> long")
    html = Report("x", (), problems=(strip, *lost)).html()
    assert re.findall("<h[23]>(.*?)</h", html) == ["12 problems", "11 x … is lost", "1 x is &lt;too&gt; long"]
    ((title, rows),) = re.findall("<details><summary>(.*?)</summary>(.*?)</details>", html, re.DOTALL)
    assert (title, rows.count("is lost")) == ("All 11", 11)
    _, after = html.split("</details>")
    assert "b.json:1" in after


@needs_browser
def test_tables_break_long_cells_only(tmp_path: Path) -> None:
    """Many short columns fit side by side on a laptop; on a phone, a path is broken and the page does not scroll."""
    short = ("balanced packs", "tensor_ranks", "selective", "0.453 .. 0.911", "346,000", "47.6%", *"1234567890")
    narrow = Report("x", (), (Table("Layouts", short, (short,)),)).html()
    path = Report("x", (), (Table("Settings", ("setting", "value"), (("data.dataset", "/a" * 150),)),)).html()
    assert hidden_width(narrow, 1280, tmp_path) == 0 < hidden_width(narrow, 400, tmp_path)
    assert content_width(narrow, 400, tmp_path) == 400
    assert hidden_width(path, 400, tmp_path) == 0
