"""Weights read for any layout from a directory of any other, and detection of damage."""

import argparse
import dataclasses
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mm.checkpoint import convert
from mm.checkpoint.hf_config import model_from_hf, stored_problems
from mm.checkpoint.mindspeed import MindSpeedDirectory
from mm.checkpoint.mindspeed_layout import Format, Layout, Storage, Structure
from mm.checkpoint.source import open_source, open_to_train
from mm.config.model import ModelConfig, read_model
from mm.errors import UserError
from mm.families.qwen2_5_vl import published_config
from mm.weights.fuse import fuse, shard
from mm.weights.table import EMBEDDING_NAME, model_weights, stage_weights
from tests.files import EXAMPLES, flip
from tests.mm_convert.models import SmallModel, layouts, small_models, write_sparse_mm

SMALL, LAYOUT = SmallModel(2, vision_ffn=5), Layout(((2, 0),), ((1, 2),), 2)
STORAGES = [Storage(format, structure) for format in Format for structure in Structure]


@st.composite
def cases(draw) -> tuple[SmallModel, Layout, Layout, Storage, bool, int]:
    small = draw(small_models())
    block_bytes = draw(st.sampled_from((64, 1 << 20)))
    storage, has_manifest = draw(st.sampled_from(STORAGES)), draw(st.booleans())
    return small, draw(layouts(small)), draw(layouts(small)), storage, has_manifest, block_bytes


@settings(max_examples=12, deadline=None)
@given(cases())
def test_any_layout_from_any_other(case):
    small, stored, wanted, storage, has_manifest, block_bytes = case
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tensors = small.save(root / "hf")
        convert.hf_to_mm(root / "hf", root / "mm", stored, storage).run(num_workers=1)
        if not has_manifest:
            (root / "mm" / "manifest.json").unlink()
        model = wanted.place(small.model)
        source = open_source(root / "mm", model=model)
        assert source.has_checksums is has_manifest
        source.check()
        placement = model.placement()
        for spec in placement.slots:
            for weight in stage_weights(model, spec):
                whole = fuse(weight, [tensors[hf_name] for hf_name in weight.hf_names])
                for tp_rank in range(wanted.tp_size):
                    expected = shard(weight, whole, wanted.tp_size, tp_rank)
                    for dtype in (torch.bfloat16, torch.float32):
                        found = source.read(weight, wanted.tp_size, tp_rank, dtype, block_bytes)
                        assert found.dtype == dtype and torch.equal(found, expected.to(dtype))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("made")
    SMALL.save(root / "hf")
    for storage in STORAGES:
        name = f"{storage.format.value}-{storage.structure.value}"
        convert.hf_to_mm(root / "hf", root / name, LAYOUT, storage).run(num_workers=1)
    convert.hf_to_mm(root / "hf", root / "vit", LAYOUT, Storage(vit_only=True)).run(num_workers=1)
    return root


@pytest.fixture(params=["safetensors-fused", "torch-canonical"])
def copy(request, made, tmp_path) -> Path:
    return Path(shutil.copytree(made / request.param, tmp_path / "mm"))


def read_all(directory: Path, model: ModelConfig = SMALL.model, needs_optimizer: bool = True) -> None:
    """Read as one rank, after the checks that run once for all ranks."""
    source = open_to_train(directory, model, needs_optimizer)
    if not source.has_checksums:
        source.check()
    placement = model.placement()
    for weight in stage_weights(model, placement[0]):
        source.read(weight, 1, 0, torch.float32)


def flip_in(directory: Path, name: str, tp_rank: int, place: int = 0) -> Path:
    """Flip one bit of a tensor; return its file."""
    opened = MindSpeedDirectory.open(directory)
    for file, tensors in opened.contents.items():
        stored = next((one for key, one in tensors.items() if key.endswith(name)), None)
        if stored is not None and Path(file).parent.name.startswith(f"mp_rank_{tp_rank:02d}"):
            flip(directory / file, stored.offset + place % stored.num_bytes)
            return directory / file
    raise AssertionError(name)


