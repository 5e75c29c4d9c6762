"""Errors of the loaded directory name the flag or key that gave it."""

import json
import shutil
from pathlib import Path

import pytest

from checkpoint.cli import main as convert
from demo.tiny_checkpoint import build
from mm.config.generate import load_asking
from mm.errors import UserError
from mm.generation.source import find


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A copy of ``hf`` whose config.json has another activation."""
    build(tmp_path / "hf", ["One? 1", "Two and three and four? They are of no use here."], seed=0)
    shutil.copytree(tmp_path / "hf", tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "gelu"}))
    return tmp_path / "other"


def test_a_refused_config_json_names_its_flag_or_key(other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, wrong = str(other.parent / "hf"), f"{other / 'config.json'}: hidden_act is 'gelu'; expected 'silu'"
    with pytest.raises(UserError) as caught:
        find(load_asking(["--load", hf, "--model-name-or-path", str(other), "--prompt", "One?"], {}))
    assert str(caught.value).startswith(f"--model-name-or-path: {wrong}")
    with pytest.raises(UserError) as caught:
        find(load_asking(["--load", str(other), "--model-name-or-path", hf, "--prompt", "One?"], {}))
    assert str(caught.value).startswith(f"--load: {wrong}")
    assert convert(["Qwen2_5_VLConverter", "hf_to_mm", "--cfg.mm_dir", str(other.parent / "mm"),
                    "--cfg.hf_config.hf_dir", str(other), "--cfg.parallel_config.llm_pp_layers", "[[4]]",
                    "--cfg.parallel_config.vit_pp_layers", "[[4]]", "--cfg.parallel_config.tp_size", "1"]) == 2
    assert f"--cfg.hf_config.hf_dir: {wrong}" in capsys.readouterr().err
