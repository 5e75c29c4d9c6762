"""The commands of docs/generate.md do what the text says, on the tiny model."""

import json
import re
import subprocess
from pathlib import Path

from mm.config.generate import GENERATE
from tests.files import ROOT
from tests.launch import warm_python

TEXT = (ROOT / "docs" / "generate.md").read_text(encoding="utf-8")


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
    assert run_commands_of(TEXT, tmp_path).strip()
    (answer,) = (tmp_path / "runs/tiny/answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(answer)["question"] == "What is in the picture?"


def test_every_flag_is_there():
    ours = set(re.findall(r"--[a-z][\w-]*", TEXT)) - {"--nproc_per_node", "--served-model-name", "--export-hf",
                                                      "--tensor-parallel-size"}
    assert ours <= GENERATE.fields.keys(), ours - GENERATE.fields.keys()
    unsaid = GENERATE.fields.keys() - ours
    assert unsaid == {"--vit-qkv-order", "--distributed-timeout-minutes", "--image-min-pixels"}
