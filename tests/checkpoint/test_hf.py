"""Hugging Face directories: saved by transformers, round trips on disk, and tensors that match no weight."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mm.checkpoint import convert
from mm.checkpoint.hf import HFDirectory
from mm.checkpoint.hf_config import for_both_versions
from mm.checkpoint.mindspeed_layout import Layout
from mm.checkpoint.source import open_source, open_to_train
from mm.checkpoint.tensor_io import Files
from mm.config.model import ModelConfig
from mm.errors import UserError
from mm.weights.fuse import shard
from mm.weights.table import OUTPUT_LAYER_NAME, Weight, model_weights, stage_weights
from tests import tiny
from tests.checkpoint.test_hf_config import flat
from tests.saved_hf import as_single_file, cast, weight_files

VISION_LAYOUT, LANGUAGE_LAYOUT = ((1, 3, 0), (0, 0, 0)), ((0, 1, 1), (1, 0, 1))
"""Two chunks of three stages; the ViT ends within a stage and one slot has no layer."""


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """A copy of ``saved`` for changes."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def rewritten(source: Path, base: Path, target: Path, tp_size: int = 1) -> None:
    """Convert to two chunks of three stages, and back to a new directory modelled on ``base``."""
    mm = target.parent / f"{target.name}-mm"
    convert.hf_to_mm(source, mm, Layout(VISION_LAYOUT, LANGUAGE_LAYOUT, tp_size)).run(num_workers=1)
    convert.mm_to_hf(mm, base, target).run(num_workers=1)
    shutil.rmtree(mm)


def test_a_real_directory_is_covered_exactly(saved):
    hf = HFDirectory.open(saved)
    model = hf.model_config()
    hf.check(model)
    assert set(hf.tensors) == {name for weight in model_weights(model) for name in weight.hf_names}
    expected = tiny.our_config(((4,),), ((4,),), tied=model.language.tied)
    assert dataclasses.replace(
        model,
        vision=dataclasses.replace(model.vision, freeze=False, tokens_per_second=expected.vision.tokens_per_second),
    ) == expected


@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_rank_reads_its_shard_and_writing_them_gives_the_same_bytes(saved, tmp_path, tp_size):
    hf, source = HFDirectory.open(saved), open_source(saved)
    model = Layout(VISION_LAYOUT, LANGUAGE_LAYOUT, tp_size).place(source.model)
    placement = model.placement()
    shards: dict[str, list[torch.Tensor]] = {}
    for spec in placement.slots:
        for weight in stage_weights(model, spec):
            shards[weight.name] = [source.read(weight, tp_size, rank, torch.bfloat16) for rank in range(tp_size)]
            whole = source.read(weight, 1, 0, torch.bfloat16)
            for rank, local in enumerate(shards[weight.name]):
                assert local.dtype == torch.bfloat16 and torch.equal(local, shard(weight, whole, tp_size, rank))
    if model.language.tied:
        embedding = "text_decoder.embedding.word_embeddings.weight"
        assert all(map(torch.equal, shards[OUTPUT_LAYER_NAME], shards[embedding]))

    target = tmp_path / "new" / "export"
    rewritten(saved, saved, target, tp_size)
    assert weight_files(target) == weight_files(saved)
    copied = {file.name for file in target.iterdir()} - set(weight_files(target))
    assert copied == {"config.json", "generation_config.json", "tokenizer.json", "preprocessor_config.json"}
    assert all((target / name).read_bytes() == (saved / name).read_bytes() for name in copied - {"config.json"})
    assert json.loads((target / "config.json").read_text()) == for_both_versions(hf.config) != hf.config
    assert [path.name for path in target.parent.iterdir()] == ["export"]


def test_transformers_loads_a_written_directory_and_computes_the_same(saved, tmp_path):
    from transformers import Qwen2_5_VLForConditionalGeneration

    rewritten(cast(saved, tmp_path / "wide", torch.float32), saved, tmp_path / "out")
    written, report = Qwen2_5_VLForConditionalGeneration.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
        tmp_path / "out", output_loading_info=True)  # transformers' types lack the report
    assert not any(report.values())
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(saved, dtype=torch.float32)
    assert written.dtype == torch.float32
    sample = tiny.random_sample(torch.Generator().manual_seed(0), ((1, 4, 6),), 9)
    assert torch.equal(tiny.hf_logits(written, sample), tiny.hf_logits(reference, sample))


