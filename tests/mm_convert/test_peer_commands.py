"""The commands of MindSpeed-MM's README for Qwen2.5-VL, verbatim, on models of the real sizes.

The weights are sparse files, so that planning, reading and checking of the real shapes is all there is to do.
"""

import shlex
from pathlib import Path

import pytest

from checkpoint.cli import main
from mm.checkpoint.hf_config import model_from_hf
from mm.checkpoint.mindspeed_layout import Format, Layout, Storage, Structure
from mm.config.model import ModelConfig
from mm.families.qwen2_5_vl import published_config
from tests.mm_convert.models import write_sparse_hf, write_sparse_mm

NAME = "Qwen2.5-VL-{}-Instruct"
HF_TO_MM = {
    "3B": ("[[36]]", "[[32]]", 1),
    "7B": ("[[12,16]]", "[[32,0]]", 1),
    "32B": ("[[1,9,9,9,9,9,9,9]]", "[[32,0,0,0,0,0,0,0]]", 2),
    "72B": ("[[6,11,11,11,11,11,11,8]]", "[[32,0,0,0,0,0,0,0]]", 2),
}
PARAMETERS = {"3B": 3_754_622_976, "7B": 8_292_166_656, "32B": 33_452_718_336, "72B": 73_410_777_344}


def run(text: str) -> int:
    """Run a command line, split as by the shell, as a dry run."""
    return main([*shlex.split(text.replace("\\\n", " "))[1:], "--cfg.dry_run", "true"])


def place(size: str, vision: tuple, language: tuple, tp_size: int) -> ModelConfig:
    return Layout((vision,), (language,), tp_size).place(model_from_hf(published_config(size)))


def planned_bytes(capsys: pytest.CaptureFixture) -> int:
    """The bytes in the last line of a dry run."""
    summary = capsys.readouterr().out.splitlines()[-1]
    assert summary.endswith("Nothing was written.")
    return int(summary.split(" tensors, ")[1].split(" bytes")[0].replace(",", ""))


@pytest.mark.parametrize("more", ["", "--cfg.common_model_config.enable_canonical_hf_struct true",
                                  "--cfg.save_format torch"])
@pytest.mark.parametrize("size", HF_TO_MM)
def test_hf_to_mm(size, more, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_sparse_hf(published_config(size), Path("ckpt/hf_path") / NAME.format(size))
    llm, vit, tp_size = HF_TO_MM[size]
    assert run(f"""mm-convert  Qwen2_5_VLConverter hf_to_mm \\
      --cfg.mm_dir "ckpt/mm_path/{NAME.format(size)}" \\
      --cfg.hf_config.hf_dir "ckpt/hf_path/{NAME.format(size)}" \\
      --cfg.parallel_config.llm_pp_layers {llm} \\
      --cfg.parallel_config.vit_pp_layers {vit} \\
      --cfg.parallel_config.tp_size {tp_size} {more}""") == 0
    assert 2 * PARAMETERS[size] < planned_bytes(capsys) < 2.02 * PARAMETERS[size]
    assert not Path("ckpt/mm_path").exists()


@pytest.mark.parametrize("structure", Structure)
def test_mm_to_hf(structure, tmp_path, monkeypatch, capsys):
    """From a directory by MindSpeed-MM, which has no manifest."""
    monkeypatch.chdir(tmp_path)
    name = NAME.format("7B")
    write_sparse_hf(published_config("7B"), Path("ckpt/hf_path") / name)
    model = place("7B", (32, 0, 0, 0), (1, 10, 10, 7), 1)
    write_sparse_mm(model, 1, Storage(Format.TORCH, structure), Path("ckpt/mm_path") / name)
    command = f"""mm-convert  Qwen2_5_VLConverter mm_to_hf \\
      --cfg.save_hf_dir "ckpt/mm_to_hf/{name}" \\
      --cfg.mm_dir "ckpt/mm_path/{name}" \\
      --cfg.hf_config.hf_dir "ckpt/hf_path/{name}" \\
      --cfg.parallel_config.llm_pp_layers [1,10,10,7] \\
      --cfg.parallel_config.vit_pp_layers [32,0,0,0] \\
      --cfg.parallel_config.tp_size 1"""
    flag = " --cfg.common_model_config.enable_canonical_hf_struct true"
    assert run(command + (flag if structure is Structure.CANONICAL else "")) == 0
    hf_file = Path("ckpt/hf_path") / name / "model.safetensors"
    assert planned_bytes(capsys) == hf_file.stat().st_size
    if structure is Structure.FUSED:
        assert run(command + flag) == 2
        assert "enable_canonical_hf_struct says canonical" in capsys.readouterr().err


STORAGES = [Storage(Format.TORCH), Storage(Format.TORCH, Structure.CANONICAL), Storage()]


@pytest.mark.parametrize("kind", STORAGES, ids=str)
def test_resplit(kind, tmp_path, monkeypatch, capsys):
    """The command has no Hugging Face directory: the model is recognized by its shapes."""
    monkeypatch.chdir(tmp_path)
    name = NAME.format("7B")
    write_sparse_mm(place("7B", (32, 0), (12, 16), 1), 1, kind, Path("ckpt/mm_path") / name)
    assert run(f"""mm-convert  Qwen2_5_VLConverter resplit \\
      --cfg.source_dir "ckpt/mm_path/{name}" \\
      --cfg.target_dir "ckpt/mm_resplit_pp/{name}" \\
      --cfg.source_parallel_config.llm_pp_layers [12,16] \\
      --cfg.source_parallel_config.vit_pp_layers [32,0] \\
      --cfg.source_parallel_config.tp_size 1 \\
      --cfg.target_parallel_config.llm_pp_layers [1,10,10,7] \\
      --cfg.target_parallel_config.vit_pp_layers [32,0,0,0] \\
      --cfg.target_parallel_config.tp_size 2""") == 0
    assert 2 * PARAMETERS["7B"] < planned_bytes(capsys) < 2.01 * PARAMETERS["7B"]
