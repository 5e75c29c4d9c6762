"""Adapters in files: PEFT directories, MindSpeed-MM's layout, and merged models."""

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint.cli import main
from mm.checkpoint import directories
from mm.checkpoint.adapters import (
    base_to_name,
    check_base,
    holds_adapters,
    merge_into_base,
    mindspeed_to_peft,
    model_crc32,
    open_adapters,
    open_base,
    open_beside,
    peft_to_mindspeed,
)
from mm.checkpoint.hf import HFDirectory
from mm.checkpoint.mindspeed_layout import Format, Layout
from mm.checkpoint.peft import CONFIG_FILE, PREFIX, WEIGHTS_FILE, AdapterDirectory
from mm.checkpoint.source import open_source
from mm.config.lora import LoraConfig
from mm.config.model import ModelConfig
from mm.errors import UserError
from mm.weights.trained import model_adapters
from tests.mm_convert.models import files
from tests.peft_oracle import peft_model, peft_tensors
from tests.tiny import TOKENS_PER_SECOND, hf_model, hf_tensors, our_config

SETTINGS = LoraConfig(("all-linear",), r=3, alpha=5.0, rank_pattern=(("k_proj", 2),), alpha_pattern=(("qkv", 9.0),))
LAYOUT = Layout(((3, 1), (0, 0)), ((0, 0), (1, 3)), 2)


