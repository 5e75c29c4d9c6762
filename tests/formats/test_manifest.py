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
    (lambda found: found.update(iteration="1"), "iteration is '1', which no run writes"),
    (lambda found: found.update(consumed_samples=-1), "consumed_samples is '-1', which no run writes"),
    (lambda found: found.update(new=1), "has 'new', which this version does not know"),
    (lambda found: found.pop("model"), "has no model"),
    (lambda found: found.update(tp_size=10**9), r"tp_size is 1000000000; it must divide the model's"),
    (lambda found: found["model"]["language"].update(num_layers=10**9), "language.num_layers: Input should be less"),
    (lambda found: found["model"].update(freeze_modules=["*a" * 300]), "has a pattern of 600 characters"),
    (lambda found: found["model"]["vision"].update(freeze_layers="0-999999999999"), "vision.freeze_layers"),
    (lambda found: found["pieces"][0].update(shape=[-1]), "has a damaged entry of a tensor"),
    (lambda found: found["pieces"][0].update(dtype=["F32"]), "has a damaged entry of a tensor"),
    (lambda found: found["pieces"][0].update(start=None), "has a damaged entry of x: part, tp_rank and start are"),
    (lambda found: found["pieces"][0].update(file="a\0.safetensors"), r"names the file 'a\\x00.safetensors'"),
    (lambda found: found["pieces"].append(None), "has a damaged entry of a tensor"),
])  # fmt: skip
def test_checkpoints_of_unknown_origin(tmp_path: Path, change: Change, message: str) -> None:
    folder = writer.begin(tmp_path, 1, 0)
    piece = training.CheckpointTensor.of(torch.float32, (3,), "a.safetensors", "x", "random")
    written = writer.write_pieces(folder, "a.safetensors", [(piece, Values(torch.zeros(3)))])
    final = writer.commit(folder, CheckpointManifest(1, 0, 1, 1, 1, SmallModel(2).model, None, {}, tuple(written)))
    assert CheckpointManifest.read(final).iteration == 1
    rewrite(final / MANIFEST_FILE, change)
    with pytest.raises(UserError, match=message) as error:
        CheckpointManifest.read(final)
    assert all(final.name in problem for problem in error.value.problems)


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
