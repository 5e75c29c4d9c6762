"""The command line: MindSpeed-MM's syntax, every way to write a list, and errors."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.cli import main
from checkpoint.options import read_lists
from mm.checkpoint.convert import check_target
from mm.errors import UserError
from tests.mm_convert.models import TARGET, SmallModel, files, run, weights

PP = "--cfg.parallel_config"


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "hf"
    SmallModel(2).save(directory)
    return directory


def to_mm(hf: Path, target: Path, **flags: object) -> int:
    default = {"parallel_config__llm_pp_layers": "[[1,2]]", "parallel_config__vit_pp_layers": "[[2,0]]"}
    return run("hf_to_mm", mm_dir=target, hf_config__hf_dir=hf, **{**default, **flags})


def test_every_command(hf, tmp_path, capsys):
    assert to_mm(hf, tmp_path / "mm", parallel_config__tp_size=2) == 0
    target = {"target_parallel_config__llm_pp_layers": "0,3", "target_parallel_config__vit_pp_layers": "[1,1]"}
    assert run("resplit", source_dir=tmp_path / "mm", target_dir=tmp_path / "other", **target) == 0
    assert run("mm_to_hf", mm_dir=tmp_path / "other", save_hf_dir=tmp_path / "back", hf_config__hf_dir=hf) == 0
    assert files(tmp_path / "back") == files(hf)
    assert run("verify", mm_dir=tmp_path / "other", hf_config__hf_dir=hf) == 0
    assert run("show", dir=tmp_path / "other") == 0
    assert "vit_pp_layers [[1, 1]], llm_pp_layers [[0, 3]], tp_size 1" in capsys.readouterr().out


@pytest.mark.parametrize("structure", ["true", "false"])
def test_torch_files_and_both_structures(structure, hf, tmp_path, capsys):
    """Format and structure stay the same unless another is requested."""
    kept = {"common_model_config__enable_canonical_hf_struct": structure}
    assert to_mm(hf, tmp_path / "mm", parallel_config__tp_size=2, save_format="torch", **kept) == 0
    assert run("resplit", source_dir=tmp_path / "mm", target_dir=tmp_path / "other", **TARGET) == 0
    assert [path.name for path in (tmp_path / "other/release/mp_rank_00").iterdir()] == ["model_optim_rng.pt"]
    (tensors,) = weights(tmp_path / "other").values()
    apart = "model/text_decoder.decoder.layers.0.self_attention.q_proj.weight"
    assert (apart in tensors) == (structure == "true")
    opposite = {"common_model_config__enable_canonical_hf_struct": "false" if structure == "true" else "true"}
    back = {"save_hf_dir": tmp_path / "back", "hf_config__hf_dir": hf}
    assert run("mm_to_hf", mm_dir=tmp_path / "other", **back, **opposite) == 2
    assert "enable_canonical_hf_struct says" in capsys.readouterr().err
    assert run("resplit", source_dir=tmp_path / "other", target_dir=tmp_path / "third", save_format="safetensors",
               **TARGET, **opposite) == 0
    assert run("show", dir=tmp_path / "third") == 0
    kind = "fused" if structure == "true" else "canonical"
    assert f"release, safetensors files, {kind} structure" in capsys.readouterr().out
    assert run("mm_to_hf", mm_dir=tmp_path / "third", **back) == 0
    assert files(tmp_path / "back") == files(hf)


def test_diff(hf, tmp_path, capsys):
    assert to_mm(hf, tmp_path / "mm", parallel_config__tp_size=2, save_format="torch") == 0
    assert run("diff", source_dir=hf, target_dir=tmp_path / "mm") == 0
    copy = Path(shutil.copytree(hf, tmp_path / "hf"))
    rewrite(copy, lambda tensors: tensors[min(tensors)].view(torch.int16)[(0,) * tensors[min(tensors)].dim()].add_(1))
    name = min(load_file(min(copy.glob("*.safetensors"))))
    capsys.readouterr()
    assert run("diff", source_dir=tmp_path / "mm", target_dir=copy) == 1
    assert name in capsys.readouterr().out
    assert run("diff", source_dir=tmp_path / "mm", target_dir=tmp_path / "none") == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_whole_encoder(hf, tmp_path, capsys):
    """Each tensor-parallel rank holds the whole ViT and projector; it converts to other layouts and back."""
    assert to_mm(hf, tmp_path / "whole", parallel_config__tp_size=2,
                 parallel_config__encoder_placement="tensor_ranks") == 0
    held = weights(tmp_path / "whole")
    shared = [(file, name) for file in held if "rank_00" in file for name in held[file] if "image_encoder." in name]
    assert shared and all(torch.equal(held[file][name], held[file.replace("rank_00", "rank_01")][name])
                          for file, name in shared)
    assert run("show", dir=tmp_path / "whole") == 0
    assert "tp_size 2, encoder_placement tensor_ranks" in capsys.readouterr().out
    assert run("verify", mm_dir=tmp_path / "whole", hf_config__hf_dir=hf) == 0
    assert run("diff", source_dir=tmp_path / "whole", target_dir=hf) == 0
    two = {**TARGET, "target_parallel_config__tp_size": 2}
    assert run("resplit", source_dir=tmp_path / "whole", target_dir=tmp_path / "cut", **two) == 0
    assert run("resplit", source_dir=tmp_path / "cut", target_dir=tmp_path / "again", **two,
               target_parallel_config__encoder_placement="tensor_ranks") == 0
    assert run("mm_to_hf", mm_dir=tmp_path / "again", save_hf_dir=tmp_path / "back", hf_config__hf_dir=hf) == 0
    assert files(tmp_path / "back") == files(hf)
    assert to_mm(hf, tmp_path / "no", parallel_config__tp_size=2, parallel_config__vit_tp_size=1) == 2
    assert "for a ViT that is not cut, give --cfg.parallel_config.encoder_placement tensor_ranks" in (
        capsys.readouterr().err)


def test_vit_only(hf, tmp_path, capsys):
    assert to_mm(hf, tmp_path / "mm", save_vit_only="true") == 0
    names = {name for tensors in weights(tmp_path / "mm").values() for name in tensors}
    assert names and all(name.startswith("image_encoder.") for name in names)
    assert "image_encoder.projector.layernorm.weight" in names
    assert run("verify", mm_dir=tmp_path / "mm") == 0
    assert run("mm_to_hf", mm_dir=tmp_path / "mm", save_hf_dir=tmp_path / "back", hf_config__hf_dir=hf) == 2
    assert "holds ViT and projector only" in capsys.readouterr().err
    assert run("resplit", source_dir=tmp_path / "mm", target_dir=tmp_path / "other", **TARGET) == 0
    (whole,) = weights(tmp_path / "other").values()
    assert len(whole) == len(names)


@pytest.mark.parametrize("text, expected", [
    ("[12,16]", ((12, 16),)), ("[[12,16]]", ((12, 16),)), ("12,16", ((12, 16),)), ("12, 16", ((12, 16),)),
    ("28", ((28,),)), ("[[0,0,1],[4,4,4]]", ((0, 0, 1), (4, 4, 4))),
])  # fmt: skip
def test_lists(text, expected):
    assert read_lists(text) == expected


@pytest.mark.parametrize("text", ["[[12,16]", "[12", "", "a,b", "12;16", "[1.5]", "[]", "[[1],2]", "null", "true",
                                  "[true]"])  # fmt: skip
def test_invalid_lists(text):
    with pytest.raises(ValueError):
        read_lists(text)


def test_a_file_of_settings(hf, tmp_path, capsys):
    """Also an object for a whole section."""
    lists = {"llm_pp_layers": [1, 2], "vit_pp_layers": [[2, 0]]}
    cfg = {"mm_dir": str(tmp_path / "mm"), "hf_config": {"hf_dir": str(hf)}, "parallel_config": lists}
    (tmp_path / "run.json").write_text(json.dumps({"cfg": cfg}))
    command = ["Qwen2_5_VLConverter", "hf_to_mm"]
    assert main([*command, "--config", str(tmp_path / "run.json"), "--cfg.dry_run=true"]) == 0
    assert "Nothing was written" in capsys.readouterr().out and not (tmp_path / "mm").exists()
    words = ["--cfg.mm_dir", str(tmp_path / "mm"), f"--cfg.hf_config.hf_dir={hf}", PP, json.dumps(lists)]
    assert main([*command, *words]) == 0
    assert main([*command, "--config", str(tmp_path / "run.json")]) == 0
    assert "is already identical" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "wrong"), [
    ("show", "'show' is not a command of mm-convert; expected Qwen2_5_VLConverter"),
    ("Qwen2_5_VLConvertor hf_to_mm", "'Qwen2_5_VLConvertor' is not a command of mm-convert (did you mean"),
    ("Qwen2_5_VLConverter hf_to_m", "'hf_to_m' is not a command of mm-convert Qwen2_5_VLConverter (did you mean 'hf_"),
    ("Qwen2_5_VLConverter hf_to_mm --cfg.hf_config.hf_dri=x", "(did you mean '--cfg.hf_config.hf_dir'?)"),
    ("Qwen2_5_VLConverter resplit --cfg.target_paralel_config.tp_size 2",
     "(did you mean '--cfg.target_parallel_config.tp_size'?)"),
    ("Qwen2_5_VLConverter verify --cfg.mm_dir x --cfg.parallel_config.tp_size 2",
     "--cfg.parallel_config.llm_pp_layers is missing"),
    ("Qwen2_5_VLConverter hf_to_mm", "--cfg.hf_config.hf_dir is missing: directory to convert"),
    ("Qwen2_5_VLConverter hf_to_mm --cfg.save_vit_only", "--cfg.save_vit_only has no value; expected write ViT"),
    ("Qwen2_5_VLConverter hf_to_mm_dcp", "--load reads the Hugging Face directory itself"),
    ("Qwen2_5_VLConverter hf_to_mm_ldt", "hf_to_mm places the layers freely"),
    ("GenericDCPConverter hf_to_dcp", "is for checkpoints of MindSpeed-MM's FSDP2 trainer"),
])
def test_wrong_command_lines(words, wrong, capsys):
    assert main(words.split()) == 2
    assert wrong in capsys.readouterr().err


BAD_FLAGS = {
    "sum": ({"parallel_config__llm_pp_layers": "[1,3]"}, f"{PP}.llm_pp_layers is [1, 3], which sums to 4"),
    "length": ({"parallel_config__llm_pp_layers": "[1,1,1]"}, "both need one entry per pipeline stage"),
    "negative": ({"parallel_config__vit_pp_layers": "[3,-1]"}, f"{PP}.vit_pp_layers[1] is -1"),
    "order": ({"parallel_config__vit_pp_layers": "[0,2]"}, "an LLM layer cannot come before the last ViT layer"),
    "bracket": ({"parallel_config__vit_pp_layers": "[[2,0]"}, "expected layers per pipeline stage such as [12,16]"),
    "ragged": ({"parallel_config__vit_pp_layers": "[[2],[0,0]]"}, "the same number of stages"),
    "tp_size 0": ({"parallel_config__tp_size": 0}, f"{PP}.tp_size is 0"),
    "tp_size 4": ({"parallel_config__tp_size": 4}, "the model's 2 key/value heads"),
    "vit_tp_size": ({"parallel_config__vit_tp_size": 2}, f"{PP}.vit_tp_size is 2; expected 0 or tp_size = 1"),
    "workers": ({"num_workers": -1}, "--cfg.num_workers is -1"),
}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags(name, hf, tmp_path, capsys):
    flags, message = BAD_FLAGS[name]
    assert to_mm(hf, tmp_path / "mm", **flags) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def rewrite(directory: Path, change) -> None:
    """Change the tensors of the first shard."""
    path = min(directory.glob("*.safetensors"))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(("damage", "message"), [
    (lambda hf: min(hf.glob("*.safetensors")).unlink(), "lacks 1 of the 2 shards"),
    (lambda hf: rewrite(hf, lambda t: t.update({min(t): torch.zeros(3)})), "has shape [3]"),
], ids=["shard", "shape"])  # fmt: skip
def test_bad_sources(damage, message, hf, tmp_path, capsys):
    copy = Path(shutil.copytree(hf, tmp_path / "hf"))
    damage(copy)
    assert to_mm(copy, tmp_path / "mm") == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_bad_targets(hf, tmp_path, capsys):
    copy = Path(shutil.copytree(hf, tmp_path / "hf"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for target, flags, message in (
        (copy, {}, "is, contains or is inside the source"),
        (copy / "mm", {}, "is, contains or is inside the source"),
        (tmp_path, {"overwrite": "true"}, "is, contains or is inside the source"),
        (tmp_path / "full", {}, "is not empty; give another one, or --cfg.overwrite true"),
        (tmp_path / "full", {"overwrite": "true"}, "was not written by this command"),
        (tmp_path / "file", {}, "is a file"),
        (tmp_path / "file" / "mm", {}, "/file is a file; give a directory"),
    ):
        before = files(tmp_path)
        assert to_mm(copy, target, **flags) == 2
        assert message in capsys.readouterr().err
        assert files(tmp_path) == before


def test_a_target_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"/new needs 1,000,000,000,000,000,000 bytes, but only [0-9,]+ are free; make"):
        check_target(tmp_path / "new", 10**18)
    assert files(tmp_path) == {}


@pytest.mark.parametrize("save_format", ["safetensors", "torch"])
def test_a_repeated_command_reports_that_nothing_is_left_to_do(hf, tmp_path, capsys, save_format):
    """If one byte of the target differs, in a tensor or a header, the command is rejected as usual."""
    back = {"mm_dir": tmp_path / "mm", "save_hf_dir": tmp_path / "back", "hf_config__hf_dir": hf}
    assert to_mm(hf, tmp_path / "mm", save_format=save_format) == run("mm_to_hf", **back) == 0
    before = files(tmp_path)
    capsys.readouterr()
    assert to_mm(hf, tmp_path / "mm", save_format=save_format) == run("mm_to_hf", **back) == 0
    assert capsys.readouterr().out.count("is already identical; nothing was written.") == 2
    assert files(tmp_path) == before
    assert to_mm(hf, tmp_path / "mm", save_format=save_format, parallel_config__tp_size=2) == 2
    shard, exported = next((tmp_path / "mm").rglob("mp_rank_00_001/*")), next((tmp_path / "back").glob("*.safetensors"))
    for path in (shard, exported):
        content = path.read_bytes()
        for place in (12, len(content) // 2):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            again = run("mm_to_hf", **back) if path is exported else to_mm(hf, tmp_path / "mm", save_format=save_format)
            assert again == 2
        path.write_bytes(content)


def test_overwrite(hf, tmp_path):
    assert to_mm(hf, tmp_path / "mm") == 0
    assert to_mm(hf, tmp_path / "mm", parallel_config__tp_size=2) == 2
    assert to_mm(hf, tmp_path / "mm", overwrite="true", parallel_config__tp_size=2) == 0
    assert len(list((tmp_path / "mm" / "release").iterdir())) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["mm"]


def test_bad_directories_of_ranks(hf, tmp_path, capsys):
    mm = tmp_path / "mm"
    assert to_mm(hf, mm, parallel_config__tp_size=2) == 0
    back = {"mm_dir": mm, "save_hf_dir": tmp_path / "back", "hf_config__hf_dir": hf}

    lists = {"parallel_config__llm_pp_layers": "[0,3]", "parallel_config__vit_pp_layers": "[2,0]"}
    assert run("mm_to_hf", **back, **lists) == 2
    printed = capsys.readouterr().err
    assert "llm_pp_layers [[0, 3]], tp_size 1" in printed and "llm_pp_layers [[1, 2]], tp_size 2" in printed

    shutil.copytree(mm / "release" / "mp_rank_00_000", mm / "release" / "mp_rank_02_000")
    assert run("mm_to_hf", **back) == 2
    assert "mp_rank_02_000/model.safetensors does not belong to any rank" in capsys.readouterr().err
    shutil.rmtree(mm / "release" / "mp_rank_02_000")

    whole = tmp_path / "whole"
    assert to_mm(hf, whole) == 0
    shutil.copy(whole / "release/mp_rank_00_000/model.safetensors", mm / "release/mp_rank_00_000/model.safetensors")
    assert run("mm_to_hf", **back) == 2
    assert "Was it cut for another TP size?" in capsys.readouterr().err
    shutil.rmtree(mm / "release" / "mp_rank_00_000")
    assert run("mm_to_hf", **back) == 2
    assert "mp_rank_00_000/model.safetensors is missing" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()
