"""The page of an evaluation: the score, the worst answers with their images, the scores of groups, and the settings.

It is self-contained: images are embedded, scaled down.
"""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mm.data.media.picture import jpeg, load_pixels
from mm.data.sample import Image, Inline, Media
from mm.report import Report, Table, page, picture_tag
from mm.scoring.benchmarks import Items
from mm.scoring.results import ScoredItem
from mm.scoring.tsv import Cell

_NUM_WORST = 50
_MAX_SIDE_PIXELS = 480
"""Longest side of an image on the page."""
_MAX_THUMBNAILS = 200
"""Questions of a training run whose images are kept."""
_MAX_IMAGES = 4
"""Maximum images shown for one question."""


def results_page(scores: Mapping[str, Any], settings: Mapping[str, Any], found: Sequence[ScoredItem]) -> str:
    """The whole page."""
    # equal scores stay in the order of the file
    worst = sorted((one for one in found if one.score < 1), key=lambda one: one.score)[:_NUM_WORST]
    heading = f"The {len(worst)} worst answers" if len(worst) > 1 else "The worst answer"
    shown = "\n".join(_answer(one) for one in worst)
    whole = report(scores, settings)
    facts, tables = replace(whole, tables=()), replace(whole, facts=())
    answers = f"<h2>{heading}</h2>\n{shown}" if worst else "<h2>All answers are right</h2>"
    return page(f"{scores['benchmark']}: {scores['headline']['score_percent']:.2f}%",
                f"{facts.body()}\n{answers}\n{tables.body()}")


def report(scores: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> Report:
    """The scores as facts and tables, for the terminal too; ``settings`` go below them."""
    headline, overall = scores["headline"], scores["overall"]
    facts = [("score", _percent(headline) + (f" of split {headline['split']}" if headline["split"] else "")),
             ("questions", f"{overall['num_questions']:,}"), ("rule", f"{scores['rule']}: {scores['source']}"),
             ("truncated answers", f"{scores['num_truncated_answers']:,}"),
             ("empty answers", f"{scores['num_empty_answers']:,}")]
    if scores["rule"] == "choice":
        facts.append(("answers without an option", f"{scores['num_without_option']:,}"))
    if headline["split"]:
        facts.insert(1, ("all splits", _percent(overall)))
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


def _answer(scored: ScoredItem) -> str:
    images = [item for item in scored.item.content if not isinstance(item, str)]
    more = len(images) - _MAX_IMAGES
    shown = "".join(_image(item) for item in images[:_MAX_IMAGES])
    options = "".join(f"\n{letter}. {text}" for letter, text in scored.item.options.items())
    rows = (("question", scored.item.question + options), ("answered", scored.answer.text or "(nothing)"),
            ("right", " | ".join(scored.item.right)), ("score", f"{scored.score:.1%}"),
            ("where", f"{scored.item.where}, index {scored.item.index}"))
    cells = "".join(f'<tr><th>{name}</th><td style="white-space: pre-wrap">{html.escape(text)}</td></tr>'
                    for name, text in rows)
    return (f"<div>{shown}{f'<p>and {more} more images</p>' if more > 0 else ''}</div>"
            f'<table class="answer">{cells}</table><p></p>')


def _image(item: Media | Cell) -> str:
    if not isinstance(item, Image | Cell):
        first, *others = map(str, item.contents)
        more = f" and {len(others)} more frames" if others else ""
        return f"<p>[video {html.escape(Path(first).name)}{more}]</p>"
    return picture_tag(_thumbnail(item), "image")


def thumbnails(items: Items) -> Iterator[tuple[int, int, bytes]]:
    """Small copies of the images of the first questions as JPEG, each after the numbers of its question and of itself.
    """
    for number, item in enumerate(items.items[:_MAX_THUMBNAILS]):
        images = [one for one in item.content if isinstance(one, Image | Cell)]
        for place, one in enumerate(images[:_MAX_IMAGES]):
            yield number, place, _thumbnail(one)


def _thumbnail(item: Image | Cell) -> bytes:
    pixels = load_pixels(item.path if isinstance(item, Image) else Inline(item.where, item.content()))
    return jpeg(pixels, _MAX_SIDE_PIXELS)
