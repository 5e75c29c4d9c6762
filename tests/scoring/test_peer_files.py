"""MindSpeed-MM's result files: names, columns and scales."""

import csv
import json

import openpyxl
import pytest

from mm.scoring.results import scored, workbook, write_peer_files
from tests.scoring.test_results import answers_of, items_of


def sheet(path) -> list[tuple]:
    return list(openpyxl.load_workbook(path).active.iter_rows(values_only=True))


def written(tmp_path, name: str, dataset: str) -> None:
    items = items_of(tmp_path, name)
    write_peer_files(tmp_path / "out", "qwen2_vl_7b", dataset, items.rule, scored(items, answers_of(name)))


def test_multiple_choice(tmp_path):
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


def test_few_words(tmp_path):
    written(tmp_path, "chartqa", "chartqa_test")
    out = tmp_path / "out" / "qwen2_vl_7b_chartqa_test"
    assert sheet(f"{out}_acc.xlsx") == [
        ("test_augmented", "test_human", "Overall"), (50, pytest.approx(200 / 3), 60)]
    with open(f"{out}_acc.csv", encoding="utf-8", newline="") as stream:
        assert list(csv.reader(stream, delimiter="\t"))[1][2] == "60.0"
    assert sheet(f"{out}.xlsx")[3] == ("2", "What?", "['4', 'four']", "test_augmented", "four")


def test_cells_of_every_kind(tmp_path):
    (tmp_path / "book.xlsx").write_bytes(workbook([["<&>\"'", "\x00control\x0b", " spaces ", "x" * 40_000, "=1+1"]]))
    assert sheet(tmp_path / "book.xlsx") == [("<&>\"'", "control", " spaces ", "x" * 32_767, "=1+1")]
