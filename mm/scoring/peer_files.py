"""MindSpeed-MM's result files, written beside ours for scripts that read them.

    MODEL_DATASET.xlsx         every row with its prediction; with options also hit and log
    MODEL_DATASET_acc.xlsx     scores: with options as shares from 0 to 1, for other benchmarks in percent
    MODEL_DATASET_acc.csv      the same, with tabs, as its README says
    MODEL_DATASET_PREV.json    with options: index -> hit and log
"""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from openpyxl import Workbook
from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

from mm.config.evaluate import Rule
from mm.files import write_whole
from mm.scoring.benchmarks import GROUPS
from mm.scoring.results import ScoredItem, write_json, write_text

Cells = Sequence[Sequence[str | float]]
"""Rows; the first one has the column names."""


def write_peer_files(folder: Path, model: str, dataset: str, rule: Rule, found: Sequence[ScoredItem]) -> None:
    """Write all files; ``model`` and ``dataset`` are MindSpeed-MM's ``evaluation_model`` and ``evaluation_dataset``."""
    scores, start = choice_scores(found) if rule == "choice" else word_scores(found), f"{model}_{dataset}"
    write_whole(folder / f"{start}.xlsx", workbook(_predictions(rule, found)))
    write_whole(folder / f"{start}_acc.xlsx", workbook(scores))
    stream = io.StringIO()
    csv.writer(stream, delimiter="\t", quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(scores)
    write_text(folder / f"{start}_acc.csv", stream.getvalue())
    if rule == "choice":
        write_json(folder / f"{start}_PREV.json", {
            one.item.index: {"hit": int(one.score), "log": _log(one)} for one in found})


def _predictions(rule: Rule, found: Sequence[ScoredItem]) -> Cells:
    letters = sorted({letter for one in found for letter in one.item.options})
    groups = [name for name in GROUPS if any(name in one.item.groups for one in found)]
    has_hits = rule == "choice"
    header = ["index", "question", *letters, "answer", *groups, "prediction", *(("hit", "log") if has_hits else ())]
    return [header, *([
        one.item.index, one.item.question, *(one.item.options.get(letter, "") for letter in letters),
        one.item.right[0] if len(one.item.right) == 1 else str(list(one.item.right)),
        *(one.item.groups.get(name, "") for name in groups), one.answer.text,
        *((one.score, _log(one)) if has_hits else ())] for one in found)]


def _log(scored: ScoredItem) -> str:
    return f"Match Log: {scored.answer.text}. "


def choice_scores(found: Sequence[ScoredItem]) -> Cells:
    """One row per split: its share of right answers, overall and by category."""
    splits = sorted({one.item.groups.get("split", "none") for one in found})
    columns: Mapping[str, dict[str, str]] = {"Overall": {}} | {
        group: {name: group} for name in GROUPS[1:]
        for group in sorted({one.item.groups[name] for one in found if name in one.item.groups})}
    return [["split", *columns], *([split, *(_share(found, split, one) for one in columns.values())]
                                   for split in splits)]


def _share(found: Sequence[ScoredItem], split: str, groups: Mapping[str, str]) -> float | str:
    """Share of right answers; empty if there are no questions."""
    scores = [one.score for one in found if one.item.groups.get("split", "none") == split
              and all(one.item.groups.get(name) == group for name, group in groups.items())]
    return fmean(scores) if scores else ""


def word_scores(found: Sequence[ScoredItem]) -> Cells:
    """One row of percentages: each split and all, or all and each category."""
    by = "split" if any("split" in one.item.groups for one in found) else "category"
    groups = sorted({one.item.groups[by] for one in found if by in one.item.groups})
    percents = {group: 100 * fmean(one.score for one in found if one.item.groups.get(by) == group) for group in groups}
    overall = {"Overall": 100 * fmean(one.score for one in found)}
    both = {**percents, **overall} if by == "split" else {**overall, **percents}
    return [list(both), list(both.values())]


def workbook(rows: Cells) -> bytes:
    """An Excel file with one sheet; what begins with ``=`` is a text."""
    book = Workbook(write_only=False)
    sheet = book.worksheets[0]
    for row in rows:
        sheet.append([ILLEGAL_CHARACTERS_RE.sub("", one) if isinstance(one, str) else one for one in row])
    for row in sheet.iter_rows():
        for cell in row:
            cell.data_type = "s" if cell.data_type == "f" else cell.data_type
    stream = io.BytesIO()
    book.save(stream)
    return stream.getvalue()
