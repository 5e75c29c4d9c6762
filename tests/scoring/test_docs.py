"""docs/evaluate.md: its commands run on the tiny model, and it names every flag of its own."""

import json
import re
from pathlib import Path

from mm.config.command_line import flag_name
from mm.config.evaluate import EVALUATE
from mm.config.generate import ModelArguments
from mm.config.schema import fields_of
from tests.files import ROOT
from tests.generation.test_docs import run_commands_of

TEXT = (ROOT / "docs" / "evaluate.md").read_text(encoding="utf-8")


def test_the_commands_run(tmp_path: Path):
    assert "own.jsonl" in run_commands_of(TEXT, tmp_path)
    scores = json.loads((tmp_path / "runs/tiny/scores/scores.json").read_text())
    assert scores["overall"]["num_questions"] == 1


def test_every_flag_is_there():
    said = set(re.findall(r"--[a-z][\w-]*", TEXT)) - {"--nproc_per_node"}
    assert said <= EVALUATE.fields.keys(), said - EVALUATE.fields.keys()
    own = EVALUATE.fields.keys() - {flag_name(name) for name in fields_of(ModelArguments)}
    assert own - said == {"--max-questions"}
