"""A converted directory trains: on TP2 x PP2, from any layout and kind of file, exactly as from Hugging Face."""

import json
import shutil
from pathlib import Path

import pytest

from mm.checkpoint import convert
from mm.checkpoint.hf import HFDirectory
from mm.checkpoint.mindspeed_layout import Format, Layout, Storage, Structure
from mm.checkpoint.source import open_source
from tests import tiny
from tests.files import flip
from tests.launch import run_ranks

VIRTUAL = (((2, 1, 0), (1, 0, 0)), ((0, 0, 0), (0, 2, 2)))
DIRECTORIES = {
    "mm-same-layout": (Layout(((3, 1),), ((0, 4),), 2), Storage()),
    "mm-one-file-torch": (Layout(((4,),), ((4,),), 1), Storage(Format.TORCH)),
    "mm-virtual-chunks-canonical": (Layout(*VIRTUAL, 2), Storage(structure=Structure.CANONICAL)),
    "mm-virtual-chunks-torch-canonical": (Layout(((4,), (0,)), ((0,), (4,)), 1),
                                          Storage(Format.TORCH, Structure.CANONICAL)),
    "mm-without-manifest": (Layout(((1, 3, 0),), ((0, 1, 3),), 2), Storage(Format.TORCH)),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("converted")
    for name in ("untied", "tied"):
        tiny.hf_model(name == "tied").save_pretrained(root / name / "hf")
        for directory, (layout, kind) in DIRECTORIES.items():
            convert.hf_to_mm(root / name / "hf", root / name / directory, layout, kind).run(num_workers=1)
        (root / name / "mm-without-manifest" / "manifest.json").unlink()
    damage(root / "untied" / "mm-without-manifest", root / "damaged")
    damage_one(root / "untied" / "mm-one-file-torch", root / "damaged-for-one")
    run_ranks(4, "tests.parallel.converted_worker", str(root))
    return json.loads((root / "results.json").read_text())


def damage(source: Path, target: Path) -> None:
    """A norm is not the same on both tensor-parallel ranks."""
    shutil.copytree(source, target)
    model = HFDirectory.open(source.parent / "hf").model_config()
    copies = [other.stored for _, other in open_source(target, model=model).index.copies]
    twin = next(other for other in copies if other.name.endswith("final_layernorm.weight"))
    flip(target / twin.file, twin.offset)


def damage_one(source: Path, target: Path) -> None:
    """A bit of one norm, which has a checksum, is not as it was."""
    shutil.copytree(source, target)
    norms = [one.stored for one in open_source(target).views if one.stored.name.endswith("final_layernorm.weight")]
    flip(target / norms[0].file, norms[0].offset)


@pytest.mark.parametrize("directory", DIRECTORIES)
@pytest.mark.parametrize("model", ["untied", "tied"])
def test_trains_as_from_hugging_face(model, directory, results):
    """Every bit: weights as loaded, the losses of two steps, weights and optimizer state after them."""
    found = results[model]["directories"][directory]
    assert found["weights"] == []
    expected, losses = found["losses"]
    assert len(set(losses)) == 2 and losses == expected
    assert found["after"] == []


def test_every_rank_reports_a_copy_that_differs(results):
    for (problem,) in results["damaged"]:
        assert "mp_rank_01_002/model_optim_rng.pt" in problem
        assert "final_layernorm.weight differs from " in problem


@pytest.mark.parametrize("layout", ["dp4", "dp2-cp2", "tp2-dp2", "pp2-vpp2-dp2-bf16", "tied", "masters"])
def test_replicas_read_a_model_once_and_hold_the_same_bits(layout, results):
    """For every kind of directory, and adapters: in total, replicas read as many bytes as one rank alone, in even
    shares.
    """
    directories = {"masters": {"training checkpoint"}}.get(layout, {"hf", *DIRECTORIES, "adapters"})
    assert set(results["replicas"][layout]) == directories
    for measured in results["replicas"][layout].values():
        assert measured["different"] == [] and measured["num_compared"] > 20
        for counts in measured["counts"]:
            read, alone, largest = zip(*counts, strict=True)
            assert len(read) == (4 if layout in ("dp4", "dp2-cp2") else 2)
            assert {sum(read)} == set(alone) and sum(read) > 0
            assert max(read) - min(read) <= max(largest)


def test_damage_that_one_replica_reads_ends_all_with_one_message(results):
    (problem,), *others = results["damaged for one"]
    assert others == [[problem]] * 3
    assert "final_layernorm.weight is damaged" in problem
