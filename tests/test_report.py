"""Reports: text and page show every number, histograms count every value, and the page contains no script."""

import re
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mm.report import Bars, Histogram, Problem, Report, Table
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


def test_the_page_is_well_formed_and_has_no_script() -> None:
    reader = PageReader(REPORT.html())
    text = " ".join(reader.words)
    assert "img" not in reader.tags
    for part in ("A <b>file</b>.json", "5 & more", "balanced", "0 to 10: 3", "25 problems", "<script>alert(1)",
                 "stage 10", "15.0"):
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


def test_a_folded_table() -> None:
    table = Table("Settings", ("name", "value"), (("seed", "1"),), is_folded=True)
    assert "<details><summary>Settings</summary>" in Report("x", (), (table,)).html()
    assert "seed  1" in Report("x", (), (table,)).text()
