"""verify finds any damage and names tensor and file; show lists the content of a directory."""

import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.verify import show_directory, verify_directory
from mm.checkpoint import convert
from mm.checkpoint.mindspeed import MindSpeedDirectory
from mm.checkpoint.mindspeed_layout import Format, Layout, Storage, Structure
from mm.errors import UserError
from tests.files import flip
from tests.mm_convert.models import SmallModel

LAYOUT = Layout(((1, 1, 0),), ((0, 1, 2),), 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    return make(tmp_path_factory.mktemp("made"), Storage())


def make(root: Path, kind: Storage) -> tuple[Path, Path]:
    """A Hugging Face directory and a conversion of it."""
    SmallModel(2, vision_ffn=5).save(root / "hf")
    convert.hf_to_mm(root / "hf", root / "mm", LAYOUT, kind).run(num_workers=1)
    return root / "hf", root / "mm"


@pytest.fixture
def copy(made, tmp_path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "mm"))


def verify(directory: Path, hf: Path | None = None) -> list[str]:
    return verify_directory(directory, None if hf is None else str(hf), None, 1)


def test_whole(made):
    hf, mm = made
    assert [line.partition(": ")[2] for line in verify(mm, hf)] == [
        "100 tensors match manifest.json.", f"100 tensors match those of {hf}."]


@pytest.mark.parametrize("kind", [Storage(), Storage(Format.TORCH, Structure.CANONICAL)], ids=str)
def test_every_flipped_bit(kind, tmp_path):
    hf, mm = make(tmp_path, kind)
    chances = random.Random(0)
    paths = sorted((mm / "release").rglob("model*"))
    contents = MindSpeedDirectory.open(mm).contents
    for _ in range(8):
        path = chances.choice(paths)
        tensor = chances.choice(list(contents[str(path.relative_to(mm))].values()))
        place = tensor.offset + chances.randrange(tensor.num_bytes)
        whole = path.read_bytes()
        flip(path, place, chances.randrange(8))
        with pytest.raises(UserError) as raised:
            verify(mm)
        (problem,) = raised.value.problems
        assert f"{path}: {tensor.name} is damaged" in problem
        (mm / "manifest.json").rename(mm / "aside")
        with pytest.raises(UserError) as raised:
            verify_directory(mm, str(hf), LAYOUT, 1)
        (problem,) = raised.value.problems
        assert f"{path}: {tensor.name} differs from" in problem
        (mm / "aside").rename(mm / "manifest.json")
        path.write_bytes(whole)
    verify(mm, hf)


def test_without_llm(tmp_path):
    hf, mm = make(tmp_path, Storage(vit_only=True))
    assert verify(mm, hf)[1] == f"{mm}: 52 tensors match those of {hf}."


def test_another_dtype(made, copy, tmp_path):
    hf = Path(shutil.copytree(made[0], tmp_path / "hf"))
    for path in hf.glob("*.safetensors"):
        save_file({name: tensor.float() for name, tensor in load_file(path).items()}, path)
    with pytest.raises(UserError) as raised:
        verify(copy, hf)
    assert f"is bfloat16, but in {hf} float32" in raised.value.problems[0] and len(raised.value.problems) == 100


def test_swapped_shards(copy):
    one, other = (copy / "release" / f"mp_rank_0{rank}_001" / "model.safetensors" for rank in range(2))
    one.rename(copy / "aside")
    other.rename(one)
    (copy / "aside").rename(other)
    with pytest.raises(UserError) as raised:
        verify(copy)
    assert all(any(str(path) in problem for problem in raised.value.problems) for path in (one, other))


def test_missing_and_extra_tensors_and_files(copy):
    path = max(copy.rglob("*.safetensors"))
    tensors = load_file(path)
    name, tensor = tensors.popitem()
    save_file(tensors | {"stray": tensor}, path)
    gone = min(copy.rglob("*.safetensors"))
    shutil.copytree(gone.parent, gone.parent.with_name("mp_rank_07"))
    gone.unlink()
    with pytest.raises(UserError) as raised:
        verify(copy)
    text = "\n".join(raised.value.problems)
    assert f"{path} lacks {name}" in text and f"{path} holds stray" in text
    assert f"{gone} lacks" in text and "mp_rank_07/model.safetensors holds" in text


def test_damaged_manifest(copy):
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"tp_size": 2', '"tp_size": 1'))
    with pytest.raises(UserError, match=r"manifest.json is damaged"):
        verify(copy)


def test_show(made):
    hf, mm = made
    lines = show_directory(mm)
    assert lines[1] == "layout: vit_pp_layers [[1, 1, 0]], llm_pp_layers [[0, 1, 2]], tp_size 2"
    assert len([line for line in lines if "mp_rank" in line]) == 6
    assert lines[-1].startswith("6 files, 100 bfloat16 tensors, ")
    assert show_directory(hf)[1] == "layers: vit_pp_layers [[2]], llm_pp_layers [[3]], tp_size 1"


def test_every_count_has_its_unit_and_separators(made, tmp_path):
    """In files of two dtypes, each number says of what it is."""
    several = {f"a.{number}": torch.zeros(1) for number in range(1234)}
    (tmp_path / "hf").mkdir()
    save_file({**several, "b": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "hf" / "model.safetensors")
    shutil.copy(made[0] / "config.json", tmp_path / "hf")
    lines = show_directory(tmp_path / "hf")
    assert lines[-2:] == ["  model.safetensors  1 bfloat16 tensor, 1,234 float32 tensors, 4,942 bytes",
                          "1 file, 1 bfloat16 tensor, 1,234 float32 tensors, 4,942 bytes"]
