"""The documentation builds as a site, in both languages, with broken links and anchors as errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.files import ROOT

PAGES = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"reference", "CHANGELOG", "CONTRIBUTING", "SECURITY"}


@pytest.mark.parametrize(("config", "words"), [
    ("mkdocs.yml", ("tensor-parallel", "imports only from")), ("mkdocs.zh.yml", ("流水线", "张量并行"))])
def test_it_builds(config: str, words: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", str(ROOT / "site" / config),
               "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert {path.parent.name for path in tmp_path.glob("*/index.html")} == PAGES
    assert (tmp_path / "pipeline_step.svg").exists()
    index = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    texts = [entry["text"].replace("\u200b", "") for entry in index["docs"]]  # it stands between Chinese words
    assert all(any(word in text for text in texts) for word in words)
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "https://fonts" not in home and ".md)" not in home  # nothing is fetched, and no link is left as text
    assert "--tensor-model-parallel-size" in (tmp_path / "reference" / "index.html").read_text(encoding="utf-8")
