"""Manifests whose checksum is right, but whose content no run writes: from another version, or made to do harm."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mm.conversion.convert import Options, hf_to_mm
from mm.errors import UserError
from mm.formats import training
from mm.formats import training_writer as writer
from mm.formats.blocks import Values
from mm.formats.layout import Layout
from mm.formats.manifest import MANIFEST_FILE
from mm.formats.mindspeed import ConvertedManifest
from mm.formats.training import CheckpointManifest
from tests.checkpoint.models import SmallModel

Change = Callable[[dict[str, Any]], Any]


def rewrite(path: Path, change: Change) -> None:
    content = json.loads(path.read_text())
    del content["crc32"]
    change(content)
    crc32 = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    path.write_text(json.dumps({"crc32": crc32, **content}))


@pytest.mark.parametrize(("change", "message"), [
    (lambda found: found.update(iteration="1"), r'manifest.json: iteration is "1" \(Input should be a valid integer'),
    (lambda found: found.update(consumed_samples=-1), "manifest.json: consumed_samples is -1 "),
    (lambda found: found.update(iteration=10**20), "manifest.json: iteration is 100000000000000000000 "),
    (lambda found: found.update(new=1), "manifest.json: new is not known to this version"),
    (lambda found: found.pop("model"), "manifest.json: model is missing"),
    (lambda found: found.update(optimizer={}), "manifest.json: optimizer.step is missing"),
    (lambda found: found["optimizer"].update(step="x"), 'manifest.json: optimizer.step is "x"'),
    (lambda found: found["optimizer"].update(step=-1), "manifest.json: optimizer.step is -1"),
    (lambda found: found["optimizer"]["grad_scaler"].pop("scale"), "manifest.json: optimizer.grad_scaler.scale is mis"),
    (lambda found: found.update(base=["hf"]), r"manifest.json: base is \[\"hf\"\]"),
    (lambda found: found.update(disks=[{}]), "manifest.json: disks.0.host is missing"),
    (lambda found: found["disks"][0].update(ranks=[]), r"manifest.json: disks.0.ranks is \[\]"),
    (lambda found: found.update(tp_size=10**9), r"tp_size is 1000000000; it must divide the model's"),
    (lambda found: found["model"]["language"].update(num_layers=10**9), "model.language.num_layers is 1000000000 "),
    (lambda found: found["model"]["vision"].update(freeze_layers="0-999999999999"), "model.vision.freeze_layers is "),
    (lambda found: found["pieces"][0].update(shape=[-1]), "manifest.json: pieces.0.shape.0 is -1"),
    (lambda found: found["pieces"][0].update(dtype=["F32"]), "manifest.json: pieces.0.dtype is "),
    (lambda found: found["pieces"][0].update(dtype="F31"), "pieces.0.dtype is .* should match pattern .*F32"),
    (lambda found: found["pieces"][0].update(start=None), "manifest.json: pieces.0.start is null"),
    (lambda found: found["pieces"][0].update(file="a\0.safetensors"), "manifest.json: pieces.0.file is "),
    (lambda found: found["pieces"][0].update(file="../a.safetensors"), "manifest.json: pieces.0.file is "),
    (lambda found: found["pieces"].append(None), "manifest.json: pieces.1 is null"),
])  # fmt: skip
def test_checkpoints_of_unknown_origin(tmp_path: Path, change: Change, message: str) -> None:
    folder = writer.begin(tmp_path, 1, 0)
    piece = training.CheckpointTensor.of(torch.float32, (3,), "a.safetensors", "x", "random")
    written = writer.write_pieces(folder, "a.safetensors", [(piece, Values(torch.zeros(3)))])
    scaler = {"scale": 2.0, "growth_tracker": 0.0, "hysteresis_tracker": 2.0}
    final = writer.commit(folder, CheckpointManifest(
        1, 0, 1, 1, 1, SmallModel(2).model, {"step": 1, "grad_scaler": scaler}, {}, tuple(written),
        base={"path": "hf", "crc32": 5}, disks=[{"host": "a", "ranks": [0], "files": ["a.safetensors"]}]))
    assert CheckpointManifest.read(final).iteration == 1
    rewrite(final / MANIFEST_FILE, change)
    with pytest.raises(UserError, match=message) as error:
        CheckpointManifest.read(final)
    assert all(problem.startswith(str(final)) for problem in error.value.problems)


@pytest.mark.parametrize("change", [
    lambda found: found.pop("layout"), lambda found: found.update(layout=[]), lambda found: found.update(source=None),
    lambda found: found.update(save_format="pickle"), lambda found: found["layout"].update(tp_size="2"),
    lambda found: found["tensors"][0].update(crc32="x"), lambda found: found.update(model=[1]),
])  # fmt: skip
def test_conversions_of_unknown_origin(tmp_path: Path, change: Change) -> None:
    SmallModel(2).save(tmp_path / "hf")
    hf_to_mm(tmp_path / "hf", tmp_path / "mm", Layout(((2,),), ((3,),), 1)).run(Options(num_workers=1))
    rewrite(tmp_path / "mm" / MANIFEST_FILE, change)
    with pytest.raises(UserError, match=r"manifest.json"):
        ConvertedManifest.read(tmp_path / "mm")
