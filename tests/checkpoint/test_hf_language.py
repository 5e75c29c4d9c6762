"""ViT and projector of one model with the LLM of another."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.mm_convert.models import SmallModel, run, weights

LISTS = {"parallel_config__llm_pp_layers": "[3]", "parallel_config__vit_pp_layers": "[2]"}
SMALL = SmallModel(2, num_shards=1)


@pytest.fixture
def directories(tmp_path) -> tuple[Path, Path]:
    """A whole model, and a text-only one with other weights."""
    SMALL.save(tmp_path / "hf")
    SMALL.save(tmp_path / "llm")
    tensors = load_file(tmp_path / "llm" / "model.safetensors")
    text = {name: tensor + 1 for name, tensor in tensors.items() if not name.startswith("visual.")}
    save_file(text, tmp_path / "llm" / "model.safetensors")
    config = {key: value for key, value in SMALL.config.items() if key != "vision_config"}
    (tmp_path / "llm" / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    return tmp_path / "hf", tmp_path / "llm"


@pytest.mark.parametrize("flag", ["llm_hf_config__hf_dir", "common_model_config__llm_hf_dir"])
def test_the_llm_of_another_directory(flag, directories, tmp_path):
    hf, llm = directories
    assert run("hf_to_mm", mm_dir=tmp_path / "mm", hf_config__hf_dir=hf, **{flag: llm}, **LISTS) == 0
    assert run("mm_to_hf", mm_dir=tmp_path / "mm", hf_config__hf_dir=hf, save_hf_dir=tmp_path / "back") == 0
    (found,) = weights(tmp_path / "back").values()
    expected = load_file(hf / "model.safetensors") | load_file(llm / "model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_an_llm_that_does_not_fit(directories, tmp_path, capsys):
    hf, llm = directories
    flags = {"mm_dir": tmp_path / "mm", "hf_config__hf_dir": hf, "llm_hf_config__hf_dir": llm, **LISTS}
    tensors = load_file(llm / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors | {"lm_head.weight": torch.zeros(1, 1)}, llm / "model.safetensors")
    assert run("hf_to_mm", **flags) == 2
    printed = capsys.readouterr().err
    assert f"{llm} lacks the tensor model.norm.weight" in printed and "lm_head.weight has shape [1, 1]" in printed

    other = replace(SMALL, language_ffn=9).config
    (llm / "config.json").write_text(json.dumps(other))
    assert run("hf_to_mm", **flags) == 2
    assert "intermediate_size is 9, but the whole model has 7" in capsys.readouterr().err
    (llm / "config.json").unlink()
    assert run("hf_to_mm", **flags) == 2
    assert "config.json does not exist" in capsys.readouterr().err
    assert not (tmp_path / "mm").exists()