def test_without_a_manifest_copies_are_compared_and_padding_is_zero(copy):
    (copy / "manifest.json").unlink()
    read_all(copy)
    path = flip_in(copy, "final_layernorm.weight", 1)
    with pytest.raises(UserError, match=f"{path}: .*final_layernorm.weight differs from .*mp_rank_00_001"):
        read_all(copy)
    flip_in(copy, "final_layernorm.weight", 1)
    read_all(copy)
    path = flip_in(copy, "image_encoder.encoder.blocks.layers.1.mlp.linear_fc2.weight", 1, -2)  # last column: 5 of 6
    with pytest.raises(UserError, match=f"{path}: the padding of .*linear_fc2.weight is not zero"):
        read_all(copy)


def test_layers_that_the_peers_converter_loses(made, tmp_path):
    """Since 26.0.0 it omits the end of an LLM whose list begins with 0."""
    layout = Layout(((2, 0, 0),), ((0, 1, 2),), 1)
    convert.hf_to_mm(made / "hf", tmp_path / "mm", layout).run(num_workers=1)
    (tmp_path / "mm" / "manifest.json").unlink()
    last = tmp_path / "mm" / "release" / "mp_rank_00_002" / "model.safetensors"
    lost = ("decoder.layers.1.", "final_layernorm", "output_layer")
    save_file({name: tensor for name, tensor in load_file(last).items() if not any(one in name for one in lost)}, last)
    with pytest.raises(UserError, match="converter loses the last LLM layers") as raised:
        read_all(tmp_path / "mm")
    assert "llm_pp_layers is [0, 1, 1], which sums to 2; expected num_layers = 3" in raised.value.problems[0]


def test_directories_of_the_peers_hetero_parallel_are_named(made, tmp_path):
    """Each of its files holds the whole encoder."""
    convert.hf_to_mm(made / "hf", tmp_path / "mm", Layout(((2, 0),), ((0, 3),), 1)).run(num_workers=1)
    (tmp_path / "mm" / "manifest.json").unlink()
    first, last = (tmp_path / f"mm/release/mp_rank_00_{stage:03}/model.safetensors" for stage in range(2))
    vision = {name: tensor for name, tensor in load_file(first).items() if name.startswith("image_encoder.")}
    save_file({**load_file(last), **vision}, last)
    with pytest.raises(UserError, match="every stage holds the whole ViT, as with MindSpeed-MM's --hetero-parallel"):
        read_all(tmp_path / "mm")


def test_another_model_is_reported_with_every_field(copy):
    language = dataclasses.replace(SMALL.model.language, rope_theta=10.0, layernorm_epsilon=0.5)
    with pytest.raises(UserError) as raised:
        read_all(copy, dataclasses.replace(SMALL.model, language=language))
    text = "\n".join(raised.value.problems)
    assert "text_decoder.rope_theta = 1000000.0, but the model JSON says 10.0" in text
    assert "text_decoder.layernorm_epsilon" in text
    longer = dataclasses.replace(SMALL.model.language, max_position_embeddings=7, freeze=True,
                                 freeze_layers="0")  # fmt: skip
    read_all(copy, dataclasses.replace(  # these change no weight
        SMALL.model, language=longer, freeze_modules=("norm",), trainable_modules=("bias",)))


def test_the_vit_alone_is_not_a_model(made):
    with pytest.raises(UserError, match="holds no LLM"):
        read_all(made / "vit")


