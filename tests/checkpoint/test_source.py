"""Training checkpoints and directories by MindSpeed-MM as sources: equal bits, recognized models and orders, errors."""

import dataclasses
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.checkpoint import convert
from mm.checkpoint.hf_config import model_from_hf
from mm.checkpoint.manifest import MANIFEST_FILE
from mm.checkpoint.mindspeed import MindSpeedDirectory
from mm.checkpoint.mindspeed_layout import Format, Layout, Storage
from mm.checkpoint.source import QkvOrder, open_source, open_to_train
from mm.checkpoint.training_manifest import TrainingDirectory
from mm.config.model import ModelConfig, read_model
from mm.errors import UserError
from mm.families.qwen2_5_vl import published_config
from mm.weights.table import model_weights
from tests.files import EXAMPLES
from tests.mm_convert.models import TARGET, SmallModel, files, layouts, run, small_models, write_sparse_mm
from tests.mm_convert.test_diff import save_training

LISTS = {"target_parallel_config__llm_pp_layers": "[1,2]", "target_parallel_config__vit_pp_layers": "[2,0]"}


@st.composite
def cases(draw) -> tuple[SmallModel, int, Layout]:
    small = draw(small_models())
    sizes = [size for size in (1, 2, 4, 8) if small.max_tp_size % size == 0]
    return small, draw(st.sampled_from(sizes)), draw(layouts(small))


@settings(max_examples=20, deadline=None)
@given(cases())
def test_a_training_checkpoint_gives_the_same_bits(case):
    small, tp_size, layout = case
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tensors = small.save(root / "hf")
        save_training(small, tensors, root / "trained", tp_size)
        convert.mm_to_hf(root / "trained", root / "hf", root / "back").run(num_workers=1)
        assert files(root / "back") == files(root / "hf")
        convert.resplit(root / "trained", root / "resplit", None, layout).run(num_workers=1)
        convert.hf_to_mm(root / "hf", root / "direct", layout).run(num_workers=1)
        resplit, direct = files(root / "resplit"), files(root / "direct")
        assert resplit.pop("manifest.json") and direct.pop("manifest.json")  # they name different sources
        assert resplit == direct


@pytest.fixture
def trained(tmp_path) -> Path:
    small = SmallModel(2)
    save_training(small, small.save(tmp_path / "hf"), tmp_path / "trained", 2)
    return tmp_path / "trained"


def test_every_command_reads_it(trained, tmp_path, capsys):
    hf = {"hf_config__hf_dir": tmp_path / "hf"}
    assert run("show", dir=trained) == 0
    assert "training checkpoint, iteration " in capsys.readouterr().out
    assert run("verify", mm_dir=trained, **hf) == 0
    printed = capsys.readouterr().out
    assert "tensors match manifest.json" in printed and "tensors match those of" in printed
    assert run("diff", source_dir=trained, target_dir=tmp_path / "hf") == 0
    assert run("resplit", source_dir=trained, target_dir=tmp_path / "mm", **LISTS) == 0
    assert run("mm_to_hf", mm_dir=trained, save_hf_dir=tmp_path / "back", **hf) == 0
    assert files(tmp_path / "back") == files(tmp_path / "hf")


def test_damage_is_named(trained, capsys):
    source = open_source(trained)
    stored = source.views[-1].stored
    path = source.path / stored.file
    whole = path.read_bytes()
    path.write_bytes(whole[: stored.offset] + bytes([whole[stored.offset] ^ 1]) + whole[stored.offset + 1 :])
    assert run("verify", mm_dir=trained) == 2
    printed, cure = capsys.readouterr().err, f"use another checkpoint: {trained} has no older one."
    assert f"{path}: {stored.name} is damaged" in printed and cure in printed
    path.write_bytes(whole[:-1])
    assert run("verify", mm_dir=trained) == 2
    assert str(path) in capsys.readouterr().err
    path.unlink()
    assert run("verify", mm_dir=trained) == 2
    assert f"{path} lacks " in capsys.readouterr().err


def test_files_on_another_nodes_disk_are_named(trained, tmp_path, capsys):
    directory = TrainingDirectory.open(trained)
    disks = [{"host": f"node{rank}", "ranks": [rank], "files": [f"rank{rank}.safetensors"]} for rank in range(2)]
    text = dataclasses.replace(directory.manifest, disks=disks).text()
    (directory.path / MANIFEST_FILE).write_text(text)
    (directory.path / "rank1.safetensors").unlink()
    for command in (lambda: run("verify", mm_dir=trained),
                    lambda: run("diff", source_dir=trained, target_dir=tmp_path / "hf"),
                    lambda: run("resplit", source_dir=trained, target_dir=tmp_path / "mm", **LISTS)):
        assert command() == 2
        problem, path = capsys.readouterr().err, directory.path
        assert f"{path} lacks rank1.safetensors: each node saved on its own disk (--save-on-each-node)" in problem
        assert f"`for node in node1; do rsync -a $node:{path}/ {path}/; done`" in problem


def test_invalid_sources_are_rejected(trained):
    wrong = Layout(((1, 1),), ((0, 3),), 2)
    with pytest.raises(UserError, match=r"--flag says .*\[\[1, 1\]\].*was saved with"):
        open_source(trained, layout=wrong, layout_flag="--flag")
    folder = open_source(trained).path
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["tp_size"] = 1
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="is damaged"):
        open_source(trained)


SIZES = ("3b", "7b", "32b", "72b")


def directory_of(model: ModelConfig, tp_size: int, root: Path) -> MindSpeedDirectory:
    """Real headers, without the bytes of the weights."""
    write_sparse_mm(model, tp_size, Storage(), root)
    return MindSpeedDirectory.open(root)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_those_of_the_examples(size):
    """In everything that shapes and heads depend on."""
    example, known = read_model(EXAMPLES / f"model_{size}.json").value, model_from_hf(published_config(size.upper()))
    assert model_weights(known) == model_weights(example)
    placed = dataclasses.replace(known.language, pipeline_num_layers=example.language.pipeline_num_layers,
                                 max_position_embeddings=example.language.max_position_embeddings,
                                 init_method_std=example.language.init_method_std, freeze=example.language.freeze,
                                 recompute=example.language.recompute)
    assert placed == example.language


@pytest.mark.parametrize(("size", "tp_size"), [("3b", 1), ("7b", 4), ("32b", 8), ("72b", 1)])
def test_a_published_model_is_recognized(size, tp_size, tmp_path):
    model = read_model(EXAMPLES / f"model_{size}.json").value
    directory = directory_of(model, tp_size, tmp_path)
    assert open_source(tmp_path).model == directory.layout.place(model_from_hf(published_config(size.upper())))
    assert directory.layout.vision == model.vision.pipeline_num_layers
    assert directory.layout.language == model.language.pipeline_num_layers
    assert directory.layout.tp_size == tp_size


def test_another_vocabulary_is_not(tmp_path):
    model = model_from_hf(published_config("7B"))
    other = dataclasses.replace(model, language=dataclasses.replace(model.language, vocab_size=151660))
    directory_of(other, 1, tmp_path)
    with pytest.raises(UserError, match="no manifest that describes its model"):
        open_source(tmp_path)


SMALL = SmallModel(2)
MODEL = SMALL.model
TWO_STAGES = {tp_size: Layout(((1, 1),), ((0, 3),), tp_size) for tp_size in (1, 2)}


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
