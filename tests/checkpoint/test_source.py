"""Training checkpoints as a source of every command, and their errors."""

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.checkpoint import convert
from mm.checkpoint.manifest import MANIFEST_FILE
from mm.checkpoint.mindspeed_layout import Layout
from mm.checkpoint.source import open_source
from mm.checkpoint.training_manifest import TrainingDirectory
from mm.errors import UserError
from tests.mm_convert.models import SmallModel, files, layouts, run, small_models
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
