"""Converted weights are bit-equal on every layout, and match the weight table."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mm.checkpoint import convert
from mm.checkpoint.mindspeed_layout import Format, Layout, Storage, Structure, rank_files
from mm.config.model import ModelConfig
from mm.errors import UserError
from mm.weights.fuse import fuse, shard
from tests.mm_convert.models import SmallModel, files, layouts, small_models, weights

KINDS = [Storage(format, structure) for format in Format for structure in Structure]


@st.composite
def cases(draw) -> tuple[SmallModel, Layout, Layout, Storage, Storage]:
    small = draw(small_models())
    kinds = st.sampled_from(KINDS)
    return small, draw(layouts(small)), draw(layouts(small)), draw(kinds), draw(kinds)


@settings(max_examples=15, deadline=None)
@given(cases())
def test_every_way_gives_the_same_bits(case):
    small, first, second, kind, other_kind = case
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tensors = small.save(root / "hf")
        convert.hf_to_mm(root / "hf", root / "a", first, kind).run(num_workers=1)
        assert_holds(root / "a" / "release", first.place(small.model), first.tp_size, kind, tensors)

        convert.mm_to_hf(root / "a", root / "hf", root / "back").run(num_workers=2)
        assert files(root / "back") == files(root / "hf")

        convert.hf_to_mm(root / "hf", root / "b", second, other_kind).run(num_workers=1)
        target = {"format": other_kind.format, "structure": other_kind.structure}
        convert.resplit(root / "a", root / "resplit", None, second, **target).run(num_workers=1)
        resplit, direct = files(root / "resplit"), files(root / "b")
        assert resplit.pop("manifest.json") and direct.pop("manifest.json")  # they name different sources
        assert resplit == direct

        (root / "a" / "manifest.json").unlink()  # as MindSpeed-MM writes it: the files show the layout
        convert.resplit(root / "a", root / "again", None, second, root / "hf", **target).run(num_workers=1)
        again = files(root / "again")
        assert again.pop("manifest.json") and again == direct


def assert_holds(
    folder: Path, model: ModelConfig, tp_size: int, kind: Storage, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Assert that the files in ``folder`` hold exactly the weight table's tensors for ``tensors``."""
    found, expected = weights(folder), list(rank_files(model, tp_size, kind))
    assert found.keys() == {part.file for part in expected}
    for file, stored in found.items():
        owned = {name: (weight, part.tp_rank) for part in expected if part.file == file
                 for name, weight in part.weights.items()}
        assert stored.keys() == owned.keys()
        for name, (weight, tp_rank) in owned.items():
            whole = fuse(weight, [tensors[hf_name] for hf_name in weight.hf_names])
            assert torch.equal(stored[name], shard(weight, whole, tp_size, tp_rank))


PEERS_LAYOUTS = {
    "the LLM list starts with 0": (((30, 2, 0, 0),), ((0, 11, 10, 7),)),
    "virtual chunks": (((10, 10, 10, 2), (0, 0, 0, 0), (0, 0, 0, 0)), ((0, 0, 0, 1), (4, 4, 4, 4), (4, 3, 2, 2))),
}
"""Layouts on which MindSpeed-MM 26 loses LLM layers 21 to 27, the final norm and the head."""


@pytest.mark.parametrize("name", PEERS_LAYOUTS)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_layouts_on_which_mindspeed_loses_layers(name, tp_size, tmp_path):
    small = SmallModel(2, vision_layers=32, language_layers=28)
    tensors = small.save(tmp_path / "hf")
    layout = Layout(*PEERS_LAYOUTS[name], tp_size=tp_size)
    convert.hf_to_mm(tmp_path / "hf", tmp_path / "mm", layout).run(num_workers=1)
    assert_holds(tmp_path / "mm" / "release", layout.place(small.model), tp_size, Storage(), tensors)
    places = {}
    for part in rank_files(layout.place(small.model), tp_size, Storage()):
        for weight in part.weights.values():
            places.setdefault(weight.name, set()).add(part.file.partition("/")[0][len("mp_rank_00_") :])
    assert all(len(stages) == 1 for stages in places.values())
    decoder = "text_decoder.decoder"
    assert {f"{decoder}.layers.{layer}.input_layernorm.weight" for layer in range(28)} <= places.keys()
    assert {f"{decoder}.final_layernorm.weight", "text_decoder.output_layer.weight"} <= places.keys()
    convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back").run(num_workers=1)
    assert files(tmp_path / "back") == files(tmp_path / "hf")


def test_a_base_without_weights_gives_new_shards(tmp_path):
    small = SmallModel(2, tied=True)
    tensors = small.save(tmp_path / "hf")
    convert.hf_to_mm(tmp_path / "hf", tmp_path / "mm", Layout(((2, 0),), ((1, 2),), 2)).run(num_workers=1)
    for path in (tmp_path / "hf").glob("model*"):
        path.unlink()
    convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back").run(num_workers=1)
    (found,) = weights(tmp_path / "back").values()
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_without_a_manifest(kind, tmp_path):
    """The files show their layout, and a stated layout must match it; the model must be given."""
    small, layout = SmallModel(2), Layout(((2, 0),), ((1, 2),), 2)
    small.save(tmp_path / "hf")
    convert.hf_to_mm(tmp_path / "hf", tmp_path / "mm", layout, kind).run(num_workers=1)
    (tmp_path / "mm" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"no manifest.*give --cfg.hf_config.hf_dir"):
        convert.resplit(tmp_path / "mm", tmp_path / "other", layout, layout)
    wrong = Layout(((1, 1),), ((0, 3),), 2)
    with pytest.raises(UserError, match=r"says vit_pp_layers \[\[1, 1.*holds files of vit_pp_layers \[\[2, 0"):
        convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back", wrong)
    for stated in (None, layout):
        convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back", stated).run(overwrite=True)
        assert files(tmp_path / "back") == files(tmp_path / "hf")


