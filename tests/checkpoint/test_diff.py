"""diff finds no difference between conversions of one model, and names exactly the tensors that differ."""

import dataclasses
import json
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint.diff import DiffReport, diff_directories
from mm.conversion import convert
from mm.conversion.convert import Options
from mm.errors import UserError
from mm.formats import training
from mm.formats import training_writer as writer
from mm.formats.blocks import Values
from mm.formats.layout import Layout
from mm.formats.safetensors import read_header
from mm.formats.storage import Format, Storage, Structure
from mm.weights.table import fuse, model_weights, shard
from tests.checkpoint.models import SmallModel, layouts, small_models, write_sparse_hf
from tests.launch import warm_python
from tests.saved_hf import spell

LAYOUT = Layout(((1, 1, 0),), ((0, 1, 2),), 2)
SMALL = SmallModel(2)
KINDS = [Storage(format, structure) for format in Format for structure in Structure]


def diff(source: Path, target: Path, hf: Path | None = None) -> DiffReport:
    return diff_directories(source, target, hf, 1)


def to_mm(hf: Path, target: Path, layout: Layout, kind: Storage | None = None) -> Path:
    convert.hf_to_mm(hf, target, layout, kind).run(Options(num_workers=1))
    return target


def named(found: DiffReport) -> list[str]:
    """The model's tensors named in all entries."""
    return [line for line in found.lines[3:] if not line.startswith(" ")]


def save_training(small: SmallModel, tensors: dict[str, Tensor], directory: Path, tp_size: int) -> Path:
    """Save a training checkpoint that holds weights only."""
    temporary, pieces = writer.begin(directory, 10, 0), []
    for rank in range(tp_size):
        parts = []
        for weight in model_weights(small.model):
            if rank == 0 or weight.tp_dim is not None:
                whole = fuse(weight, [tensors[name] for name in weight.hf_names])
                part = shard(weight, whole, tp_size, rank).contiguous()
                file = f"rank{rank}.safetensors"
                piece = training.CheckpointTensor.of(part.dtype, part.shape, file, weight.name, "weight", rank)
                parts.append((piece, Values(part)))
        pieces += writer.write_pieces(temporary, f"rank{rank}.safetensors", parts)
    manifest = training.CheckpointManifest(10, 0, tp_size, tp_size, 1, small.model, None, {}, tuple(pieces))
    writer.commit(temporary, manifest)
    return directory


@st.composite
def cases(draw) -> tuple[SmallModel, Layout, Layout, Storage, Storage, int]:
    small = draw(small_models())
    kinds = st.sampled_from(KINDS)
    return small, draw(layouts(small)), draw(layouts(small)), draw(kinds), draw(kinds), draw(st.integers(0, 2**30))


@settings(max_examples=25, deadline=None)
@given(cases())
def test_conversions_are_equal_and_a_change_is_named(case):
    small, first, second, kind, other_kind, chance = case
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tensors = small.save(root / "hf")
        to_mm(root / "hf", root / "a", first, kind)
        to_mm(root / "hf", root / "b", second, other_kind)
        save_training(small, tensors, root / "trained", first.tp_size)
        for source, target in (("hf", "a"), ("a", "b"), ("b", "hf"), ("trained", "b"), ("a", "trained")):
            found = diff(root / source, root / target)
            assert found.is_equal and len(found.lines) == 3, found.lines
            assert found.lines[2].startswith(f"{len(tensors)} of {len(tensors)} tensors")
        (root / "b" / "manifest.json").unlink()
        assert diff(root / "a", root / "b").is_equal

        wanted = list(tensors)[chance % len(tensors)]
        place = chance % tensors[wanted].numel()
        shutil.copytree(root / "hf", root / "changed")
        where, largest = change(root / "changed", spell(wanted, small.spelling), place)
        to_mm(root / "changed", root / "c", second, other_kind)
        position = [int(number) for number in torch.unravel_index(torch.tensor(place), tensors[wanted].shape)]
        amount = (f"    1 of {tensors[wanted].numel():,} elements differ, by at most {largest:.6g}; the first is "
                  f"{position}")
        for source, target in (("changed", "hf"), ("a", "changed"), ("c", "a"), ("hf", "c")):
            found = diff(root / source, root / target)
            assert not found.is_equal and named(found) == [wanted], found.lines
            assert found.lines[4] == amount
        assert f"    {root / 'hf' / where}" in found.lines


