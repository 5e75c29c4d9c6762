"""Training checkpoints: bit-exact resume, any layout from any other, and nothing that can go wrong goes unnoticed.

One launch of two processes runs every scenario that needs processes; the rest reads what it wrote.
"""

import json
import math
import random
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2_5_VLForConditionalGeneration

from mm.checkpoint import convert, directories, manifest
from mm.checkpoint.source import open_training
from mm.checkpoint.training_manifest import TrainingDirectory
from mm.errors import UserError
from mm.weights.fuse import local_shape
from mm.weights.table import model_weights, published_name
from tests import tiny
from tests.launch import run_ranks

LOSS_TOLERANCE = 1e-5
BF16_LOSS_TOLERANCE = 2e-3
"""Tolerance for bf16 sums in another order."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The worker's results.  The worker finally dies in a save, so the launch must fail."""
    directory = tmp_path_factory.mktemp("state")
    for name, tied in (("hf", False), ("hf-tied", True)):
        tiny.hf_model(tied).save_pretrained(directory / name)
    with pytest.raises(AssertionError) as failure:
        run_ranks(2, "tests.parallel.state_worker", str(directory))
    assert (directory / "results.json").is_file(), failure.value
    assert f"the first rank to fail ended with -{int(signal.SIGXFSZ)}" in str(failure.value)
    return directory


@pytest.fixture(scope="module")
def results(directory: Path) -> dict:
    return json.loads((directory / "results.json").read_text())


def test_resume_is_bit_exact(results: dict) -> None:
    assert len(results["resume"]) == 21
    for name, measured in results["resume"].items():
        assert measured["resumed_losses"] == measured["losses"] and len(set(measured["losses"])) == 2, name
        assert measured["different"] == [] and measured["num_compared"] > 20, name
        assert measured["is_random_equal"] and measured["best"] == [2.5, 1, 3, "these"], name
        assert measured["progress"] == {
            "iteration": 2, "consumed_samples": 8, "data": None, "notes": [], "run_id": None, "schedule": None,
            "given_start": None, "recent": {"losses": [], "norms": [], "num_bad": 0}, "base": None}


def test_any_layout_continues_from_any_other(results: dict) -> None:
    assert len(results["reshard"]) == 8
    for name, measured in ((name, one) for name, chain in results["reshard"].items() for one in chain):
        is_bf16 = name in ("remainders", "offloaded")
        tolerance = BF16_LOSS_TOLERANCE if is_bf16 else LOSS_TOLERANCE
        assert measured["different"] == [] and measured["num_compared"] > 100, name
        assert measured["resumed_losses"] == pytest.approx(measured["losses"], rel=tolerance), name
        if not is_bf16 and name not in ("whole encoder", "shards"):  # whose layouts are partly alike
            assert "random states are not restored" in measured["notes"][0]


def test_a_run_without_fp32_copies_takes_the_weights_of_one_with_them_and_says_what_it_drops(results: dict) -> None:
    measured = results["to_no_copies"]
    assert measured["different"] == [] and measured["losses"] == measured["resumed_losses"]
    assert "of which --main-params-dtype bf16 keeps 16 bits" in measured["notes"][0]


@pytest.mark.parametrize("name", ["dp2-distributed-bf16", "tp2-bf16", "pp2"])
def test_saved_shapes_are_without_padding(name: str, directory: Path) -> None:
    """Checks the weights, and the total size of the ranges of fp32 copies and moments."""
    manifest = TrainingDirectory.open(directory / "resume" / name).manifest
    shapes, sizes = {one.name: local_shape(one, manifest.tp_size) for one in model_weights(manifest.model)}, Counter()
    for piece in (piece for piece in manifest.pieces if piece.kind != "random"):
        assert piece.kind != "weight" or piece.stored.shape == shapes[piece.name]
        sizes[piece.name, piece.kind, piece.tp_rank] += math.prod(piece.stored.shape)
    assert len(sizes) > 200 and all(size == math.prod(shapes[name]) for (name, _, _), size in sizes.items())


def test_errors_are_the_same_on_all_ranks_and_suggest_a_fix(results: dict) -> None:
    found = results["refusals"]
    for problems in found.values():
        assert problems[0] == problems[1] and problems[0]
    (freezing,) = found["other freezing"][0]
    assert "image_encoder.encoder.patch_embed.proj.weight and" in freezing
    assert "--no-load-optim" in freezing and "--finetune" in freezing
    assert "--no-load-optim" in found["no optimizer state"][0][0]
    assert "complete ones in" in found["missing"][0][0] and ": 1." in found["missing"][0][0]
    fields = [problem.split(" = ")[0].split(" with ")[1] for problem in found["other model"][0]]
    assert fields == ["text_decoder.layernorm_epsilon", "text_decoder.rope_theta"]


def test_weights_alone(results: dict) -> None:
    found = results["without_optimizer"]
    for measured in found.values():
        assert measured["different"] == measured["stale_masters"] == measured["moments"] == []
    assert found["no_load_optim"]["progress"] == [2, 8]
    assert found["finetune"]["progress"] == [0, 0]


def test_damage_is_named_on_all_ranks(results: dict) -> None:
    (problem,), other = results["damage"]
    assert other == [problem]
    assert "weights_tp01_pp00.safetensors: text_decoder.output_layer.weight is damaged" in problem


def test_a_full_disk_fails_the_save_on_all_ranks_and_harms_nothing(results: dict) -> None:
    found = results["disk_full"]
    (problem,), other = found["problems"]
    assert other == [problem]
    assert "weights_tp01_pp00.safetensors cannot be written (File too large)" in problem
    assert found["left"] == ["iter_0000000", directories.LATEST_FILE]
    assert found["resumed"] == [0, 0] and found["later"] == [1, 4]


