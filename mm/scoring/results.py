"""The files of one evaluation: its settings, answers, predictions and scores, a page, and MindSpeed-MM's result files.

    settings.json              questions, weights and settings; an evaluation with others is refused in this folder
    answers.jsonl              the answers as they come (mm.generation.answers); an interrupted run resumes from them
    predictions.jsonl          every question with its answer and score, in the order of its file
    scores.json                in percent: all, and by split and category

    MODEL_DATASET.xlsx         every row with its prediction; with options also hit and log
    MODEL_DATASET_acc.xlsx     scores: with options as shares from 0 to 1, for other benchmarks in percent
    MODEL_DATASET_acc.csv      the same, with tabs, as MindSpeed-MM's README says
    MODEL_DATASET_PREV.json    with options: index -> hit and log
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from openpyxl import Workbook
from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

from mm.config.evaluate import Rule
from mm.data.media.image_decode import jpeg, load_pixels
from mm.data.sample import Image
from mm.errors import refuse, writing
from mm.files import MAX_THUMBNAILS, PREDICTIONS_FILE, json_object, read_regular, write_whole
from mm.report import Report, Table, page, render
from mm.scoring.benchmarks import GROUPS, Item, Items
from mm.scoring.rules import REFERENCES, chosen_option, score

SETTINGS, ANSWERS, PREDICTIONS, SCORES = "settings.json", "answers.jsonl", PREDICTIONS_FILE, "scores.json"


@dataclass(frozen=True)
class Prediction:
    """The model's answer to one question."""

    text: str
    is_truncated: bool = False
    """Whether it was cut off at the maximum length."""


@dataclass(frozen=True)
class ScoredItem:
    """A question with its answer and the answer's score, from 0 to 1."""

    item: Item
    answer: Prediction
    score: float

    @property
    def chosen(self) -> str | None:
        """The option that the answer names, if any."""
        return chosen_option(self.answer.text, self.item.options)

    def line(self) -> dict[str, Any]:
        """One line of ``predictions.jsonl``."""
        item = self.item
        options = {"options": dict(item.options), "chosen": self.chosen} if item.options else {}
        return {"index": item.index, **item.groups, "question": item.question, **options, "right": list(item.right),
                "prediction": self.answer.text, "is_truncated": self.answer.is_truncated, "score": self.score}


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Begin or resume an evaluation in ``folder``.  Raises UserError if the folder has a different one."""
    path = folder / SETTINGS
    if not path.exists():
        write_json(path, settings)
    earlier, now = json_object(read_regular(path)), json.loads(json.dumps(settings))
    refuse(f"{path}: {key} was {json.dumps(earlier.get(key))} and is now {json.dumps(now.get(key))}; give another "
           f"--output, or remove this folder to start again."
           for key in dict.fromkeys((*now, *earlier)) if now.get(key) != earlier.get(key))


def write_results(
    folder: Path, items: Items, title: str, answers: Mapping[int, Prediction]
) -> tuple[list[ScoredItem], dict[str, Any]]:
    """Score ``answers``, which has one for each item, by number; write predictions and scores, and return both."""
    found = scored(items, answers)
    scores = summary(items, title, found)
    write_text(folder / PREDICTIONS, "".join(json.dumps(one.line(), ensure_ascii=False) + "\n" for one in found))
    write_json(folder / SCORES, scores)
    return found, scores


def read_answers(path: Path) -> dict[int, Prediction]:
    """Read the file that ``mm.generation.answers`` writes, by the number of the question."""
    answers = map(json_object, path.read_bytes().splitlines())
    return {one["number"]: Prediction(one["answer"], one["ended"] == "length") for one in answers}


def scored(items: Items, answers: Mapping[int, Prediction]) -> list[ScoredItem]:
    """Score every item."""
    return [ScoredItem(item, answers[number], score(items.rule, answers[number].text, item.right, item.options))
            for number, item in enumerate(items.items)]


def summary(items: Items, title: str, found: Sequence[ScoredItem]) -> dict[str, Any]:
    """The content of ``scores.json``."""
    headline = [one for one in found if one.item.groups.get("split") == items.headline_split]
    named = items.headline_split if items.headline_split and headline else None
    return {"benchmark": title, "rule": items.rule, "source": REFERENCES[items.rule],
            "headline": {"split": named, **_mean(headline if named else found)},
            "overall": _mean(found), **_by(found, GROUPS),
            "num_truncated_answers": sum(one.answer.is_truncated for one in found),
            "num_empty_answers": sum(not one.answer.text.strip() for one in found),
            "num_without_option": sum(bool(one.item.options) and one.chosen is None for one in found)}


def _by(found: Sequence[ScoredItem], names: Sequence[str]) -> dict[str, Any]:
    """``by_NAME`` -> group -> its score; for a split also the scores of its categories."""
    scores: dict[str, Any] = {}
    for name in names:
        by_group: dict[str, list[ScoredItem]] = {}
        for scored_item in found:
            if name in scored_item.item.groups:
                by_group.setdefault(scored_item.item.groups[name], []).append(scored_item)
        if by_group:
            scores[f"by_{name.replace('-', '_')}"] = {
                group: {**_mean(by_group[group]), **(_by(by_group[group], names[1:]) if name == "split" else {})}
                for group in sorted(by_group)}
    return scores


def _mean(found: Sequence[ScoredItem]) -> dict[str, Any]:
    return {"num_questions": len(found), "score_percent": round(100 * fmean(one.score for one in found), 4)}


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8; half of a surrogate pair becomes its escape."""
    with writing(path):
        write_whole(path, text.encode(errors="backslashreplace"))


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
    book = Workbook()
    sheet = book.worksheets[0]
    for row in rows:
        sheet.append([ILLEGAL_CHARACTERS_RE.sub("", one) if isinstance(one, str) else one for one in row])
    for cell in chain.from_iterable(sheet.iter_rows()):
        cell.data_type = "s" if cell.data_type == "f" else cell.data_type
    stream = io.BytesIO()
    book.save(stream)
    return stream.getvalue()