def model_of(settings: LoraConfig = SETTINGS) -> ModelConfig:
    model = our_config(((4,),), ((4,),))
    return replace(model, lora=settings, vision=replace(model.vision, tokens_per_second=TOKENS_PER_SECOND))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``, a model, and ``adapter``, saved by PEFT."""
    directory = tmp_path_factory.mktemp("adapters")
    hf_model().save_pretrained(directory / "base")
    peft = peft_model(hf_model(), model_of())
    peft.peft_config["default"].base_model_name_or_path = str(directory / "base")
    peft.save_pretrained(directory / "adapter")
    return directory


@pytest.fixture
def broken(folder: Path, tmp_path: Path) -> Path:
    """A copy of the adapter to change."""
    shutil.copytree(folder / "adapter", tmp_path / "broken")
    return tmp_path / "broken"


def change(directory: Path, **keys: object) -> None:
    config = json.loads((directory / CONFIG_FILE).read_text()) | keys
    (directory / CONFIG_FILE).write_text(json.dumps(config))


def assert_same(one: Path, other: Path) -> None:
    """Assert that both hold the same tensors under the same names."""
    left, right = load_file(one / WEIGHTS_FILE), load_file(other / WEIGHTS_FILE)
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def asked(directory: Path) -> dict[str, Tensor]:
    """The adapters that PEFT reads from a directory, by the names of the weight table."""
    peft = PeftModel.from_pretrained(hf_model(), directory)
    return {name: one for name, one in peft_tensors(peft).items() if ".lora_" in name}


def test_a_peft_adapter_is_read_exactly(folder: Path) -> None:
    assert holds_adapters(folder / "adapter") and not holds_adapters(folder / "base")
    source = open_adapters(folder / "adapter", model_of())
    expected = {name: one for name, one in peft_tensors(peft_model(hf_model(), model_of())).items() if ".lora_" in name}
    adapters = model_adapters(model_of())
    assert len(expected) == 2 * len(adapters) == 2 * 50
    for adapter in adapters:
        for weight in (adapter.a, adapter.b):
            assert torch.equal(source.read_hf(weight, 0), expected[weight.hf_names[0]])
    said = AdapterDirectory.open(folder / "adapter").model(model_of().base)
    assert [(one.layer, one.rank, one.scale) for one in model_adapters(said)] == [
        (one.layer, one.rank, one.scale) for one in adapters]


@pytest.mark.parametrize("format", Format)
def test_mindspeeds_layout_and_back(format: Format, folder: Path, tmp_path: Path) -> None:
    peft_to_mindspeed(folder / "adapter", tmp_path / "mm", LAYOUT, format).run(num_workers=1)
    base = os.path.relpath(folder / "base")
    mindspeed_to_peft(tmp_path / "mm", tmp_path / "back", None, base, None).run(num_workers=1)
    assert_same(tmp_path / "back", folder / "adapter")
    assert AdapterDirectory.open(tmp_path / "back").base_name == str(folder / "base")
    expected = asked(folder / "adapter")
    assert all(torch.equal(one, expected[name]) for name, one in asked(tmp_path / "back").items())
    if format is Format.SAFETENSORS:
        merged = [tmp_path / f"merged_{name}" for name in ("mm", "adapter")]
        for adapters, target in zip((tmp_path / "mm", folder / "adapter"), merged, strict=True):
            merge_into_base(adapters, folder / "base", target).run()
        assert files(merged[0]) == files(merged[1])
        first = load_file(tmp_path / "mm" / "release" / "mp_rank_01_001" / "model1.safetensors")
        names = {name for name in first if ".layers.0." in name}
        layers = [*(f"self_attention.{one}" for one in ("q_proj", "k_proj", "v_proj", "linear_proj")),
                  *(f"mlp.{one}" for one in ("gate_proj", "up_proj", "linear_fc2"))]
        assert names == {f"text_decoder.decoder.layers.0.{layer}.lora_{letter}.default.weight"
                         for letter in "AB" for layer in layers}
        assert first["text_decoder.decoder.layers.0.self_attention.q_proj.lora_B.default.weight"].shape == (24, 3)
    with pytest.raises(UserError, match=r"holds adapters \(LoRA\) in MindSpeed-MM's layout, not a model"):
        open_source(tmp_path / "mm")


def test_files_by_mindspeed_need_alpha_and_model(folder: Path, tmp_path: Path) -> None:
    settings = LoraConfig(("q_proj", "o_proj", "qkv"), r=3, alpha=5.0)  # the ViT has a linear_proj, too
    peft_model(hf_model(), model_of(settings)).save_pretrained(tmp_path / "adapter")
    base = str(folder / "base")
    peft_to_mindspeed(tmp_path / "adapter", tmp_path / "mm", LAYOUT, Format.TORCH, base).run(num_workers=1)
    (tmp_path / "mm" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"no manifest .* give --cfg.hf_config.hf_dir, .*parallel_config and .*alpha"):
        mindspeed_to_peft(tmp_path / "mm", tmp_path / "back", None, None, None)
    mindspeed_to_peft(tmp_path / "mm", tmp_path / "back", LAYOUT, base, 5.0).run(num_workers=1)
    assert_same(tmp_path / "back", tmp_path / "adapter")
    with pytest.raises(UserError) as caught:
        mindspeed_to_peft(tmp_path / "mm", tmp_path / "other", replace(LAYOUT, vision=((4, 0), (0, 0))),
                           str(folder / "base"), 5.0)
    problem = caught.value.problems[-1]
    assert problem.startswith(f"{tmp_path / 'mm'} was read as the adapters of visual.blocks.0.attn.qkv, ")
    path = min((tmp_path / "mm").rglob("*.pt"))
    content = torch.load(path, weights_only=True)
    name = next(name for name in content["model0"] if ".lora_A." in name)
    for shape in ((), (0, 8)):
        torch.save(content | {"model0": content["model0"] | {name: torch.zeros(shape)}}, path)
        with pytest.raises(UserError, match=r"lora_A"):
            mindspeed_to_peft(tmp_path / "mm", tmp_path / "other", LAYOUT, str(folder / "base"), 5.0)


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_run_reads_mindspeeds_layout(is_stated: bool, folder: Path, tmp_path: Path) -> None:
    """With a manifest from any layout; without one, as the adapters of the run on its layout."""
    peft_to_mindspeed(folder / "adapter", tmp_path / "mm", LAYOUT, Format.TORCH).run(num_workers=1)
    if not is_stated:
        (tmp_path / "mm" / "manifest.json").unlink()
    assert holds_adapters(tmp_path / "mm")
    model, wanted = LAYOUT.place(model_of()), open_adapters(folder / "adapter", model_of())
    source = open_adapters(tmp_path / "mm", model, LAYOUT)
    for adapter in model_adapters(model):
        for weight in (adapter.a, adapter.b):
            assert torch.equal(source.read_hf(weight, 0), wanted.read_hf(weight, 0))
    other = replace(model, lora=replace(SETTINGS, target_modules=("q_proj",)))
    with pytest.raises(UserError) as caught:
        open_adapters(tmp_path / "mm", other, LAYOUT)
    assert ("give the --lora-* flags" if is_stated else "was read as the adapters of q_proj on") in str(caught.value)
    if is_stated:
        assert open_beside(tmp_path / "mm", model).layout == LAYOUT
    else:
        with pytest.raises(UserError, match="make a PEFT directory with mm-convert lora_mm_to_hf"):
            open_beside(tmp_path / "mm", model)


def test_a_merge_equals_pefts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["Qwen2_5_VLConverter", "merge_lora", "--cfg.lora_dir", str(folder / "adapter"), "--cfg.hf_config.hf_dir",
             str(folder / "base"), "--cfg.save_hf_dir", str(tmp_path / "merged")]
    assert main([*words, "--cfg.dry_run", "true"]) == 0 and not (tmp_path / "merged").exists()
    assert main(words) == 0
    expected = hf_tensors(PeftModel.from_pretrained(hf_model(), folder / "adapter").merge_and_unload())
    merged = {name: stored for name, stored in load_file(tmp_path / "merged" / "model.safetensors").items()}
    directory = HFDirectory.open(tmp_path / "merged")
    assert directory.tensors.keys() == expected.keys()
    for name, stored in directory.tensors.items():
        torch.testing.assert_close(merged[stored.name], expected[name], rtol=0, atol=1e-6)  # measured 6e-8
    capsys.readouterr()
    assert main(words) == 0 and "is already identical; nothing was written." in capsys.readouterr().out
    merged["lm_head.weight"][0, 0] += 1
    save_file(merged, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    assert main(words) == 2 and "is not empty" in capsys.readouterr().err


def test_a_merge_resumes_after_a_failure(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    hf_model().save_pretrained(tmp_path / "base", max_shard_size="100KB")
    merge_into_base(folder / "adapter", tmp_path / "base", tmp_path / "whole").run()
    merge = merge_into_base(folder / "adapter", tmp_path / "base", tmp_path / "merged")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(directories, "commit", fail)
        with pytest.raises(UserError, match=r"run the same command again, which continues"):
            merge.run()
    merge.run()
    assert re.search("an earlier run finished [2-9] of [2-9] files", capsys.readouterr().out)
    assert files(tmp_path / "merged") == files(tmp_path / "whole")


def test_the_commands_accept_mindspeeds_flags(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    common = ["--cfg.common_model_config.enable_canonical_hf_struct", "true", "--cfg.parallel_config.llm_pp_layers",
              "[[0,4]]", "--cfg.parallel_config.vit_pp_layers", "[[3,1]]", "--cfg.mm_dir", str(tmp_path / "mm")]
    assert main(["Qwen2_5_VLConverter", "lora_hf_to_mm", *common, "--cfg.hf_config.hf_dir", str(folder / "adapter"),
                 "--cfg.common_model_config.model_prefix", "base_model.model."]) == 0
    common[3], common[5] = "[0,4]", "[3,1]"
    assert main(["Qwen2_5_VLConverter", "lora_mm_to_hf", *common, "--cfg.save_hf_dir", str(tmp_path / "hf")]) == 0
    assert_same(tmp_path / "hf", folder / "adapter")
    common[1] = "false"
    assert main(["Qwen2_5_VLConverter", "lora_mm_to_hf", *common, "--cfg.save_hf_dir", str(tmp_path / "hf")]) == 2
    assert "adapters always have separate q, k, v and gate, up" in capsys.readouterr().err


REFUSALS = {
    "another rank": (replace(SETTINGS, r=4), "needs [4, 32]; does the adapter belong to another base model"),
    "another alpha": (replace(SETTINGS, alpha=6.0), "but this run by 2; give the same --lora-alpha"),
    "fewer layers": (replace(SETTINGS, target_modules=("q_proj",)), "which the settings of this run do not train"),
    "more layers": (replace(SETTINGS, target_modules=("all-linear", "patch_embed.proj")), "did --lora-target-modules"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_adapter_with_other_settings_is_rejected(name: str, folder: Path) -> None:
    settings, what = REFUSALS[name]
    with pytest.raises(UserError) as caught:
        open_adapters(folder / "adapter", model_of(settings))
    assert len(caught.value.problems) == 1 and what in caught.value.problems[0]


@pytest.mark.parametrize(("name", "what"), [
    ("model.layers.9.self_attn.q_proj.lora_A.weight", "for which the given base model has no layer"),
    (None, "without which the others are of no use"),
])
def test_a_tensor_too_many_or_too_few_is_reported_without_a_trainers_flags(
    name: str | None, what: str, broken: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    tensors = load_file(broken / WEIGHTS_FILE)
    if name is None:
        del tensors[min(one for one in tensors if one.endswith("lora_B.weight"))]
    else:
        tensors[f"{PREFIX}{name}"] = torch.zeros(2, 2)
    save_file(tensors, broken / WEIGHTS_FILE)
    assert main(["Qwen2_5_VLConverter", "merge_lora", "--cfg.lora_dir", str(broken), "--cfg.hf_config.hf_dir",
                 str(folder / "base"), "--cfg.save_hf_dir", str(tmp_path / "merged")]) == 2
    said = capsys.readouterr().err
    assert what in said and "--lora" not in said and "--load" not in said


def test_an_adapter_of_another_base_model_is_rejected(folder: Path, tmp_path: Path) -> None:
    base = model_of()
    wide = replace(base, language=replace(base.language, ffn_hidden_size=80))
    with pytest.raises(UserError, match=r"has shape \[72, 3\], but this model needs \[80, 3\]; .*base model"):
        open_adapters(folder / "adapter", wide)
    hf_model(seed=5).save_pretrained(tmp_path / "other")
    found, other = (open_base(path, base) for path in (folder / "base", tmp_path / "other"))
    assert model_crc32(found) != model_crc32(other)
    peft_to_mindspeed(folder / "adapter", tmp_path / "mm", LAYOUT, Format.SAFETENSORS)
    adapters = replace(open_adapters(folder / "adapter", base), base_crc32=model_crc32(found))
    assert check_base(adapters, found, "--base") == model_crc32(found)
    with pytest.raises(UserError, match="holds adapters of another base model than"):
        check_base(adapters, other, "--base")


def test_copies_of_a_model_have_the_same_checksum(folder: Path, tmp_path: Path) -> None:
    hf_model().to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    assert main(["Qwen2_5_VLConverter", "hf_to_mm", "--cfg.mm_dir", str(tmp_path / "mm"), "--cfg.hf_config.hf_dir",
                 str(folder / "base"), "--cfg.parallel_config.llm_pp_layers", "[[1,3]]",
                 "--cfg.parallel_config.vit_pp_layers", "[[4,0]]", "--cfg.parallel_config.tp_size", "2"]) == 0
    found = {model_crc32(open_base(path, model_of())) for path in (folder / "base", tmp_path / "bf16", tmp_path / "mm")}
    assert len(found) == 1
    base = {"path": str(tmp_path / "mm"), "crc32": found.pop()}  # PEFT cannot load MindSpeed-MM's layout
    hf_model(seed=5).save_pretrained(tmp_path / "other")
    named = [base_to_name(base, os.path.relpath(path), model_of())
             for path in (folder / "base", tmp_path / "other", tmp_path)]
    assert named == [str(folder / "base"), base["path"], base["path"]]
    assert base_to_name(None, str(folder / "base"), model_of()) is None


def test_broken_directories_are_reported(broken: Path) -> None:
    def problem_text() -> str:
        with pytest.raises(UserError) as caught:
            AdapterDirectory.open(broken)
        return str(caught.value)

    change(broken, use_dora=True, bias="all")
    assert "use_dora is True; expected" in problem_text() and "bias is 'all'; expected" in problem_text()
    (broken / CONFIG_FILE).write_text("{")
    assert "is not valid JSON (Expecting" in problem_text()
    (broken / CONFIG_FILE).write_text("{}")
    (broken / WEIGHTS_FILE).rename(broken / "adapter_model.bin")
    assert f"no {WEIGHTS_FILE}; save one that has only" in problem_text()
    save_file({"x": torch.zeros(2, dtype=torch.int8)}, broken / WEIGHTS_FILE)
    assert "Quantized weights are not supported" in problem_text()


def test_modules_that_peft_fully_trained_are_reported_with_the_flag_to_continue_training(
    folder: Path, broken: Path
) -> None:
    base, whole = load_file(folder / "base/model.safetensors"), ("norm.weight", "embed_tokens.weight")
    saved = {f"{PREFIX}{name}": one for name, one in base.items() if name.endswith(whole) and "layers" not in name}
    assert len(saved) == 2
    save_file(load_file(broken / WEIGHTS_FILE) | saved, broken / WEIGHTS_FILE)
    with pytest.raises(UserError) as caught:
        open_adapters(broken, model_of())
    (problem,) = caught.value.problems
    assert f"{broken / WEIGHTS_FILE} holds model.embed_tokens.weight, which was fully trained along with" in problem
    assert problem.endswith(" (and 1 more tensors)")
    flag = problem.partition("give --trainable-modules ")[2].partition(" to continue")[0]
    source = open_adapters(broken, replace(model_of(), trainable_modules=tuple(flag.split())))
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= source.dtypes.keys()
    save_file(load_file(broken / WEIGHTS_FILE) | {f"{PREFIX}score.weight": torch.zeros(2)}, broken / WEIGHTS_FILE)
    with pytest.raises(UserError, match=r"score\.weight, which was fully trained .*is no whole weight of the model"):
        open_adapters(broken, replace(model_of(), trainable_modules=tuple(flag.split())))


@pytest.mark.parametrize("keys", [{"lora_alpha": "many"}, {"r": -1}, {"alpha_pattern": {"(": 2}}])
def test_an_invalid_number_is_reported(broken: Path, keys: dict[str, Any]) -> None:
    change(broken, **keys)
    with pytest.raises(UserError, match=rf"{CONFIG_FILE} has an invalid ") as caught:
        open_beside(broken, model_of())
    assert len(caught.value.problems) == 1
