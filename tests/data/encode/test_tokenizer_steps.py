"""Tokenizers that could take any time or memory are refused before they are loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mm.data.encode.chat import load_tokenizer
from mm.errors import UserError

ENDLESS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.parametrize(("changes", "message"), [
    ({"pre_tokenizer": ENDLESS}, r'its pre_tokenizer has {"type": "Split", "pattern": {"Regex": "\(a\+\)\+\$"'),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, ENDLESS]}}, "its pre_tokenizer"),
    ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 60}}, "its normalizer has .*Replace"),
    ({"decoder": DOUBLING}, "its decoder has"),
    ({"model": {"type": "Unigram", "vocab": []}}, 'its model is "Unigram"; expected "BPE"'),
    ({"normalizer": "NFC"}, 'its normalizer has "NFC"'),
])  # fmt: skip
def test_parts_that_may_never_end_are_refused(
    hf_directory: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    directory = Path(shutil.copytree(hf_directory, tmp_path / "hf"))
    content = json.loads((directory / "tokenizer.json").read_text()) | changes
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"tokenizer.json: {message}"):
        load_tokenizer(str(directory))
    # under this name transformers would prefer it
    (directory / "tokenizer.json").rename(directory / "tokenizer.5.0.0.json")
    with pytest.raises(UserError, match=rf"tokenizer.5.0.0.json: {message}"):
        load_tokenizer(str(directory))


def test_long_templates_are_refused(hf_directory: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(hf_directory, tmp_path / "hf"))
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "x" * 100_001}))
    with pytest.raises(UserError, match="its chat template has 100,001 characters, above the limit of 100,000"):
        load_tokenizer(str(directory))
