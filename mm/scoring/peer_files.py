"""MindSpeed-MM's result files, written beside ours for scripts that read them.

    MODEL_DATASET.xlsx         every row with its prediction; with options also hit and log
    MODEL_DATASET_acc.xlsx     scores: with options as shares from 0 to 1, for other benchmarks in percent
    MODEL_DATASET_acc.csv      the same, with tabs, as its README says
    MODEL_DATASET_PREV.json    with options: index -> hit and log

A workbook of Excel is a zip file of XML; these have one sheet of plain cells, and the same bytes for the same results.
"""

import csv
import io
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.sax.saxutils import escape

from mm.config.evaluate import Rule
from mm.files import write_whole
from mm.scoring.benchmarks import GROUPS
from mm.scoring.results import ScoredItem

Cells = Sequence[Sequence[str | float]]
"""Rows; the first one has the column names."""

_NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_LONGEST_CELL = 32_767
"""Characters; Excel refuses a file with a longer cell."""
_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_KIND = "application/vnd.openxmlformats-officedocument.spreadsheetml"
_HEAD = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
_FRAME = {
    "[Content_Types].xml": (
        f'<Types xmlns="{_PACKAGE}/content-types"><Default Extension="rels" '
        f'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Default Extension="xml" ContentType="application/xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{_KIND}.sheet.main+xml"/>'
        f'<Override PartName="/xl/worksheets/sheet1.xml" ContentType="{_KIND}.worksheet+xml"/></Types>'),
    "_rels/.rels": (
        f'<Relationships xmlns="{_PACKAGE}/relationships"><Relationship Id="rId1" Type="{_OFFICE}/officeDocument" '
        f'Target="xl/workbook.xml"/></Relationships>'),
    "xl/workbook.xml": (
        f'<workbook xmlns="{_MAIN}" xmlns:r="{_OFFICE}"><sheets><sheet name="Sheet1" sheetId="1" r:id="rId1"/></sheets>'
        f'</workbook>'),
    "xl/_rels/workbook.xml.rels": (
        f'<Relationships xmlns="{_PACKAGE}/relationships"><Relationship Id="rId1" Type="{_OFFICE}/worksheet" '
        f'Target="worksheets/sheet1.xml"/></Relationships>'),
}
"""The files of a workbook around its sheet."""


def write_peer_files(folder: Path, model: str, dataset: str, rule: Rule, found: Sequence[ScoredItem]) -> None:
    """Write all files; ``model`` and ``dataset`` are MindSpeed-MM's ``evaluation_model`` and ``evaluation_dataset``."""
    acc = choice_scores(found) if rule == "choice" else word_scores(found)
    files = {".xlsx": workbook(_predictions(rule, found)), "_acc.xlsx": workbook(acc),
             "_acc.csv": _csv(acc).encode(errors="backslashreplace")}
    if rule == "choice":
        hits = {one.item.index: {"hit": int(one.score), "log": _log(one)} for one in found}
        files["_PREV.json"] = json.dumps(hits, indent=4).encode()
    for end, content in files.items():
        write_whole(folder / f"{model}_{dataset}{end}", content)


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
    header: list[str] = ["split", "Overall"]
    columns: list[Mapping[str, Any]] = [{split: _share(found, split, {}) for split in splits}]
    for name in GROUPS[1:]:
        for group in sorted({one.item.groups[name] for one in found if name in one.item.groups}):
            header.append(group)
            columns.append({split: _share(found, split, {name: group}) for split in splits})
    return [header, *([split, *(column[split] for column in columns)] for split in splits)]


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


def _csv(rows: Cells) -> str:
    stream = io.StringIO()
    csv.writer(stream, delimiter="\t", quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return stream.getvalue()


def workbook(rows: Cells) -> bytes:
    """An Excel file with one sheet."""
    body = "".join(f"<row>{''.join(map(_cell, row))}</row>" for row in rows)
    sheet = f'<worksheet xmlns="{_MAIN}"><sheetData>{body}</sheetData></worksheet>'
    files = {**_FRAME, "xl/worksheets/sheet1.xml": sheet}
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, text in files.items():
            info = zipfile.ZipInfo(name)  # dated 1980, so that the bytes are always the same
            info.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(info, _HEAD + text)
    return stream.getvalue()


def _cell(value: str | float) -> str:
    if not isinstance(value, str):
        return f"<c><v>{value!r}</v></c>"
    if not value:
        return "<c/>"
    text = escape(_NOT_IN_XML.sub("", value)[:_LONGEST_CELL])
    return f'<c t="inlineStr"><is><t xml:space="preserve">{text}</t></is></c>'