def test_ranks_read_the_optimizer_state_only_once(results: dict) -> None:
    """Even if all replicas hold the same state."""
    assert set(results["optimizer_reads"].values()) == {1.0}, results["optimizer_reads"]


def test_only_the_newest_checkpoints_are_kept(results: dict) -> None:
    assert results["retention"] == ["iter_0000003", "iter_0000004", directories.LATEST_FILE]


@pytest.mark.parametrize("name", ["dp2-distributed-overlap", "tp2-bf16", "pp2-tied"])
def test_a_save_in_the_background_writes_the_same_bytes(name: str, directory: Path, results: dict) -> None:
    measured, saved = results["background"][name], directory / "background" / name
    assert measured["num_changed"] > 20 and measured["visible"] == []
    names = sorted(path.name for path in (saved / "waits" / "iter_0000001").iterdir())
    assert len(names) > 4
    for one in ("first", "second"):
        assert sorted(path.name for path in (saved / one / "iter_0000001").iterdir()) == names
        for file in names:
            ours, theirs = (saved / folder / "iter_0000001" / file for folder in (one, "waits"))
            assert ours.read_bytes() == theirs.read_bytes(), file
    read_everything(saved / "first" / "iter_0000002")
    on_disk = sum(path.stat().st_size for path in (saved / "waits" / "iter_0000001").glob("*_tp*.safetensors"))
    assert measured["memory_bytes"] == measured["memory_bytes_later"] < on_disk  # of one of two ranks


def test_a_failure_in_the_background_is_raised_on_all_ranks(results: dict) -> None:
    """After the other save that was pending, the best one, has been committed."""
    found = results["background_fails"]
    (problem,), other = found["problems"]
    assert other == [problem]
    assert "weights_tp01_pp00.safetensors cannot be written (File too large)" in problem
    assert found["left"] == ["best", "iter_0000000", directories.LATEST_FILE] and not found["is_pending"]
    assert found["saved"] == ["best/iter_0000001"]


def test_random_weights_are_the_same_in_every_layout(results: dict) -> None:
    assert results["random_weights"]["tp2"] == results["random_weights"]["dp2"] == []
    drawn = results["random_weights"]["seed"]
    assert len(drawn) == 37 and not any("norm" in name or "bias" in name for name in drawn)


def test_a_process_killed_in_a_save_leaves_the_last_good_checkpoint(directory: Path) -> None:
    folder, notes = directories.find_checkpoint(directory / "killed")
    assert folder.name == "iter_0000000"
    read_everything(folder)
    (note,) = notes
    assert "iter_0000001.tmp-" in note and "left over from an interrupted save" in note


@pytest.mark.parametrize(("layout", "tied"), [("tp2", ""), ("pp2", "-tied")])
def test_export_equals_the_loaded_model(layout: str, tied: str, directory: Path, tmp_path: Path) -> None:
    base, checkpoint = directory / f"hf{tied}", directory / f"{layout}{tied}"
    convert.mm_to_hf(checkpoint, base, tmp_path / "out").run(num_workers=1)
    expected, found = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    model, info = Qwen2_5_VLForConditionalGeneration.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
        tmp_path / "out", output_loading_info=True)  # transformers' types lack the report
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[published_name(name)]), name


def read_everything(folder: Path) -> None:
    """Read every whole weight and moment, and every random state."""
    stored = TrainingDirectory.open(folder)
    source = open_training(stored)
    for weight in model_weights(source.model):
        source.read(weight, 1, 0, torch.float32)
        size = math.prod(weight.shape)
        for part in ("master", "exp_avg", "exp_avg_sq"):
            if stored.has(weight, part):
                stored.read_state(weight, part, 1, 0, 0, size)
    for piece in stored.manifest.pieces:
        if piece.kind == "random":
            stored.read_random(piece.name)


@pytest.fixture
def checkpoint(directory: Path, tmp_path: Path) -> Path:
    """A copy of a distributed bf16 checkpoint to damage."""
    source, _ = directories.find_checkpoint(directory / "resume" / "dp2-distributed-bf16")
    return Path(shutil.copytree(source, tmp_path / source.name))


def test_every_flipped_bit_is_found_and_named(checkpoint: Path) -> None:
    read_everything(checkpoint)
    chooser = random.Random(0)
    paths = sorted(checkpoint.glob("*.safetensors"))
    assert len(paths) == 5
    for _ in range(20):
        path = chooser.choice(paths)
        content = bytearray(path.read_bytes())
        position, bit = chooser.randrange(len(content)), 1 << chooser.randrange(8)
        content[position] ^= bit
        path.write_bytes(content)
        start = 8 + int.from_bytes(content[:8], "little")
        with pytest.raises(UserError, match=path.name) as found:
            read_everything(checkpoint)
        content[position] ^= bit
        path.write_bytes(content)
        if position >= start:
            assert f"{key_at(path, position - start)} is damaged" in str(found.value)
    read_everything(checkpoint)


def key_at(path: Path, offset: int) -> str:
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header.pop("__metadata__")
    return next(key for key, entry in header.items() if entry["data_offsets"][0] <= offset < entry["data_offsets"][1])


def test_a_damaged_or_foreign_manifest_is_rejected(checkpoint: Path) -> None:
    path = checkpoint / manifest.MANIFEST_FILE
    text = path.read_text()
    for changed, problem in ((text.replace('"consumed_samples": 8', '"consumed_samples": 9'), "is damaged"),
                             (text[:-20], "cannot be read"), ("[]", "cannot be read")):
        assert changed != text
        path.write_text(changed)
        with pytest.raises(UserError, match=f"manifest.json {problem}"):
            TrainingDirectory.open(checkpoint)
