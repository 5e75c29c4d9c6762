"""The page of an evaluation: the score, the worst answers with their images, the scores of groups, and the settings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mm.config.outputs import MAX_THUMBNAILS
from mm.data.media.image_decode import jpeg, load_pixels
from mm.data.sample import Image
from mm.report import Report, Table, page, render
from mm.scoring.benchmarks import Item, Items
from mm.scoring.results import ScoredItem

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
    """Small copies of the images of the first questions as JPEG, each after the numbers of its question and of itself.
    """
    for number, item in enumerate(items.items[:_MAX_ILLUSTRATED]):
        yield from ((number, place, image) for place, image in enumerate(_images(item)))
