"""Reports: text and page show every number, histograms count every value, and the page contains no script."""

import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.report import Bars, Histogram, Problem, Report, Table
from tests.browser import content_width, hidden_width, needs_browser
from tests.page_reader import PageReader

values = st.lists(st.integers(0, 100_000), max_size=60).map(lambda numbers: np.array(numbers, dtype=np.int64))


@given(values, st.integers(1, 30))
def test_bins_hold_every_value_once(numbers, num_bins) -> None:
    found = Histogram.of("x", "tokens", numbers, num_bins)
    assert sum(found.counts) == len(numbers) and len(found.edges) == len(found.counts) + 1 <= num_bins + 3
    widths = {upper - lower for lower, upper in pairwise(found.edges)}
    (width,) = widths
    assert re.fullmatch("[125]0*", str(int(width))) and found.edges[0] % width == 0
    for (lower, upper), count in zip(pairwise(found.edges), found.counts, strict=True):
        assert count == sum(lower <= number < upper for number in numbers)


REPORT = Report(
    "A <b>file</b>.json",
    (("samples", "1,234"), ("tokens", "5 & more")),
    (Table("Samplers", ("sampler", "max / mean"), (("plain", "1.23"), ("balanced", "1.01"))),),
    (Histogram("Tokens", "a sample", (0, 10, 20), (3, 7)),),
    tuple(Problem(f"a.json:{number}", "has <script>alert(1)</script> in it") for number in range(25)),
    ("one note",),
    bars=(Bars("Memory", "GiB", (("stage 0", 30.0), ("stage 10", 15.0)), limit=60.0),),
)


def test_the_text_shows_everything() -> None:
    text = REPORT.text()
    for part in ("A <b>file</b>.json", "samples  1,234", "Memory (GiB; limit 60.0)", "stage 0   " + "#" * 20 + " 30.0",
                 "plain     1.23", "Tokens (a sample, from)", "note: one note", "a.json:19: has",
                 "... and 5 more problems; --html PAGE lists them all"):
        assert part in text
    assert " 0  ################## 3\n10  " + "#" * 40 + " 7" in text and "a.json:20:" not in text


@pytest.mark.parametrize("first", [0, 5000])
def test_no_label_of_an_axis_is_cut_off(first: int) -> None:
    for num_bins, width in product(range(1, 61), (1, 20)):
        edges = tuple(float(first + width * number) for number in range(num_bins + 1))
        page = replace(REPORT, histograms=(Histogram("Tokens", "a sample", edges, (1,) * num_bins),)).html()
        labels = re.findall(r'<text x="([\d.]+)" y="184" text-anchor="(\w+)">([\d,]+)</text>', page)
        assert labels
        for x, anchor, label in labels:
            left = float(x) - 8.0 * len(label) * {"start": 0, "middle": 0.5, "end": 1}[anchor]
            assert left >= 0 and left + 8.0 * len(label) <= 460.05, (num_bins, width, label)


def test_the_page_is_well_formed_and_has_no_script() -> None:
    reader = PageReader(REPORT.html())
    text = " ".join(reader.words)
    assert "img" not in reader.tags
    for part in ("A <b>file</b>.json", "5 & more", "balanced", "0 to 9: 3 samples", "highest bar: 7 samples",
                 "red: the limit", "25 problems", "<script>alert(1)", "stage 10", "15.0"):
        assert part in text
    assert Report("x", ()).html().count("No problems") == 1


def test_the_page_groups_problems_by_kind() -> None:
    """The most frequent first, with its picture; its samples are folded if there are many."""
    lost = [Problem(f"a.json:{number}", f"{number}.png is lost", "… is lost", f"{number}.png") for number in range(11)]
    strip = Problem("b.json:1", "is <too> long", "is <too> long", "strip.png")
    html = Report("x", (), problems=(strip, *lost)).html({"is <too> long": b"JPEG"})
    assert re.findall("<h[23]>(.*?)</h", html) == ["12 problems", "11 x … is lost", "1 x is &lt;too&gt; long"]
    ((title, rows),) = re.findall("<details><summary>(.*?)</summary>(.*?)</details>", html)
    assert (title, rows.count("is lost")) == ("All 11", 11)
    _, after = html.split("</details>")
    assert '<img alt="the first" src="data:image/jpeg;base64,SlBFRw==">' in after and "b.json:1" in after


def test_problems_are_above_the_statistics() -> None:
    whole = replace(REPORT, sections=(Report("Training samples", (), REPORT.tables),))
    places = [whole.html().index(part) for part in ("1,234", "one note", "25 problems", "Samplers", "Training samples")]
    assert places == sorted(places)


def test_a_bar_of_a_histogram_for_one_number_has_that_number_below_it() -> None:
    single, wide = (Histogram("Images", "per sample", edges, (3, 7)) for edges in ((1, 2, 3), (0, 10, 20)))
    labels = [re.findall(r'text-anchor="(\w+)">(\d+)<', Report("x", (), histograms=(one,)).html())
              for one in (single, wide)]
    assert labels == [[("middle", "1"), ("middle", "2")], [("start", "0"), ("middle", "10"), ("end", "20")]]


def test_the_limit_of_bars_is_a_line() -> None:
    html = REPORT.html()
    assert re.findall(r'<rect width="([\d.]+)" height="4"/><rect class="limit" x="([\d.]+)"', html) == [
        ("50.00", "99.60"), ("25.00", "99.60")]
    assert '<rect class="limit"' not in replace(REPORT, bars=(replace(REPORT.bars[0], limit=None),)).html()


@needs_browser
def test_tables_break_long_cells_only(tmp_path: Path) -> None:
    """Many short columns fit side by side on a laptop; on a phone, a path is broken and the page does not scroll."""
    short = ("balanced packs", "tensor_ranks", "selective", "0.453 .. 0.911", "346,000", "47.6%", *"1234567890")
    narrow = Report("x", (), (Table("Layouts", short, (short,)),)).html()
    path = Report("x", (), (Table("Settings", ("setting", "value"), (("data.dataset", "/a" * 150),)),)).html()
    assert hidden_width(narrow, 1280, tmp_path) == 0 < hidden_width(narrow, 400, tmp_path)
    assert content_width(narrow, 400, tmp_path) == 400
    assert hidden_width(path, 400, tmp_path) == 0


def test_a_folded_table() -> None:
    table = Table("Settings", ("name", "value"), (("seed", "1"),), is_folded=True)
    assert "<details><summary>Settings</summary>" in Report("x", (), (table,)).html()
    assert "seed  1" in Report("x", (), (table,)).text()
