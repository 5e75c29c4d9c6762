"""New Hugging Face directories if the base has no weights, as transformers reads them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mm.checkpoint import convert
from mm.checkpoint.hf import HFDirectory
from mm.checkpoint.mindspeed_layout import Layout
from tests import tiny
from tests.checkpoint.test_hf_config import FORMS
from tests.saved_hf import cast, weight_files


@pytest.fixture(scope="module")
def mm(saved, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("target") / "mm"
    convert.hf_to_mm(saved, target, Layout(((3, 1),), ((0, 4),), 2)).run(num_workers=1)
    return target


def without_weights(directory: Path, target: Path) -> Path:
    shutil.copytree(directory, target)
    for name in [*weight_files(target), "training_args.bin"]:
        (target / name).unlink()
    return target


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shard_bytes", [50_000, 5_000_000_000])
def test_transformers_loads_it(saved, mm, tmp_path, monkeypatch, form, shard_bytes):
    """Tried by hand: 4.57.6, 5.0.0 and 5.8.0 loaded the same directories with the same logits."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    base = without_weights(saved, tmp_path / "base")
    (base / "config.json").write_text(json.dumps(FORMS[form](HFDirectory.open(saved).config)))
    monkeypatch.setattr("mm.checkpoint.hf._SHARD_BYTES", shard_bytes)
    convert.mm_to_hf(mm, base, tmp_path / "out").run(num_workers=1)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    if shard_bytes == 50_000:
        assert [file.name for file in files] == [f"model-{i:05d}-of-{len(files):05d}.safetensors"
                                                 for i in range(1, len(files) + 1)]
        tensors = {name: (tensor, file.name) for file in files for name, tensor in load_file(file).items()}
        assert json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text()) == {
            "metadata": {"total_size": sum(tensor.nbytes for tensor, _ in tensors.values())},
            "weight_map": {name: file for name, (_, file) in tensors.items()},
        }
    else:
        assert list(weight_files(tmp_path / "out")) == ["model.safetensors"]

    model, report = Qwen2_5_VLForConditionalGeneration.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
        tmp_path / "out", output_loading_info=True)  # transformers' types lack the report
    assert not any(report.values()) and model.dtype == torch.bfloat16
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(saved, dtype=torch.float32)
    sample = tiny.random_sample(torch.Generator().manual_seed(0), ((1, 4, 6),), 9)
    assert torch.equal(tiny.hf_logits(model.float(), sample), tiny.hf_logits(reference, sample))


def test_config_json_states_the_dtype_of_the_source(saved, tmp_path):
    cast(saved, tmp_path / "wide", torch.float32)
    convert.hf_to_mm(tmp_path / "wide", tmp_path / "mm", Layout(((4,),), ((4,),), 1)).run(num_workers=1)
    convert.mm_to_hf(tmp_path / "mm", without_weights(saved, tmp_path / "base"), tmp_path / "out").run(num_workers=1)
    written = HFDirectory.open(tmp_path / "out")
    assert {tensor.dtype for tensor in written.tensors.values()} == {torch.float32}
    assert written.config["dtype"] == "float32" and "bfloat16" not in json.dumps(written.config)