_NUM_WORST = 50
_MAX_SIDE_PIXELS = 480
"""Longest side of an image on the page."""
_MAX_ILLUSTRATED = 200
"""Questions of a training run whose images are kept."""


def results_page(scores: Mapping[str, Any], settings: Mapping[str, Any], found: Sequence[ScoredItem]) -> str:
    """The whole page."""
    # equal scores stay in the order of the file
    worst = sorted((one for one in found if one.score < 1), key=lambda one: one.score)[:_NUM_WORST]
    whole = report(scores, settings)
    return page(f"{scores['benchmark']}: {scores['headline']['score_percent']:.2f}%", render(
        "scores.html", facts=replace(whole, tables=()).body(), tables=replace(whole, facts=()).body(),
        answers=[(list(_images(one.item)), _answer(one).body()) for one in worst]))


def report(scores: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> Report:
    """The scores as facts and tables, for the terminal too; ``settings`` go below them."""
    headline, overall = scores["headline"], scores["overall"]
    facts = [("score", _percent(headline) + (f" of split {headline['split']}" if headline["split"] else "")),
             ("all splits", _percent(overall)), ("questions", f"{overall['num_questions']:,}"),
             ("rule", f"{scores['rule']}: {scores['source']}"),
             ("truncated answers", f"{scores['num_truncated_answers']:,}"),
             ("empty answers", f"{scores['num_empty_answers']:,}"),
             ("answers without an option", f"{scores['num_without_option']:,}")]
    tables = [Table(f"By {name.removeprefix('by_').replace('_', '-')}", ("group", "score", "questions"), tuple(
        (group, _percent(value), f"{value['num_questions']:,}") for group, value in groups.items()))
        for name, groups in scores.items() if name.startswith("by_")]
    if settings is not None:
        tables.append(Table("Settings", ("setting", "value"), tuple(_rows(settings)), is_folded=True))
    return Report(str(scores["benchmark"]), tuple(facts), tuple(tables))


def _rows(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", text) for inner, text in _rows(value))
        else:
            yield name, "not set" if value is None else str(value)


def _percent(value: Mapping[str, Any]) -> str:
    return f"{value['score_percent']:.2f}%"


def _answer(scored: ScoredItem) -> Report:
    item = scored.item
    options = "".join(f"\n{letter}. {text}" for letter, text in item.options.items())
    return Report("", (
        ("question", item.question + options), ("answered", scored.answer.text or "(nothing)"),
        ("right", " | ".join(item.right)), ("score", f"{scored.score:.1%}"),
        ("where", f"{item.where}, index {item.index}")))


def _images(item: Item) -> Iterator[bytes]:
    """Small copies of an item's first images as JPEG."""
    for one in [one for one in item.content if isinstance(one, Image)][:MAX_THUMBNAILS]:
        yield jpeg(load_pixels(one.path), _MAX_SIDE_PIXELS)


def thumbnails(items: Items) -> Iterator[tuple[int, int, bytes]]:
    """Numbers of the question and of the image, and a small copy of it as JPEG, of the first questions' images."""
    for number, item in enumerate(items.items[:_MAX_ILLUSTRATED]):
        yield from ((number, place, image) for place, image in enumerate(_images(item)))
