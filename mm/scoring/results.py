"""The files of one evaluation: its settings, and at the end predictions and scores.

    settings.json        questions, weights and settings; an evaluation with others is refused in this folder
    answers.jsonl        the answers as they come (mm.generation.answers); an interrupted run resumes from them
    predictions.jsonl    every question with its answer and score, in the order of its file
    scores.json          in percent: all, and by split and category
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from mm.config.outputs import PREDICTIONS_FILE
from mm.errors import refuse, writing
from mm.files import json_object, read_regular, write_whole
from mm.scoring.benchmarks import GROUPS, Item, Items
from mm.scoring.rules import REFERENCES, chosen_option, score

SETTINGS, ANSWERS, PREDICTIONS, SCORES = "settings.json", "answers.jsonl", PREDICTIONS_FILE, "scores.json"


@dataclass(frozen=True)
class Prediction:
    """The model's answer to one question."""

    text: str
    is_truncated: bool = False
    """Whether it was cut off at the maximum length."""

    @classmethod
    def of(cls, text: str, ended: str) -> "Prediction":
        """``ended``: see ``mm.generation.decode.Answer``."""
        return cls(text, ended == "length")


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
    """Begin an evaluation in ``folder``, or resume it.  Raises UserError if the folder has a different one."""
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
    return {one["number"]: Prediction.of(one["answer"], one["ended"]) for one in answers}


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
    """Write ``text`` in UTF-8; half of a surrogate pair becomes its escape.  Raises UserError if the file cannot be
    written."""
    with writing(path):
        write_whole(path, text.encode(errors="backslashreplace"))
