"""diff finds no difference between conversions of one model, and names exactly the tensors that differ."""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint.verify import DiffReport, diff_directories
from mm.checkpoint import convert, training_manifest
from mm.checkpoint import training_files as writer
from mm.checkpoint.mindspeed_layout import Format, Layout, Storage, Structure
from mm.checkpoint.pipelined_write import Values
from mm.errors import UserError
from mm.weights.fuse import fuse, shard
from mm.weights.table import model_weights
from tests.mm_convert.models import SmallModel, layouts, small_models
from tests.saved_hf import spell

LAYOUT = Layout(((1, 1, 0),), ((0, 1, 2),), 2)
SMALL = SmallModel(2)
KINDS = [Storage(format, structure) for format in Format for structure in Structure]


def diff(source: Path, target: Path, hf: Path | None = None) -> DiffReport:
    return diff_directories(source, target, hf, 1)


def to_mm(hf: Path, target: Path, layout: Layout, kind: Storage | None = None) -> Path:
    convert.hf_to_mm(hf, target, layout, kind).run(num_workers=1)
    return target


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
                piece = training_manifest.CheckpointTensor.of(part.dtype, part.shape, file, weight.name, "weight", rank)
                parts.append((piece, Values(part)))
        pieces += writer.write_pieces(temporary, f"rank{rank}.safetensors", parts)
    manifest = training_manifest.CheckpointManifest(10, 0, tp_size, tp_size, 1, small.model, None, {}, tuple(pieces))
    writer.commit(temporary, manifest)
    return directory


@st.composite
def cases(draw) -> tuple[SmallModel, Layout, Layout, Storage, Storage, int]:
    small = draw(small_models())
    kinds = st.sampled_from(KINDS)
    return small, draw(layouts(small)), draw(layouts(small)), draw(kinds), draw(kinds), draw(st.integers(0, 2**30))


@settings(max_examples=10, deadline=None)
@given(cases())
def test_conversions_are_equal_and_a_change_is_named(case):
    small, first, second, kind, other_kind, chance = case
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tensors = small.save(root / "hf")
        to_mm(root / "hf", root / "a", first, kind)
        to_mm(root / "hf", root / "b", second, other_kind)
        save_training(small, tensors, root / "trained", first.tp_size)
        for source, target in (("hf", "a"), ("b", "hf"), ("trained", "b"), ("a", "trained")):
            found = diff(root / source, root / target)
            assert found.is_equal and len(found.lines) == 3, found.lines
            assert found.lines[2].startswith(f"{len(tensors)} of {len(tensors)} tensors")
        (root / "b" / "manifest.json").unlink()
        assert diff(root / "a", root / "b").is_equal

        wanted = list(tensors)[chance % len(tensors)]
        place = chance % tensors[wanted].numel()
        shutil.copytree(root / "hf", root / "changed")
        largest = change(root / "changed", spell(wanted, small.spelling), place)
        to_mm(root / "changed", root / "c", second, other_kind)
        position = [int(number) for number in torch.unravel_index(torch.tensor(place), tensors[wanted].shape)]
        for source, target in (("changed", "hf"), ("a", "changed"), ("c", "a")):
            found = diff(root / source, root / target)
            assert not found.is_equal and found.lines[3:] == (
                f"{wanted}: 1 of {tensors[wanted].numel():,} elements differ, by at most {largest:.6g}; the first is "
                f"{position}",)


def change(directory: Path, name: str, place: int) -> float:
    """Change one element of a safetensors file; return the amount."""
    for path in directory.rglob("*.safetensors"):
        content = load_file(path)
        if name in content:
            flat = content[name].view(-1)
            before = flat[place].clone()
            flat[place] = before + 1
            save_file(content, path, metadata={"format": "pt"})
            return (flat[place].float() - before.float()).abs().item()
    raise AssertionError(name)


@pytest.fixture
def hf(tmp_path) -> Path:
    SMALL.save(tmp_path / "hf")
    return tmp_path / "hf"


def edit_file(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    content = load_file(path)
    change(content)
    save_file(content, path, metadata={"format": "pt"})


def test_dtypes_and_values_that_are_not_numbers(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", LAYOUT)
    for path in hf.glob("*.safetensors"):
        edit_file(path, lambda content: content.update({name: tensor.float() for name, tensor in content.items()}))
    name = "text_decoder.decoder.final_layernorm.weight"
    for rank in range(2):
        edit_file(mm / "release" / f"mp_rank_0{rank}_002" / "model.safetensors",
                  lambda content: content.update({name: content[name].fill_(torch.nan)}))
    found = diff(hf, mm)
    assert found.lines[:3] == (
        f"{hf}: Hugging Face directory, vit_pp_layers [[2]], llm_pp_layers [[3]], tp_size 1",
        f"{mm}: MindSpeed-MM's layout, vit_pp_layers [[1, 1, 0]], llm_pp_layers [[0, 1, 2]], tp_size 2",
        "0 of 69 tensors of the model are bit-equal.")
    assert "visual.patch_embed.proj.weight: float32 and bfloat16" in found.lines, "they are equal after rounding"
    assert found.lines[-1] == "59 more tensors differ."
    for path in hf.glob("*.safetensors"):
        edit_file(path, lambda content: content.update({name: one.bfloat16() for name, one in content.items()}))
    assert diff(hf, mm).lines[3:] == (
        "model.norm.weight: 16 of 16 elements differ, by at most inf; the first is [0]",)


def test_another_model(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", LAYOUT)
    dataclasses.replace(SMALL, language_layers=4, language_ffn=9).save(tmp_path / "other")
    found = diff(tmp_path / "other", mm)
    assert f"the model: language.num_layers is 4 in {tmp_path / 'other'}, but 3 in {mm}" in found.lines
    assert f"the model: language.ffn_hidden_size is 9 in {tmp_path / 'other'}, but 7 in {mm}" in found.lines
    assert not found.is_equal


def test_a_directory_without_llm(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", LAYOUT, Storage(vit_only=True))
    found = diff(hf, mm)
    assert found.lines[3:] == (f"{mm} holds no LLM (save_vit_only); only the rest is compared.",)
    assert found.lines[2] == "30 of 30 tensors of the model are bit-equal." and not found.is_equal
    assert diff(mm, mm).is_equal


def test_copies_and_padding_are_compared(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", LAYOUT)
    path, name = mm / "release/mp_rank_01_002/model.safetensors", "text_decoder.decoder.final_layernorm.weight"
    edit_file(path, lambda content: content.update({name: content[name] + 1}))
    with pytest.raises(UserError, match=f"{path}: {name} differs from"):
        diff(hf, mm)


def test_directories_that_cannot_be_opened(hf, tmp_path):
    with pytest.raises(UserError, match=r"--cfg.target_dir .*absent does not exist"):
        diff(hf, tmp_path / "absent")
    mm = to_mm(hf, tmp_path / "mm", LAYOUT)
    (mm / "manifest.json").unlink()
    with pytest.raises(UserError, match="has no manifest that describes its model"):
        diff(mm, mm)
    assert diff(mm, mm, hf).is_equal
