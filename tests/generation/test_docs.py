"""The commands of docs/generate.md do what the text says, on the tiny model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from mm.config.generate import GENERATE
from tests.launch import ROOT

TEXT = (ROOT / "docs" / "generate.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)


def test_the_commands_run(tmp_path: Path):
    """All of them, one after another in one shell."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f"#!/bin/bash\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    done = subprocess.run(["bash", "-e"], input="".join(BLOCKS), cwd=tmp_path, text=True, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    (answer,) = (tmp_path / "runs/tiny/answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(answer)["question"] == "What is to be seen?"


def test_every_flag_is_there():
    ours = set(re.findall(r"--[a-z][\w-]*", TEXT)) - {"--nproc_per_node", "--served-model-name", "--export-hf",
                                                      "--tensor-parallel-size"}
    assert ours <= GENERATE.fields.keys(), ours - GENERATE.fields.keys()
    unsaid = GENERATE.fields.keys() - ours
    assert unsaid == {"--vit-qkv-order", "--distributed-timeout-minutes", "--image-min-pixels"}
