"""The commands of docs/generate.md and docs/evaluate.md do what the text says, on the tiny model."""

import json
import re
import subprocess
from pathlib import Path

from mm.config.evaluate import EVALUATE
from mm.config.generate import GENERATE
from tests.files import ROOT
from tests.launch import warm_python

GENERATE_TEXT, EVALUATE_TEXT = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in (
    "generate.md", "evaluate.md"))


def run_commands_of(text: str, tmp_path: Path) -> str:
    """All commands of a page, one after another in one shell and with forks of the warm process as Python.

    Returns what they print.
    """
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.symlink_to(warm_python())
    done = subprocess.run(["bash", "-e"], input="".join(blocks), cwd=tmp_path, text=True, capture_output=True,
                          timeout=600, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_commands_run(tmp_path: Path):
    text = f"{GENERATE_TEXT}\n```bash\nrm -r runs/tiny/hf\n```\n{EVALUATE_TEXT}"
    assert "own.jsonl" in run_commands_of(text, tmp_path)
    (answer,) = (tmp_path / "runs/tiny/answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(answer)["question"] == "What is in the picture?"
    assert json.loads((tmp_path / "runs/tiny/scores/scores.json").read_text())["overall"]["num_questions"] == 1


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][\w-]*", text)) - {"--nproc_per_node", "--export-hf"}


def test_every_flag_is_there():
    said = flags_in(GENERATE_TEXT)
    assert said <= GENERATE.flags.keys(), said - GENERATE.flags.keys()
    assert GENERATE.flags.keys() - said == {"--vit-qkv-order", "--distributed-timeout-minutes", "--image-min-pixels"}
    said = flags_in(EVALUATE_TEXT)
    assert said <= EVALUATE.flags.keys(), said - EVALUATE.flags.keys()
    assert EVALUATE.flags.keys() - GENERATE.flags.keys() - said == {"--max-questions"}
