"""Hand-computed scores of each benchmark, folders of other evaluations, MindSpeed-MM's result files, and the page."""

import base64
import csv
import io
import json
import re

import numpy as np
import openpyxl
import pytest
from PIL import Image

from mm.errors import UserError
from mm.scoring import results
from mm.scoring.benchmarks import BENCHMARKS, Items, read_benchmark
from mm.scoring.results import ANSWERS, PREDICTIONS, SCORES, SETTINGS, Prediction, results_page, scored, summary
from tests.browser import WIDTHS, content_width, needs_browser
from tests.files import json_lines
from tests.page_reader import PageReader
from tests.scoring.tables import encoded, write_table

ROWS = {
    "ai2d": [
        {"index": "0", "A": "sun", "B": "moon", "answer": "B", "category": "sky"},
        {"index": "1", "A": "cell", "B": "leaf", "answer": "A", "category": "life"},
        {"index": "2", "A": "root", "B": "stem", "answer": "A", "category": "life"}],
    "chartqa": [
        {"index": "0", "answer": "25%", "split": "test_human"}, {"index": "1", "answer": "Yes", "split": "test_human"},
        {"index": "2", "answer": "['4', 'four']", "split": "test_augmented"},
        {"index": "3", "answer": "5", "split": "test_augmented"}, {"index": "4", "answer": "5", "split": "test_human"}],
    "docvqa": [
        {"index": "0", "answer": "['ITC Limited', 'itc']"}, {"index": "1", "answer": "12%"},
        {"index": "2", "answer": "['a b c d']"}, {"index": "3", "answer": "x"}],
    "mmmu": [
        {"index": "dev_1", "A": "yes", "B": "no", "answer": "A", "split": "dev", "category": "Art",
         "l2-category": "Humanities"},
        {"index": "val_1", "answer": "3.5", "split": "validation", "category": "Physics", "l2-category": "Science"},
        {"index": "val_2", "A": "up", "B": "down", "answer": "B", "split": "validation", "category": "Physics",
         "l2-category": "Science"},
        {"index": "val_3", "answer": "['1/2', '0.5']", "split": "validation", "category": "Art",
         "l2-category": "Humanities"}],
}  # fmt: skip
TEXTS = {
    "ai2d": ["The correct answer is B.", "It is a leaf.", ""],
    "chartqa": ["0.26", "yes.", "four", "5 kg", "5.2"],
    "docvqa": ["ITC Limted", "12 %", "A  B C D ", "a whole other answer"],
    "mmmu": ["A", "about 3.5 V", "A or B", "half, so 0.5"],
}
ALL = {
    "ai2d": 100 / 3,  # B is named; the leaf is option B, not A; nothing
    "chartqa": 60,  # 26 % is within 5 % of 25 %; a full stop; the second right answer; a unit; 4 % off
    "docvqa": 100 * (10 / 11 + 3 / 4 + 1 + 0) / 4,  # a letter; a space of four; case and spaces; nothing alike
    "mmmu": 75,
}


def items_of(tmp_path, name: str) -> Items:
    shared = {"image": encoded(0), "question": "What?"}
    rows = [{**shared, "A": "", "B": "", **row} if name == "mmmu" else {**shared, **row} for row in ROWS[name]]
    return read_benchmark(write_table(tmp_path / f"{name}.tsv", rows), BENCHMARKS[name], False)


def answers_of(name: str) -> dict[int, Prediction]:
    return {number: Prediction(text, number == 2) for number, text in enumerate(TEXTS[name])}


