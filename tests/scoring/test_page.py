"""The page: scores, the worst answers with embedded images, and nothing that a browser would fetch or run."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from mm.scoring.results import report, results_page, scored, summary
from tests.browser import WIDTHS, content_width, needs_browser
from tests.page_reader import PageReader
from tests.scoring.test_results import answers_of, items_of


def test_worst_answers_beside_their_images(tmp_path):
    items = items_of(tmp_path, "docvqa")
    found = scored(items, answers_of("docvqa"))
    settings = {"load": "a <b>", "decoding": {"seed": 1, "top_k": None}}
    html = results_page(summary(items, "DocVQA", found), settings, found)
    text = PageReader(html).text
    assert "<title>DocVQA: 66.48%</title>" in html
    assert re.findall(r"<th>answered</th><td[^>]*>([^<]*)<", html) == ["a whole other answer", "12 %", "ITC Limted"]
    images = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', html)
    assert len(images) == 3
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(images[0])))).astype(int)
    original = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    assert shown.shape == original.shape and np.abs(shown - original).mean() < 64  # noise, as JPEG keeps it: 33
    assert "load a <b>" in text and "decoding.top_k not set" in text
    places = [text.index(part) for part in ("questions 4", "The worst answers", "Settings")]
    assert places == sorted(places)


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_shows_it_without_scrolling_sideways(tmp_path, width):
    items = items_of(tmp_path, "mmmu")
    found = scored(items, answers_of("mmmu"))
    html = results_page(summary(items, "MMMU", found), {"load": "/weights" * 40}, found)
    assert content_width(html, width, tmp_path) == width


def test_nothing_wrong_and_splits(tmp_path):
    items = items_of(tmp_path, "mmmu")
    found = [one for one in scored(items, answers_of("mmmu")) if one.score == 1]
    scores = summary(items, "MMMU", found)
    assert "All answers are right" in results_page(scores, {}, found)
    text = report(scores).text()
    assert re.search(r"^score +100\.00% of split validation$", text, flags=re.MULTILINE) and "By l2-category" in text
