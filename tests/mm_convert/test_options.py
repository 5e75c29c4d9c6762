"""Stated facts about the model must be true, and fields for other models are rejected."""

from pathlib import Path

import pytest

from tests.mm_convert.models import SmallModel, run

LISTS = {"parallel_config__llm_pp_layers": "[3]", "parallel_config__vit_pp_layers": "[2]"}
COMMON = "--cfg.common_model_config"


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "hf"
    SmallModel(2, tied=True).save(directory)
    return directory


def test_true_statements(hf, tmp_path):
    common = {
        "num_key_value_heads": 2, "tie_word_embeddings": "true", "llm_num_layers": 3, "vit_num_layers": 2,
        "new_transformers_weight_key": "false", "num_experts": 0, "audio_num_layers": 0,
    }  # fmt: skip
    stated = {f"common_model_config__{name}": value for name, value in common.items()}
    parallel = {"audio_pp_layers": "[[0]]", "vit_tp_size": 1, "ep_size": 1}
    more = {f"parallel_config__{name}": value for name, value in parallel.items()} | {"trust_remote_code": "true"}
    assert run("hf_to_mm", mm_dir=tmp_path / "mm", hf_config__hf_dir=hf, **LISTS, **stated, **more) == 0


FALSE = {
    "num_key_value_heads": (4, f"{COMMON}.num_key_value_heads is 4, but"),
    "tie_word_embeddings": ("false", f"{COMMON}.tie_word_embeddings is False, but"),
    "llm_num_layers": (28, f"{COMMON}.llm_num_layers is 28, but"),
    "vit_num_layers": (32, f"{COMMON}.vit_num_layers is 32, but"),
    "new_transformers_weight_key": ("true", f"{COMMON}.new_transformers_weight_key is True, but"),
    "num_experts": (8, f"{COMMON}.num_experts is 8; expected 0, because the model has no experts"),
    "audio_num_layers": (1, "the model has no audio encoder"),
    "model_prefix": ("base_model.model.", "only the names of adapters carry a prefix"),
}


@pytest.mark.parametrize("name", FALSE)
def test_false_statements(name, hf, tmp_path, capsys):
    value, message = FALSE[name]
    stated = {f"common_model_config__{name}": value}
    assert run("hf_to_mm", mm_dir=tmp_path / "mm", hf_config__hf_dir=hf, **LISTS, **stated) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "mm").exists()


def test_an_audio_encoder(hf, tmp_path, capsys):
    more = {"parallel_config__audio_pp_layers": "[[4]]"}
    assert run("hf_to_mm", mm_dir=tmp_path / "mm", hf_config__hf_dir=hf, **LISTS, **more) == 2
    assert "the model has no audio encoder" in capsys.readouterr().err


def test_two_directories_of_the_llm(hf, tmp_path, capsys):
    more = {"llm_hf_config__hf_dir": hf, "common_model_config__llm_hf_dir": tmp_path}
    assert run("hf_to_mm", mm_dir=tmp_path / "mm", hf_config__hf_dir=hf, **LISTS, **more) == 2
    assert "give one of them" in capsys.readouterr().err