def finished(folder, items: Items, answers: dict[int, Prediction]) -> dict:
    """Scores of answers in the format of mm.generation."""
    results.check_settings(folder, {"benchmark": "x"})
    lines = ({"number": number, "answer": one.text, "ended": "length" if one.is_truncated else "stop", "key": ""}
             for number, one in answers.items())
    (folder / ANSWERS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    results.write_results(folder, items, "title", results.read_answers(folder / ANSWERS))
    return json.loads((folder / SCORES).read_text())


@pytest.mark.parametrize("name", ROWS)
def test_scores_of_each_benchmark(tmp_path, name):
    scores = finished(tmp_path / "out", items_of(tmp_path, name), answers_of(name))
    assert scores["overall"] == {"num_questions": len(ROWS[name]), "score_percent": pytest.approx(ALL[name], abs=1e-4)}
    assert scores["num_truncated_answers"] == 1 and scores["num_empty_answers"] == (name == "ai2d")
    assert scores["num_without_option"] == (name in ("ai2d", "mmmu"))  # the empty one; "A or B"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [ANSWERS, PREDICTIONS, SCORES, SETTINGS]


def test_scores_by_category_and_split(tmp_path):
    def part(num_questions, score_percent):
        return {"num_questions": num_questions, "score_percent": score_percent}

    assert finished(tmp_path / "1", items_of(tmp_path, "ai2d"), answers_of("ai2d"))["by_category"] == {
        "life": part(2, 0.0), "sky": part(1, 100.0)}
    assert finished(tmp_path / "2", items_of(tmp_path, "chartqa"), answers_of("chartqa"))["by_split"] == {
        "test_augmented": part(2, 50.0), "test_human": part(3, 66.6667)}
    scores = finished(tmp_path / "3", items_of(tmp_path, "mmmu"), answers_of("mmmu"))
    assert scores["headline"] == {"split": "validation", **part(3, 66.6667)}
    assert scores["by_split"]["validation"]["by_category"] == {"Art": part(1, 100.0), "Physics": part(2, 50.0)}
    assert scores["by_l2_category"] == {"Humanities": part(2, 100.0), "Science": part(2, 50.0)}


def test_predictions_are_complete(tmp_path):
    finished(tmp_path / "out", items_of(tmp_path, "ai2d"), answers_of("ai2d"))
    lines = json_lines(tmp_path / "out" / PREDICTIONS)
    assert [line["index"] for line in lines] == ["0", "1", "2"]
    assert lines[0] == {
        "index": "0", "category": "sky", "question": "What?", "options": {"A": "sun", "B": "moon"}, "chosen": "B",
        "right": ["B"], "prediction": "The correct answer is B.", "is_truncated": False, "score": 1.0}
    assert [line["chosen"] for line in lines[1:]] == ["B", None]


def test_another_evaluation_is_refused_and_nothing_lost(tmp_path):
    out = tmp_path / "out"
    finished(out, items_of(tmp_path, "ai2d"), answers_of("ai2d"))
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(UserError) as caught:
        results.check_settings(out, {"benchmark": "y", "load": "z"})
    ends = "; give another --output, or remove this folder to start again."
    assert caught.value.problems == (f'{out}/{SETTINGS}: benchmark was "x" and is now "y"{ends}',
                                     f'{out}/{SETTINGS}: load was null and is now "z"{ends}')
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def sheet(path) -> list[tuple]:
    return list(openpyxl.load_workbook(path).active.iter_rows(values_only=True))


def written(tmp_path, name: str, dataset: str) -> None:
    items = items_of(tmp_path, name)
    found = scored(items, answers_of(name))
    results.write_peer_files(tmp_path / "out", "qwen2_vl_7b", dataset, items.rule, found)


def test_peer_files_of_multiple_choice(tmp_path):
    written(tmp_path, "mmmu", "mmmu_dev_val")
    out = tmp_path / "out" / "qwen2_vl_7b_mmmu_dev_val"
    assert sorted(path.name for path in out.parent.iterdir()) == [
        out.name + end for end in (".xlsx", "_PREV.json", "_acc.csv", "_acc.xlsx")]
    header, *rows = sheet(f"{out}.xlsx")
    assert header == ("index", "question", "A", "B", "answer", "split", "l2-category", "category", "prediction", "hit",
                      "log")
    assert rows[0] == ("dev_1", "What?", "yes", "no", "A", "dev", "Humanities", "Art", "A", 1, "Match Log: A. ")
    assert [row[9] for row in rows] == [1, 1, 0, 1]
    assert sheet(f"{out}_acc.xlsx") == [
        ("split", "Overall", "Humanities", "Science", "Art", "Physics"), ("dev", 1, 1, None, 1, None),
        ("validation", pytest.approx(2 / 3), 1, 0.5, 1, 0.5)]
    previous = json.loads((out.parent / f"{out.name}_PREV.json").read_text())
    assert previous["val_2"] == {"hit": 0, "log": "Match Log: A or B. "}


def test_peer_files_of_few_words(tmp_path):
    written(tmp_path, "chartqa", "chartqa_test")
    out = tmp_path / "out" / "qwen2_vl_7b_chartqa_test"
    assert sheet(f"{out}_acc.xlsx") == [("test_augmented", "test_human", "Overall"), (50, pytest.approx(200 / 3), 60)]
    with open(f"{out}_acc.csv", encoding="utf-8", newline="") as stream:
        assert list(csv.reader(stream, delimiter="\t"))[1][2] == "60.0"
    assert sheet(f"{out}.xlsx")[3] == ("2", "What?", "['4', 'four']", "test_augmented", "four")


def test_cells_of_every_kind(tmp_path):
    cells = ["<&>\"'", "\x00control\x0b", " spaces ", "x" * 40_000, "=1+1"]
    (tmp_path / "book.xlsx").write_bytes(results.workbook([cells]))
    assert sheet(tmp_path / "book.xlsx") == [("<&>\"'", "control", " spaces ", "x" * 32_767, "=1+1")]


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
    text = results.report(scores).text()
    assert re.search(r"^score +100\.00% of split validation$", text, flags=re.MULTILINE) and "By l2-category" in text