def test_files_without_some_layers(tmp_path):
    """As MindSpeed-MM 26 writes a checkpoint: every file is complete, but some layers are in none."""
    SmallModel(2).save(tmp_path / "hf")
    convert.hf_to_mm(tmp_path / "hf", tmp_path / "mm", Layout(((2, 0),), ((1, 2),), 1)).run(num_workers=1)
    (tmp_path / "mm" / "manifest.json").unlink()
    path = tmp_path / "mm" / "release" / "mp_rank_00_001" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if ".layers.1." not in name}, path)
    with pytest.raises(UserError, match=r"llm_pp_layers is \[1, 1\], which sums to 2; expected num_layers = 3"):
        convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back")


def test_the_stated_structure(tmp_path):
    SmallModel(2).save(tmp_path / "hf")
    convert.hf_to_mm(tmp_path / "hf", tmp_path / "mm", Layout(((2,),), ((3,),), 2)).run(num_workers=1)
    with pytest.raises(UserError, match=r"says canonical, but .* holds fused tensors"):
        convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back", structure=Structure.CANONICAL)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_padding_that_is_not_zero(kind, tmp_path):
    """Converting would lose it."""
    SmallModel(2, vision_ffn=5).save(tmp_path / "hf")
    convert.hf_to_mm(tmp_path / "hf", tmp_path / "mm", Layout(((2,),), ((3,),), 2), kind).run(num_workers=1)
    conversion = convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back")
    padded = [padding for padding in conversion.sources[0].index.padding
              if "image_encoder" in padding.view.stored.name]
    assert {padding.view.stored.name.rsplit(".", 2)[1] for padding in padded} == (
        {"gate_proj", "up_proj", "linear_fc2"} if kind.structure is Structure.CANONICAL
        else {"linear_fc1", "linear_fc2"})
    for padding in (padded[0], padded[-1]):
        path, stored = tmp_path / "mm" / padding.view.stored.file, padding.view.stored
        whole = path.read_bytes()
        num_rows = padding.view.num_rows
        last_row = stored.offset + (num_rows - 1) * stored.num_bytes // num_rows
        place = last_row + padding.stop * padding.view.index_bytes - 1
        path.write_bytes(whole[:place] + b"\1" + whole[place + 1 :])
        with pytest.raises(UserError, match=f"the padding of {stored.name} is not zero"):
            conversion.run(num_workers=1)
        path.write_bytes(whole)
    conversion.run(num_workers=1)


def test_copies_that_differ_are_reported(tmp_path):
    """The head of a tied model, and weights replicated on every tensor-parallel rank."""
    SmallModel(2, tied=True).save(tmp_path / "hf")
    convert.hf_to_mm(tmp_path / "hf", tmp_path / "mm", Layout(((2, 0),), ((1, 2),), 2)).run(num_workers=1)
    for name, file in (("text_decoder.output_layer.weight", "mp_rank_01_001"),
                       ("image_encoder.projector.layernorm.weight", "mp_rank_01_000")):
        path = tmp_path / "mm" / "release" / file / "model.safetensors"
        whole = path.read_bytes()
        conversion = convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back")
        copies = [other.stored for _, other in conversion.sources[0].index.copies]
        (place,) = [other.offset for other in copies if other.name == name and file in other.file]
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=f"{file}/model.safetensors: {name} differs from"):
            conversion.run(num_workers=1)
        path.write_bytes(whole)
    assert not (tmp_path / "back").exists()


@pytest.fixture(params=[0o022, 0o002, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(paths: list[Path]) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in paths}


def test_permissions_of_each_kind_of_target(umask, tmp_path):
    """Megatron's checkpoints are not readable by others; Hugging Face directories have default permissions."""
    SmallModel(2).save(tmp_path / "hf")
    convert.hf_to_mm(tmp_path / "hf", tmp_path / "mm", Layout(((2, 0),), ((1, 2),), 2)).run(num_workers=1)
    written = list((tmp_path / "mm").rglob("*"))
    folders = [tmp_path / "mm", *(path for path in written if path.is_dir())]
    assert len(folders) == 6 and modes(folders) == {0o750 & ~umask}
    assert modes([path for path in written if path.suffix == ".safetensors"]) == {0o640 & ~umask}

    convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back").run(num_workers=1)
    assert modes([tmp_path / "back"]) == {0o777 & ~umask}
    files = list((tmp_path / "back").iterdir())
    assert len(files) == 5 and modes(files) == {0o666 & ~umask}


@pytest.mark.parametrize("name", [".hf.mm-convert", ".hf.mm-convert.lock"])
def test_a_link_under_a_temporary_name_is_not_followed(tmp_path, name):
    SmallModel(2).save(tmp_path / "from")
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / name).symlink_to(precious)
    with pytest.raises(UserError, match=rf"{name}: is a link, which mm-convert never makes; remove it"):
        convert.hf_to_mm(tmp_path / "from", tmp_path / "hf", Layout(((2,),), ((3,),), 1)).run(num_workers=1)
    assert list(precious.iterdir()) == [] and not (tmp_path / "hf").exists()
