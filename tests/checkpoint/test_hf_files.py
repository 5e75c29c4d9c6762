"""Bad directories are rejected with a message that names the file and the fix; an LLM comes from another directory."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mm.checkpoint.hf import HFDirectory
from mm.errors import UserError
from tests.mm_convert.models import SmallModel, run, weights
from tests.saved_hf import as_single_file, save, weight_files


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("saved"), tied=False)


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """A copy of ``saved`` to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit_index(directory: Path, edit) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def first_shard(directory: Path) -> Path:
    return min(directory.glob("*.safetensors"))


def lfs(directory: Path) -> None:
    first_shard(directory).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n")


def config_lfs(directory: Path) -> None:
    (directory / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n")


def missing_shard(directory: Path) -> None:
    first_shard(directory).unlink()


def missing_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").unlink()


def absent_tensor(directory: Path) -> None:
    edit_index(directory, lambda weight_map: weight_map.update({"model.ghost": first_shard(directory).name}))


def unlisted_tensor(directory: Path) -> None:
    edit_index(directory, lambda weight_map: weight_map.pop("model.norm.weight"))


def truncated(directory: Path) -> None:
    data = first_shard(directory).read_bytes()
    first_shard(directory).write_bytes(data[:-7])


def edited_config(**changes):
    def damage(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def broken_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def adapter(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
    (directory / "adapter_config.json").write_text("{}")
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(1)}, directory / "adapter_model.safetensors")


def only_pickle(directory: Path) -> None:
    for name in weight_files(directory):
        (directory / name).unlink()
    (directory / "training_args.bin").rename(directory / "pytorch_model.bin")


def nothing(directory: Path) -> None:
    only_pickle(directory)
    (directory / "pytorch_model.bin").unlink()


def both(directory: Path) -> None:
    shutil.copy(first_shard(directory), directory / "model.safetensors")


def twice(directory: Path) -> None:
    tensors = as_single_file(directory)
    tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, directory / "model.safetensors")


def quantized(directory: Path) -> None:
    tensors = as_single_file(directory)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(("damage", "says"), [
    (lfs, r"model-00001-of-\d+\.safetensors is a Git-LFS pointer.*git lfs pull"),
    (config_lfs, r"config\.json is a Git-LFS pointer.*git lfs pull"),
    (missing_shard, r"lacks 1 of the \d+ shards .*model-00001-of-\d+\.safetensors\. .*finish it"),
    (missing_index, r"no model\.safetensors\.index\.json; the download was probably interrupted"),
    (absent_tensor, r"index\.json and model-00001-of-\d+\.safetensors do not list the same tensors: .* model\.ghost"),
    (unlisted_tensor, r"do not list the same tensors: only one has model\.norm\.weight"),
    (truncated, r"model-00001-of-\d+\.safetensors has \d+ bytes, but its header describes \d+; download it again"),
    (edited_config(model_type="qwen3_vl"), r"config\.json has model_type 'qwen3_vl'; expected 'qwen2_5_vl': "
     r"this version trains Qwen2\.5-VL, neither Qwen2-VL nor Qwen3-VL"),
    (edited_config(quantization_config={}), r"quantization_config.*unquantized model"),
    (broken_config, r"config\.json is not valid JSON"),
    (no_config, r"config\.json does not exist"),
    (adapter, r"LoRA adapter, not a model; give .*base model"),
    (only_pickle, r"only as a pickle.*save_pretrained"),
    (nothing, r"holds no weights; expected model\.safetensors"),
    (both, r"holds both .* remove the one"),
    (twice, r"holds model\.language_model\.norm\.weight .* holds model\.norm\.weight: the same weight twice|"
     r"holds model\.norm\.weight .* holds model\.language_model\.norm\.weight: the same weight twice"),
    (quantized, r"model\.norm\.weight has dtype I8; expected one of"),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_bad_directories_are_refused(copy, damage, says):
    damage(copy)
    with pytest.raises(UserError, match=says) as refused:
        HFDirectory.open(copy)
    assert str(copy) in str(refused.value)


def test_a_path_that_is_not_a_directory_is_rejected(tmp_path):
    with pytest.raises(UserError, match="is not a directory"):
        HFDirectory.open(tmp_path / "absent")


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
