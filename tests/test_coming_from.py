"""The pages for users of other trainers name no flag and no key that is not there."""

import re

import pytest

from mm.config.args import Arguments
from mm.config.command_line import flag_name
from mm.config.data import DataConfig
from mm.config.evaluate import EVALUATE, EvaluationConfig
from mm.config.generate import GENERATE, INFERENCE_KEYS
from mm.config.mindspeed import DATA_KEYS, FLAGS
from mm.config.parse import fields_of, settings_of
from tests.files import ROOT

PAGES = sorted((ROOT / "docs").glob("coming-from-*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_word_of_ours_exists(page) -> None:
    """In the right columns of the tables: flags, and keys of the JSON files."""
    known = {flag_name(name) for name in fields_of(Arguments)} | FLAGS.keys()
    known |= GENERATE.flags.keys() | EVALUATE.flags.keys()
    keys = {part for _, paths, _ in (*settings_of(EvaluationConfig), *settings_of(DataConfig))
            for path in paths for part in path.split(".")}
    keys |= {part for tables in (INFERENCE_KEYS, DATA_KEYS) for path in tables for part in path.split(".")}
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    ours = re.findall(r"`([^`]+)`", " ".join(right for _, right in rows))
    assert {word for one in ours for word in re.findall(r"--[a-z][\w-]*", one)} <= known
    names = {one for one in ours if re.fullmatch(r"[a-z]+_[a-z_]+", one)}
    assert names <= keys, names - keys
    assert len(rows) > 10