def test_a_checkpoint_that_mindspeed_mm_trained(made, tmp_path):
    """Its files hold more than weights, which is ignored; continuing from them needs a flag."""
    trained = Path(shutil.copytree(made / "torch-fused", tmp_path / "trained"))
    (trained / "manifest.json").unlink()
    (trained / "release").rename(trained / "iter_0000100")
    (trained / "latest_checkpointed_iteration.txt").write_text("100")
    for path in trained.rglob("*.pt"):
        content = torch.load(path, weights_only=True)
        content["model"] = {name: torch.nn.Parameter(tensor) for name, tensor in content["model"].items()}
        content["model"]["text_decoder.decoder.layers.0.mlp.linear_fc1._extra_state"] = None
        args = argparse.Namespace(lr=1.0, consumed_train_samples=4800)
        more = {"iteration": 100, "args": args, "rng_state": [{"torch": torch.get_rng_state()}],
                "optimizer": {"param_groups": []}, "num_floating_point_operations_so_far": 1.0}
        torch.save(content | more, path)
        torch.save({"state": torch.zeros(3)}, path.with_name("distrib_optim.pt"))
    with pytest.raises(UserError, match=r"training checkpoint of MindSpeed-MM \(iteration 100\).*add --no-load-optim"):
        read_all(trained)
    read_all(trained, needs_optimizer=False)
    source = open_to_train(trained, SMALL.model, needs_optimizer=False)
    assert (source.iteration, source.consumed_samples) == (100, 4800)
    convert.mm_to_hf(trained, made / "hf", tmp_path / "back").run(num_workers=1)
    for file in (made / "hf").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "back" / file.name).read_bytes()


def problem_of(directory: Path) -> str:
    with pytest.raises(UserError) as raised:
        read_all(directory)
    (problem,) = raised.value.problems
    return problem


def test_a_dtype_that_differs_from_the_manifest(made, tmp_path):
    """The checksum covers only the bytes, so it is the same."""
    path = Path(shutil.copytree(made / "safetensors-fused", tmp_path / "mm"))
    file, name = path / "release/mp_rank_00_001/model.safetensors", "text_decoder.decoder.final_layernorm.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].view(torch.float16)}, file)
    assert problem_of(path).startswith(f"{file}: {name} is float16, but manifest.json says bfloat16; convert")


def test_a_tensor_in_two_dtypes_is_named(made, tmp_path):
    directory = Path(shutil.copytree(made / "safetensors-fused", tmp_path / "mm"))
    (directory / "manifest.json").unlink()
    name = "text_decoder.decoder.layers.0.self_attention.linear_qkv.weight"
    for path in directory.glob("release/mp_rank_01*/*.safetensors"):
        tensors = load_file(path)
        save_file({**tensors, name: tensors[name].float()} if name in tensors else tensors, path)
    weight = next(one for one in model_weights(SMALL.model) if one.name == name)
    with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight as bfloat16 and float32; give a"):
        open_source(directory, model=SMALL.model).read_hf(weight, 0)


@pytest.mark.parametrize("size", ["3b", "7b", "32b", "72b"])
def test_the_shipped_model_files_match_conversions_of_the_published_models(size):
    shipped = read_model(EXAMPLES / f"model_{size}.json").value
    assert stored_problems(Path("converted"), model_from_hf(published_config(size.upper())), shipped) == []


def resident_bytes(name: str) -> int:
    """``VmRSS`` (current) or ``VmHWM`` (peak since the last reset) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@pytest.mark.parametrize(("stored_tp", "tp_size"), [(1, 1), (1, 2), (2, 1), (2, 4)])
def test_reading_takes_memory_for_the_result_and_one_block(stored_tp, tp_size, tmp_path):
    config = SmallModel(8, queries_per_group=128).config | {"vocab_size": 1 << 14}
    model, block_bytes = model_from_hf(config), 1 << 20
    write_sparse_mm(model, stored_tp, Storage(), tmp_path)
    source = open_source(tmp_path, model=model)
    embedding = next(weight for weight in model_weights(model) if weight.name == EMBEDDING_NAME)
    source.read(embedding, 1 << 14, 0, torch.bfloat16, block_bytes)  # warm-up, not measured
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident_bytes("VmRSS")
    found = source.read(embedding, tp_size, 0, torch.bfloat16, block_bytes)
    assert found.nbytes == (128 << 20) // tp_size
    assert resident_bytes("VmHWM") - before < found.nbytes + 4 * block_bytes
