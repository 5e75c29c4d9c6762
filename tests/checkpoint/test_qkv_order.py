"""Directories of MindSpeed-MM 2.2.0 and 2.3.0, which store the ViT's qkv as a whole [Q; K; V], are read correctly."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mm.checkpoint import convert
from mm.checkpoint.mindspeed_layout import Format, Layout, Storage
from mm.checkpoint.source import QkvOrder, open_to_train
from mm.weights.table import model_weights
from tests.mm_convert.models import SmallModel, files, run

SMALL = SmallModel(2)
MODEL = SMALL.model
TWO_STAGES = {tp_size: Layout(((1, 1),), ((0, 3),), tp_size) for tp_size in (1, 2)}
TARGET = {"target_parallel_config__llm_pp_layers": "[3]", "target_parallel_config__vit_pp_layers": "[2]"}


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("qkv") / "hf"
    SMALL.save(directory)
    return directory


def converted(hf: Path, target: Path, tp_size: int, is_whole: bool, change: float = 0.0) -> Path:
    """As a converter of MindSpeed-MM writes it: torch files without a manifest; ``change`` simulates training."""
    storage = Storage(Format.TORCH, whole_vision_qkv=is_whole)
    convert.hf_to_mm(hf, target, TWO_STAGES[tp_size], storage).run(num_workers=1)
    (target / "manifest.json").unlink()
    for path in target.rglob("*.pt") if change else ():
        content = torch.load(path, weights_only=True)
        for name, tensor in content["model"].items():
            if "linear_qkv" in name:
                tensor += change * tensor.float().std() * torch.randn(tensor.shape)
        torch.save(content, path)
    return target


def qkv_rows(directory: Path, tp_size: int) -> list[torch.Tensor]:
    """The stored qkv of the first layer on every rank."""
    name = "image_encoder.encoder.blocks.layers.0.self_attention.linear_qkv.weight"
    paths = [directory / f"release/mp_rank_{rank:02d}_000/model_optim_rng.pt" for rank in range(tp_size)]
    return [torch.load(path, weights_only=True)["model"][name] for path in paths]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_files_equal_those_of_mindspeeds_converter(hf, tmp_path, tp_size):
    found = torch.cat(qkv_rows(converted(hf, tmp_path / "mm", tp_size, is_whole=True), tp_size))
    weight = next(one for one in model_weights(MODEL) if "linear_qkv" in one.name)
    source = open_to_train(hf, MODEL)
    assert torch.equal(found, source.read(replace(weight, fusion=type(weight.fusion).COPY), 1, 0, found.dtype))


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_hugging_face_directory_shows_the_order(hf, tmp_path, capsys, tp_size, is_whole):
    mm = converted(hf, tmp_path / "mm", tp_size, is_whole)
    assert run("mm_to_hf", mm_dir=mm, save_hf_dir=tmp_path / "back", hf_config__hf_dir=hf) == 0
    assert files(tmp_path / "back") == files(hf)
    assert ("MindSpeed-MM 2.2.0 and 2.3.0" in capsys.readouterr().out) is is_whole
    assert run("resplit", source_dir=mm, target_dir=tmp_path / "one", hf_config__hf_dir=hf, **TARGET) == 0
    assert run("verify", mm_dir=tmp_path / "one", hf_config__hf_dir=hf) == 0
    source = open_to_train(mm, MODEL, qkv=QkvOrder(base=hf, flag="--vit-qkv-order"))
    expected = open_to_train(hf, MODEL)
    for weight in model_weights(MODEL):
        assert torch.equal(source.read(weight, 1, 0, torch.float32), expected.read(weight, 1, 0, torch.float32))
    assert bool(source.notes) is is_whole


@pytest.mark.parametrize("is_whole", [False, True])
def test_the_order_is_recognized_after_some_training(hf, tmp_path, capsys, is_whole):
    mm = converted(hf, tmp_path / "mm", 2, is_whole, change=0.05)
    assert run("mm_to_hf", mm_dir=mm, save_hf_dir=tmp_path / "back", hf_config__hf_dir=hf) == 0
    assert ("2.2.0 and 2.3.0" in capsys.readouterr().out) is is_whole


def test_without_a_base_the_order_is_stated_or_noted(hf, tmp_path, capsys):
    mm = converted(hf, tmp_path / "mm", 2, is_whole=True)
    empty = Path(shutil.copytree(hf, tmp_path / "empty"))
    for path in empty.glob("*.safetensors*"):
        path.unlink()
    for number, stated in enumerate((None, "per_head", "whole")):
        flags = {} if stated is None else {"common_model_config__vit_qkv_order": stated}
        back = tmp_path / f"back{number}"
        assert run("resplit", source_dir=mm, target_dir=back, hf_config__hf_dir=empty, **TARGET, **flags) == 0
        printed = capsys.readouterr().out
        assert ("give --cfg.common_model_config.vit_qkv_order whole" in printed) is (stated is None)
        assert (run("verify", mm_dir=back, hf_config__hf_dir=hf) == 0) is (stated == "whole")
        capsys.readouterr()


def test_another_model_shows_nothing(hf, tmp_path):
    mm = converted(hf, tmp_path / "mm", 1, is_whole=True, change=50.0)
    (note,) = open_to_train(mm, MODEL, qkv=QkvOrder(base=hf, flag="--vit-qkv-order")).notes
    assert "give --vit-qkv-order whole" in note


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_a_qkv_that_is_missing_is_named(hf, tmp_path, capsys, ranks):
    mm = converted(hf, tmp_path / "mm", 2, is_whole=True)
    name = "image_encoder.encoder.blocks.layers.0.self_attention.linear_qkv.weight"
    for rank in ranks:
        path = mm / f"release/mp_rank_{rank:02d}_000/model_optim_rng.pt"
        content = torch.load(path, weights_only=True)
        del content["model"][name]
        torch.save(content, path)
    assert run("mm_to_hf", mm_dir=mm, save_hf_dir=tmp_path / "back", hf_config__hf_dir=hf) == 2
    assert capsys.readouterr().err.count(f"lacks the tensor model/{name}") == len(ranks)
