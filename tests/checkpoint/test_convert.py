"""Weights come out bit-equal, on every layout, and as the weight table says."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import convert
from checkpoint.convert import Options
from checkpoint.layout import Layout
from checkpoint.mm_directory import shards
from mm.errors import UserError
from mm.model.weights import fuse, shard
from tests.checkpoint.models import SmallModel, files, layouts, small_models, weights

ONE_WORKER = Options(num_workers=1)


@st.composite
def cases(draw) -> tuple[SmallModel, Layout, Layout]:
    small = draw(small_models())
    return small, draw(layouts(small)), draw(layouts(small))


@settings(max_examples=40, deadline=None)
@given(cases())
def test_every_way_gives_the_same_bits(case):
    small, first, second = case
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tensors = small.save(root / "hf")
        convert.hf_to_mm(root / "hf", root / "a", first).run(ONE_WORKER)
        model = first.place(small.model)
        found, expected = weights(root / "a" / "release"), {part.file: part for part in shards(model, first.tp_size)}
        assert found.keys() == expected.keys()
        for file, part in expected.items():
            assert found[file].keys() == part.weights.keys()
            for tensor_name, weight in part.weights.items():
                whole = fuse(weight, [tensors[hf_name] for hf_name in weight.hf_names])
                assert torch.equal(found[file][tensor_name], shard(weight, whole, first.tp_size, part.tp_rank))

        convert.mm_to_hf(root / "a", root / "hf", root / "back").run(Options(num_workers=2))
        assert files(root / "back") == files(root / "hf")

        convert.hf_to_mm(root / "hf", root / "b", second).run(ONE_WORKER)
        convert.resplit(root / "a", root / "resplit", None, second).run(ONE_WORKER)
        resplit, direct = files(root / "resplit"), files(root / "b")
        assert resplit.pop("manifest.json") and direct.pop("manifest.json")  # they name different sources
        assert resplit == direct


PEERS_LAYOUTS = {
    "the LLM list starts with 0": (((30, 2, 0, 0),), ((0, 11, 10, 7),)),
    "virtual chunks": (((10, 10, 10, 2), (0, 0, 0, 0), (0, 0, 0, 0)), ((0, 0, 0, 1), (4, 4, 4, 4), (4, 3, 2, 2))),
}
"""On which MindSpeed-MM 26 loses LLM layers 21 to 27, the final norm and the head."""


@pytest.mark.parametrize("name", PEERS_LAYOUTS)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_layouts_on_which_the_peer_loses_layers(name, tp_size, tmp_path):
    small = SmallModel(2, vision_layers=32, language_layers=28)
    tensors = small.save(tmp_path / "hf")
    layout = Layout(*PEERS_LAYOUTS[name], tp_size)
    convert.hf_to_mm(tmp_path / "hf", tmp_path / "mm", layout).run(ONE_WORKER)
    found = weights(tmp_path / "mm" / "release")
    places = {}
    for part in shards(layout.place(small.model), tp_size):
        for tensor_name, weight in part.weights.items():
            whole = fuse(weight, [tensors[hf_name] for hf_name in weight.hf_names])
            assert torch.equal(found[part.file][tensor_name], shard(weight, whole, tp_size, part.tp_rank))
            places.setdefault(weight.name, set()).add(part.file.partition("/")[0][len("mp_rank_00_") :])
    assert all(len(stages) == 1 for stages in places.values())
    decoder = "text_decoder.decoder"
    assert {f"{decoder}.layers.{layer}.input_layernorm.weight" for layer in range(28)} <= places.keys()
    assert {f"{decoder}.final_layernorm.weight", "text_decoder.output_layer.weight"} <= places.keys()
    convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back").run(ONE_WORKER)
    assert files(tmp_path / "back") == files(tmp_path / "hf")


def test_a_base_without_weights_gives_new_shards(tmp_path):
    small = SmallModel(2, tied=True)
    tensors = small.save(tmp_path / "hf")
    convert.hf_to_mm(tmp_path / "hf", tmp_path / "mm", Layout(((2, 0),), ((1, 2),), 2)).run(ONE_WORKER)
    for path in (tmp_path / "hf").glob("model*"):
        path.unlink()
    convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back").run(ONE_WORKER)
    (found,) = weights(tmp_path / "back").values()
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_without_a_manifest_the_layout_is_asked_for(tmp_path):
    small, layout = SmallModel(2), Layout(((2, 0),), ((1, 2),), 2)
    small.save(tmp_path / "hf")
    convert.hf_to_mm(tmp_path / "hf", tmp_path / "mm", layout).run(ONE_WORKER)
    (tmp_path / "mm" / "manifest.json").unlink()
    with pytest.raises(UserError, match="no manifest.*give --cfg.parallel_config"):
        convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back")
    wrong = Layout(((1, 1),), ((0, 3),), 2)
    with pytest.raises(UserError, match="has no place on this rank"):
        convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back", wrong)
    convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back", layout).run(ONE_WORKER)
    assert files(tmp_path / "back") == files(tmp_path / "hf")


def test_copies_that_differ_are_told(tmp_path):
    """The head of a tied model, and what every tensor-parallel rank holds whole."""
    SmallModel(2, tied=True).save(tmp_path / "hf")
    convert.hf_to_mm(tmp_path / "hf", tmp_path / "mm", Layout(((2, 0),), ((1, 2),), 2)).run(ONE_WORKER)
    for name, file in (("text_decoder.output_layer.weight", "mp_rank_01_001"),
                       ("image_encoder.projector.layernorm.weight", "mp_rank_01_000")):
        path = tmp_path / "mm" / "release" / file / "model.safetensors"
        whole = path.read_bytes()
        conversion = convert.mm_to_hf(tmp_path / "mm", tmp_path / "hf", tmp_path / "back")
        twin = next(other for _, other in conversion.plan.twins if other.name == name and file in other.file)
        path.write_bytes(whole[: twin.offset] + bytes([whole[twin.offset] ^ 1]) + whole[twin.offset + 1 :])
        with pytest.raises(UserError, match=f"{file}/model.safetensors: {name} differs from"):
            conversion.run(ONE_WORKER)
        path.write_bytes(whole)
    assert not (tmp_path / "back").exists()
