"""The pages for users of other trainers say what the tables in the code say, and name nothing that is not there.

``python -m tests.test_coming_from`` writes the tables into the page.
"""

import re
from collections.abc import Iterator, Mapping

import pytest

from mm.config.command_line import flag_name
from mm.config.data import DataConfig
from mm.config.evaluate import EVALUATE, EvaluationConfig
from mm.config.flags import Arguments
from mm.config.foreign import DATA_KEYS, FLAGS, MODEL_KEYS, Fixed, FlagRow, SameAs
from mm.config.generate import GENERATE
from mm.config.inference import INFERENCE_KEYS
from mm.config.model import ModelConfig
from mm.config.schema import expected, fields_of, settings_of
from tests.files import ROOT

PAGE = ROOT / "docs" / "coming-from-mindspeed-mm.md"
PAGES = sorted((ROOT / "docs").glob("coming-from-*.md"))


def said(row: FlagRow) -> str:
    """What the page says of a word that has no field."""
    if isinstance(row, SameAs):
        return f"supported: the same as `{row.flag}{f' {row.value}' if row.value else ''}`"
    if not isinstance(row, Fixed):
        return f"no effect: {row.why}"
    supported = [str(one).lower() if isinstance(one, bool) else one for one in row.supported if one is not None]
    values = ", ".join(f"`{one}`" for one in supported)
    taken = f"only {values}: " if values else "only null: " if row.supported else "refused: "
    return taken + row.why


def flags_table() -> str:
    words = {flag_name(name): f"supported: {field.description}" for name, field in fields_of(Arguments).items()}
    words |= {flag: said(row) for flag, row in FLAGS.items()}
    return table("flag", words)


def keys_table() -> str:
    words: dict[str, str] = {}
    for cls, tables in ((ModelConfig, MODEL_KEYS), (DataConfig, DATA_KEYS)):
        for _, paths, field in settings_of(cls):
            words |= dict.fromkeys(paths, f"supported: {expected(field)}")
        for where, rows in tables.items():
            words |= {f"{where}.{key}".lstrip("."): said(row) for key, row in rows.items()}
    return table("key", words)


def inference_table() -> str:
    """What an ``inference_*.json`` or ``evaluate_*.json`` has beside the model."""
    words = {path: f"supported: {expected(field)}" for name, (path, *_), field in settings_of(EvaluationConfig)
             if not name.startswith("model.")}
    for where, rows in INFERENCE_KEYS.items():
        words |= {f"{where}.{key}".lstrip("."): said(row) for key, row in rows.items()
                  if key not in MODEL_KEYS.get(where, {})}
    return table("key", words)


def table(name: str, words: Mapping[str, str]) -> str:
    rows = "".join(f"| `{word}` | {what.replace('|', '/')} |\n" for word, what in sorted(words.items()))
    return f"| {name} | here |\n| --- | --- |\n{rows}"


def tables() -> Iterator[tuple[str, str]]:
    yield "flags", flags_table()
    yield "keys", keys_table()
    yield "inference keys", inference_table()


def rewritten(text: str) -> str:
    for name, content in tables():
        whole = f"<!-- {name} -->\n{content}<!-- end -->"
        text = re.sub(rf"<!-- {name} -->\n.*?<!-- end -->", whole, text, flags=re.DOTALL)
    return text


def test_the_tables_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == rewritten(text), "run python -m tests.test_coming_from"
    assert text.count("<!-- end -->") == 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_word_of_ours_exists(page) -> None:
    """In the right columns of the tables: flags, and keys of the JSON files."""
    known = {flag_name(name) for name in fields_of(Arguments)} | FLAGS.keys()
    known |= GENERATE.fields.keys() | EVALUATE.fields.keys()
    keys = {part for _, paths, _ in (*settings_of(EvaluationConfig), *settings_of(DataConfig))
            for path in paths for part in path.split(".")}
    keys |= {part for tables in (INFERENCE_KEYS, DATA_KEYS) for path in tables for part in path.split(".")}
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    ours = re.findall(r"`([^`]+)`", " ".join(right for _, right in rows))
    assert {word for one in ours for word in re.findall(r"--[a-z][\w-]*", one)} <= known
    names = {one for one in ours if re.fullmatch(r"[a-z]+_[a-z_]+", one)}
    assert names <= keys, names - keys
    assert len(rows) > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
