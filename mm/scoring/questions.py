"""The questions of one evaluation: a benchmark's, or the user's own as JSON, JSONL or Parquet.

    {"question": "How many cats are there?", "image": "cats.jpg", "answer": ["2", "two"], "category": "counting"}
    {"question": "Which is it?", "images": ["a.jpg"], "options": {"A": "cat", "B": "dog"}, "answer": "A"}

In a sample in one of the trainer's forms, the last answer is the right one, and the turns before it are the prompt.
Only the options are added to the user's words.
"""

import string
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mm.config.evaluate import Evaluating, Rule
from mm.config.parse import shown
from mm.data.records.formats import MESSAGES, USUAL_ATTRIBUTES, num_media, read_sample, with_places
from mm.data.records.records import Raw, open_records
from mm.data.records.roots import MediaRoots
from mm.data.sample import name_of, numbered
from mm.errors import MAX_PROBLEMS, UserError, collected, reading, refuse
from mm.scoring.benchmarks import BENCHMARKS, GROUPS, Item, Items, prompt, read_benchmark

_SCORED = ("index", "id", "question", "options", "answer", "answers", *GROUPS)
"""Keys of a record besides those of a sample."""


def read_own(path: str, rule: Rule, media_roots: tuple[str, ...]) -> Items:
    """Read a file of questions.  Raises UserError with everything in it that cannot be asked or scored."""
    media = MediaRoots.beside(path, media_roots)
    problems: list[str] = []
    items: dict[str, Item] = {}
    file = open_records(path)
    for raw in file.records(problems):
        where = file.where(raw) + (f": {numbered('question', raw.index, name_of(raw.value))}" if raw.line else "")
        with collected(problems, f"{where}: "):
            if raw.problem is not None:
                raise UserError(raw.problem)
            item = _item(raw, where, rule, media)
            if item.index in items:
                raise UserError(f"has the same index {item.index!r} as {items[item.index].where}.")
            items[item.index] = item
        if len(problems) >= MAX_PROBLEMS:
            break
    refuse(problems)
    if not items:
        raise UserError(f"{path}: has no records; there is nothing to ask.")
    return Items(rule, tuple(items.values()))


def _item(raw: Raw, where: str, rule: Rule, media: MediaRoots) -> Item:
    record = raw.value
    if not isinstance(record, dict):
        raise UserError(f"is a {type(record).__name__}; expected an object with 'question' and 'answer'.")
    if "question" in record:
        return _question(record, raw, where, rule, media)
    sample = read_sample(record, USUAL_ATTRIBUTES, media, where)
    if rule == "choice":
        raise UserError("has no 'question' and 'options', which the rule choice needs; add them, or use the rule "
                        "exact.")
    *earlier, asked, last = sample.turns
    return Item(
        _index(record, raw), where, asked.text, asked.content, (last.text,), {}, _groups(record), tuple(earlier))


def _question(record: Mapping[str, Any], raw: Raw, where: str, rule: Rule, media: MediaRoots) -> Item:
    question, options = record["question"], _options(record.get("options"))
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"'question' is {shown(question)}; expected a string.")
    if (rule == "choice") != bool(options):
        raise UserError(f"has {'no ' if rule == 'choice' else ''}'options'; the rule choice needs them, and no other "
                        f"rule reads them.")
    right = _right(record, options)
    text = "".join(map(str, prompt("options", False, question, "", options, 0))) if options else question
    as_sample = {
        **{name: value for name, value in record.items() if name not in (*_SCORED, *MESSAGES)},
        "messages": [{"role": "user", "content": with_places(text, num_media(record))}]}
    *earlier, asked = read_sample(as_sample, USUAL_ATTRIBUTES, media, where, is_prompt=True).turns
    return Item(_index(record, raw), where, question, asked.content, right, options, _groups(record), tuple(earlier))


def _options(given: Any) -> dict[str, str]:
    if isinstance(given, list):
        given = dict(zip(string.ascii_uppercase, given, strict=False))
    if given and (not isinstance(given, dict) or len(given) < 2 or not all(
            len(letter) == 1 and letter in string.ascii_uppercase and isinstance(text, str)
            for letter, text in given.items())):
        raise UserError(f"'options' is {shown(given)}; expected at least two texts, as a list or as an object with "
                        f'letters like {{"A": "cat", "B": "dog"}}.')
    return given or {}


def _right(record: Mapping[str, Any], options: Mapping[str, str]) -> tuple[str, ...]:
    """The right answers; with options their letters, although the record may give the options' texts."""
    given = record.get("answer", record.get("answers"))
    several = given if isinstance(given, list) else [given]
    if not several or not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in several):
        raise UserError(f"'answer' is {shown(given)}; expected a string, a number, or a list of these.")
    letters = {text: letter for letter, text in options.items()}
    right = tuple(one if one in options else letters.get(one, one) for one in map(str, several))
    wrong = next((one for one in right if options and one not in options), None)
    if wrong is not None:
        raise UserError(f"'answer' is {wrong!r}; expected the letter or the text of an option: {', '.join(options)}.")
    return right


def _index(record: Mapping[str, Any], raw: Raw) -> str:
    return str(record.get("index", record.get("id", raw.index)))


def _groups(record: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(record[name]) for name in GROUPS if record.get(name) is not None}


@reading()
def read_items(evaluating: Evaluating) -> Items:
    """Read the questions.  Raises UserError with everything in the file that cannot be asked or scored."""
    path, args = evaluating.questions, evaluating.asking.args
    if evaluating.benchmark is None:
        assert evaluating.rule is not None, "one of the two is given"
        items = read_own(path, evaluating.rule, args.media_roots)
    else:
        items = read_benchmark(path, BENCHMARKS[evaluating.benchmark], evaluating.custom_prompt, args.media_roots)
    return replace(items, items=items.items[: args.max_questions])


def title_of(evaluating: Evaluating) -> str:
    """Title of the questions."""
    name = evaluating.benchmark
    return Path(evaluating.questions).name if name is None else BENCHMARKS[name].title