def change(directory: Path, name: str, place: int) -> tuple[str, float]:
    """Change one element of a safetensors file; return "file: name" and the amount."""
    for path in directory.rglob("*.safetensors"):
        content = load_file(path)
        if name in content:
            flat = content[name].view(-1)
            before = flat[place].clone()
            flat[place] = before + 1
            save_file(content, path, metadata={"format": "pt"})
            return f"{path.name}: {name}", (flat[place].float() - before.float()).abs().item()
    raise AssertionError(name)


@pytest.fixture
def hf(tmp_path) -> Path:
    SMALL.save(tmp_path / "hf")
    return tmp_path / "hf"


def edit_file(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    content = load_file(path)
    change(content)
    save_file(content, path, metadata={"format": "pt"})


def test_the_whole_report(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", LAYOUT)
    path = mm / "release" / "mp_rank_01_002" / "model.safetensors"

    def change(content: dict[str, Tensor]) -> None:
        content["text_decoder.decoder.layers.1.self_attention.linear_qkv.bias"][5] += 2

    before = load_file(path)["text_decoder.decoder.layers.1.self_attention.linear_qkv.bias"][5].float()
    edit_file(path, change)
    after = load_file(path)["text_decoder.decoder.layers.1.self_attention.linear_qkv.bias"][5].float()
    found = diff(hf, mm)
    key = "model.layers.2.self_attn.q_proj.bias"
    (hf_file,) = [file for file in hf.glob("*.safetensors") if key in load_file(file)]
    assert found == DiffReport((
        f"{hf}: Hugging Face directory",
        f"{mm}: MindSpeed-MM's layout, vit_pp_layers [[1, 1, 0]], llm_pp_layers [[0, 1, 2]], tp_size 2",
        "68 of 69 tensors of the model are bit-equal; different: 1 tensor.",
        key,
        f"    1 of 16 elements differ, by at most {(after - before).abs().item():.6g}; the first is [13]",
        f"    {hf_file}: {key}",
        f"    {path}: text_decoder.decoder.layers.1.self_attention.linear_qkv.bias",
    ), False)  # fmt: skip


def test_a_missing_and_an_extra_tensor(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", LAYOUT)
    path = mm / "release" / "mp_rank_01_001" / "model.safetensors"
    name, key = "text_decoder.decoder.layers.0.mlp.linear_fc1.weight", "model.layers.0.mlp.{}_proj.weight"

    def change(content: dict[str, Tensor]) -> None:
        content["stray"] = content.pop(name)
        content["text_decoder.decoder.layers.0.mlp.linear_fc2.weight"][:, 0] += 1

    edit_file(path, change)
    for source, target in ((hf, mm), (mm, hf)):
        found = diff(source, target)
        assert not found.is_equal
        assert f"{path} holds stray, which does not belong on this rank." in found.lines
        assert named(found)[1:] == [f"{key.format('gate')}, {key.format('up')}: incomplete in one or both directories",
                                    key.format("down")]
        assert f"    {path} lacks the tensor {name} of shape [8, 16]." in found.lines
        assert any(line.startswith(f"    {hf}") and line.endswith(key.format("gate")) for line in found.lines)


def test_a_replica_that_is_missing_or_differs(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", LAYOUT)
    one, other = (mm / "release" / f"mp_rank_0{rank}_002" / "model.safetensors" for rank in range(2))
    name = "text_decoder.decoder.final_layernorm.weight"
    edit_file(other, lambda content: content.update({name: content[name] + 1}))
    expected = ("model.norm.weight: copies within {} that should be equal", "    {}: " + name, "    {}: " + name)
    lines = [line.format(path) for line, path in zip(expected, (mm, one, other), strict=True)]
    assert list(diff(hf, mm).lines[3:]) == list(diff(mm, hf).lines[3:]) == lines
    edit_file(other, lambda content: content.pop(name))
    assert f"    {other} lacks the tensor {name} of shape [16]." in diff(hf, mm).lines


def test_padding_that_is_not_zero(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", LAYOUT)
    path = mm / "release" / "mp_rank_01_000" / "model.safetensors"
    name = "image_encoder.encoder.blocks.layers.0.mlp.linear_fc2.weight"
    edit_file(path, lambda content: content.update({name: content[name] + torch.tensor([0, 0, 1]).bfloat16()}))
    found = diff(hf, mm)
    assert found.lines[2] == ("69 of 69 tensors of the model are bit-equal; stored with padding that is not zero: "
                              "1 tensor.")
    assert found.lines[3:] == diff(mm, hf).lines[3:] == (
        "visual.blocks.0.mlp.down_proj.weight: padding that is not zero", f"    {path}: {name}")


def test_values_that_are_not_numbers(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", LAYOUT)
    name = "text_decoder.decoder.final_layernorm.weight"
    for rank in range(2):
        edit_file(mm / "release" / f"mp_rank_0{rank}_002" / "model.safetensors",
                  lambda content: content.update({name: content[name].fill_(torch.nan)}))
    assert "    16 of 16 elements differ, some infinite or NaN; the first is [0]" in diff(hf, mm).lines


def test_shards_of_two_dtypes(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", LAYOUT)
    name = "text_decoder.output_layer.weight"
    edit_file(mm / "release" / "mp_rank_01_002" / "model.safetensors",
              lambda content: content.update({name: content[name].float()}))
    found = diff(hf, mm)
    assert named(found) == ["lm_head.weight: incomplete in one or both directories"]
    path = mm / "release" / "mp_rank_01_002" / "model.safetensors"
    assert f"    {path}: {name} is float32, but manifest.json says bfloat16; convert again." in found.lines
    (mm / "manifest.json").unlink()
    found = diff(hf, mm)
    assert named(found) == ["lm_head.weight: incomplete in one or both directories"]
    assert f"    {mm} holds lm_head.weight as bfloat16 and float32" in found.lines


def test_a_whole_directory_of_another_dtype(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", LAYOUT)
    for path in hf.glob("*.safetensors"):
        edit_file(path, lambda content: content.update({name: tensor.float() for name, tensor in content.items()}))
    found = diff(hf, mm)
    assert found.lines[2] == "0 of 69 tensors of the model are bit-equal; different: 69 tensors."
    assert "    float32 and bfloat16" in found.lines
    assert not any("elements differ" in line for line in found.lines), "they are equal after rounding"


def test_another_model(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", LAYOUT)
    other = dataclasses.replace(SMALL, language_layers=4, language_ffn=9)
    other.save(tmp_path / "other")
    found = diff(tmp_path / "other", mm)
    assert f"the model: language.num_layers is 4 in {tmp_path / 'other'}, but 3 in {mm}" in found.lines
    assert f"the model: language.ffn_hidden_size is 9 in {tmp_path / 'other'}, but 7 in {mm}" in found.lines
    assert f"    {mm} has no model.layers.0.mlp.gate_proj.weight of shape [9, 16]" in found.lines
    (mm / "manifest.json").unlink()
    found = diff(tmp_path / "other", mm)
    assert not found.is_equal
    assert any("llm_pp_layers" in line and "4" in line for line in found.lines[3:])


def test_other_settings_of_the_same_weights(hf, tmp_path):
    shutil.copytree(hf, tmp_path / "other")
    config = json.loads((hf / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    assert diff(hf, tmp_path / "other").lines[3:] == (
        f"the model: language.rope_theta is 1000000.0 in {hf}, but 500000.0 in {tmp_path / 'other'}",)


def test_a_directory_without_llm(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", LAYOUT, Storage(vit_only=True))
    found = diff(hf, mm)
    assert found.lines[3:] == (f"{mm} holds no LLM (save_vit_only); only the rest is compared.",)
    assert found.lines[2] == "30 of 30 tensors of the model are bit-equal." and not found.is_equal
    assert diff(mm, mm).is_equal


def test_an_hf_directory_with_a_stale_tied_head(tmp_path):
    small = SmallModel(2, tied=True, num_shards=1)
    small.save(tmp_path / "hf")
    mm = to_mm(tmp_path / "hf", tmp_path / "mm", LAYOUT)
    path = tmp_path / "hf" / "model.safetensors"
    edit_file(path, lambda content: content.update({"lm_head.weight": content["model.embed_tokens.weight"].clone()}))
    assert diff(tmp_path / "hf", mm).is_equal
    edit_file(path, lambda content: content.update({"lm_head.weight": content["lm_head.weight"] + 1}))
    found = diff(tmp_path / "hf", mm)
    assert not found.is_equal
    assert found.lines[3:] == (f"model.embed_tokens.weight: copies within {tmp_path / 'hf'} that should be equal",
                               f"    {path}: model.embed_tokens.weight", f"    {path}: lm_head.weight")


def test_directories_that_cannot_be_opened(hf, tmp_path):
    with pytest.raises(UserError, match=r"--cfg.target_dir .*absent does not exist"):
        diff(hf, tmp_path / "absent")
    mm = to_mm(hf, tmp_path / "mm", LAYOUT)
    (mm / "manifest.json").unlink()
    with pytest.raises(UserError, match="has no manifest that describes its model"):
        diff(mm, mm)
    assert diff(mm, mm, hf).is_equal
    path = next(mm.rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{path}.*its header describes"):
        diff(hf, mm)


def test_every_flipped_bit_is_one_entry(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", LAYOUT)
    chances = random.Random(0)
    for _ in range(20):
        path = chances.choice(sorted(mm.rglob("*.safetensors")))
        tensor = chances.choice(list(read_header(path).values()))
        place = tensor.offset + chances.randrange(tensor.num_bytes)
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[place] ^= 1 << chances.randrange(8)
        path.write_bytes(damaged)
        found = diff(hf, mm)
        assert len({line.partition(":")[0] for line in named(found)}) == 1, found.lines
        assert f"    {path}: {tensor.name}" in found.lines
        path.write_bytes(content)


MEASURED = """
import os, resource, sys
from checkpoint.diff import diff_directories
in_use = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData")]
resource.setrlimit(resource.RLIMIT_DATA, (in_use[0] + (256 << 20), resource.RLIM_INFINITY))
print("\\n".join(diff_directories(sys.argv[1], sys.argv[2], None, 1).lines))
"""


def test_memory_does_not_grow_with_the_tensors(tmp_path):
    """An embedding of 614 MB differs in its last element; the process may use 256 MiB more."""
    config: dict[str, Any] = SmallModel(2, tied=True).config | {"vocab_size": 150_000, "hidden_size": 2048}
    config["vision_config"] |= {"out_hidden_size": 2048}
    for name in ("one", "other"):
        write_sparse_hf(config, tmp_path / name)
    path = tmp_path / "other" / "model.safetensors"
    tensor = read_header(path)["model.embed_tokens.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.offset + tensor.num_bytes - 2)
        file.write(b"\x03\x03")
    (tmp_path / "measured.py").write_text(MEASURED)
    done = subprocess.run([warm_python(), tmp_path / "measured.py", tmp_path / "one", tmp_path / "other"],
                          capture_output=True, text=True, timeout=120)
    assert "    1 of 307,200,000 elements differ" in done.stdout, done.stderr
    assert "the first is [149999, 2047]" in done.stdout