def test_each_tensor_keeps_its_dtype(copy, tmp_path):
    tensors = as_single_file(copy)
    tensors = {name: tensor.half() if "norm" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    rewritten(copy, copy, tmp_path / "out")
    assert weight_files(tmp_path / "out") == weight_files(copy)


def test_a_base_without_weights_gives_shards_of_limited_size(saved, copy, tmp_path, monkeypatch):
    for name in weight_files(copy):
        (copy / name).unlink()
    (copy / "training_args.bin").unlink()
    hf = HFDirectory.open(saved)
    rewritten(saved, copy, tmp_path / "one")
    assert list(weight_files(tmp_path / "one")) == ["model.safetensors"]
    monkeypatch.setattr("mm.checkpoint.hf._SHARD_BYTES", 50_000)
    rewritten(saved, copy, tmp_path / "many")
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    for content in map(load_file, files):  # a tensor larger than the limit has its own file
        assert sum(tensor.nbytes for tensor in content.values()) <= 50_000 or len(content) == 1
    expected = {name: tensor for file in saved.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for out in ("one", "many"):
        written = HFDirectory.open(tmp_path / out)
        written.check(hf.model_config())
        found = {name: tensor for file in (tmp_path / out).glob("*.safetensors")
                 for name, tensor in load_file(file).items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert {tensor.dtype for tensor in written.tensors.values()} == {torch.bfloat16}
    total_bytes = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    assert written.index["metadata"] == {"total_size": total_bytes}


def test_other_files_of_a_base_in_published_form_are_copied_byte_for_byte(copy, tmp_path):
    published = json.dumps(flat(HFDirectory.open(copy).config), separators=(",", ":"))
    (copy / "config.json").write_text(published)
    rewritten(copy, copy, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == published


def test_the_dtype_of_the_source_is_kept_and_written_into_the_config(saved, tmp_path):
    """float32 weights are not rounded to the base's bfloat16."""
    wide = cast(saved, tmp_path / "wide", torch.float32)
    rewritten(wide, saved, tmp_path / "out")
    hf, written = HFDirectory.open(saved), HFDirectory.open(tmp_path / "out")
    assert {tensor.dtype for tensor in written.tensors.values()} == {torch.float32}
    before, after = hf.config, written.config
    assert before["dtype"] == "bfloat16" and after["dtype"] == "float32"
    assert "bfloat16" not in json.dumps(after)
    assert after.keys() == for_both_versions(before).keys()
    assert written.contents.keys() == hf.contents.keys()
    for file in written.contents:
        expected, found = load_file(wide / file), load_file(tmp_path / "out" / file)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == hf.index["weight_map"]
    assert index["metadata"]["total_size"] == 2 * hf.index["metadata"]["total_size"]


def test_a_tied_model_may_only_have_an_equal_output_layer(copy, tmp_path):
    tied = HFDirectory.open(copy).model_config().language.tied
    tensors = as_single_file(copy)
    if not tied:
        del tensors["lm_head.weight"]
        save_file(tensors, copy / "model.safetensors")
        with pytest.raises(UserError, match=r"lacks the tensor lm_head\.weight of shape .*untie_embeddings"):
            hf = HFDirectory.open(copy)
            hf.check(hf.model_config())
        return
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, copy / "model.safetensors")
    rewritten(copy, copy, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], tensors["lm_head.weight"])
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight .*untie_embeddings"):
        open_source(copy).check()
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight, which is not a weight of the model .*untie_embeddings"):
        open_source(copy)


def changed_tensors(directory: Path, **changes: torch.Tensor | None) -> HFDirectory:
    tensors = {name: tensor for name, tensor in as_single_file(directory).items()}
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors")
    return HFDirectory.open(directory)


def weight_of(model: ModelConfig, hf_name: str) -> Weight:
    return next(weight for weight in model_weights(model) if hf_name in weight.hf_names)


@pytest.mark.parametrize(("hf_name", "tensor", "says"), [
    ("model.layers.2.mlp.up_proj.weight", None, r"lacks the tensor model\.layers\.2\.mlp\.up_proj\.weight of shape"),
    ("visual.blocks.1.attn.qkv.bias", torch.zeros(5), r"visual\.blocks\.1\.attn\.qkv\.bias has shape \[5\].* \[96\]"),
])  # fmt: skip
def test_missing_and_misshapen_tensors_are_named(copy, tmp_path, hf_name, tensor, says):
    hf = changed_tensors(copy, **{hf_name: tensor})
    model = hf.model_config()
    for act in (
        lambda: hf.check(model),
        lambda: open_to_train(copy, model),
        lambda: rewritten(copy, copy, tmp_path / "out"),
    ):
        with pytest.raises(UserError, match=says):
            act()
    assert not (tmp_path / "out").exists()


def test_a_rank_reads_only_its_part(saved, monkeypatch):
    source, original = open_source(saved), Files.read
    sizes = []

    def counted(self, stored, start, into):
        sizes.append(len(into))
        original(self, stored, start, into)

    monkeypatch.setattr(Files, "read", counted)
    for hf_name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight",
                    "visual.blocks.0.attn.qkv.weight", "visual.blocks.0.mlp.down_proj.weight"):  # fmt: skip
        weight = weight_of(source.model, hf_name)
        sizes.clear()
        source.read(weight, 2, 1, torch.bfloat16)
        whole = sum(2 * torch.Size(shape).numel() for shape in weight.hf_shapes)
        assert sum(sizes) == whole // 2
