"""Hugging Face directories: real ones from transformers, round trips on disk, and tensors that fit no weight."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.formats.hf import HFDirectory, write_hf
from checkpoint.formats.hf_config import for_both_versions
from checkpoint.formats.hf_files import HFTensor
from checkpoint.formats.spelling import Spelling
from mm.config.model import ModelConfig
from mm.errors import UserError
from mm.weights.table import (
    HF_EMBEDDING_NAME,
    OUTPUT_LAYER_NAME,
    Weight,
    model_weights,
    shard,
    stage_weights,
    unshard,
)
from tests import tiny
from tests.checkpoint.formats.test_hf_config import flat
from tests.saved_hf import as_single_file, save, weight_files

VISION_LAYOUT, LANGUAGE_LAYOUT = ((1, 3, 0), (0, 0, 0)), ((0, 1, 1), (1, 0, 1))
"""Two chunks of three stages; the ViT ends in mid-stage and one slot is without any layer."""


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def saved(request, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("saved"), tied=request.param)


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """``saved``, to be changed."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_a_real_directory_is_covered_exactly(saved):
    hf = HFDirectory.open(saved)
    model = hf.model_config()
    hf.check(model)
    assert hf.unclaimed(model) == ()
    assert set(hf.tensors) == {name for weight in model_weights(model) for name in weight.hf_names}
    expected = tiny.our_config(((4,),), ((4,),), tied=model.language.tied)
    assert dataclasses.replace(
        model,
        vision=dataclasses.replace(model.vision, freeze=False, tokens_per_second=expected.vision.tokens_per_second),
    ) == expected


@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_rank_reads_its_shard_and_all_of_them_write_the_same_bytes(saved, tmp_path, tp_size):
    hf = HFDirectory.open(saved)
    model = hf.model_config(VISION_LAYOUT, LANGUAGE_LAYOUT)
    placement = model.placement()
    shards: dict[str, list[torch.Tensor]] = {}
    for spec in placement.slots:
        for weight in stage_weights(model, spec, placement):
            shards[weight.name] = [hf.load_weight(weight, tp_size, rank) for rank in range(tp_size)]
            whole = hf.load_weight(weight)
            for rank, local in enumerate(shards[weight.name]):
                assert local.dtype == torch.bfloat16 and torch.equal(local, shard(weight, whole, tp_size, rank))
    if model.language.tied:
        embedding = "text_decoder.embedding.word_embeddings.weight"
        assert all(map(torch.equal, shards[OUTPUT_LAYER_NAME], shards[embedding]))

    target = tmp_path / "new" / "export"
    write_hf(target, saved, model, lambda weight: unshard(weight, shards[weight.name]))
    assert weight_files(target) == weight_files(saved)
    copied = {file.name for file in target.iterdir()} - set(weight_files(target))
    assert copied == {"config.json", "generation_config.json", "tokenizer.json", "preprocessor_config.json"}
    assert all((target / name).read_bytes() == (saved / name).read_bytes() for name in copied - {"config.json"})
    assert json.loads((target / "config.json").read_text()) == for_both_versions(hf.config) != hf.config
    assert [path.name for path in target.parent.iterdir()] == ["export"]


def test_transformers_loads_what_was_written_and_computes_the_same(saved, tmp_path):
    from transformers import Qwen2_5_VLForConditionalGeneration

    hf = HFDirectory.open(saved)
    write_hf(tmp_path / "out", saved, hf.model_config(), hf.load_weight, dtype=torch.float32)
    written, report = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(saved, dtype=torch.float32)
    assert written.dtype == torch.float32
    sample = tiny.random_sample(torch.Generator().manual_seed(0), ((1, 4, 6),), 9)
    assert torch.equal(tiny.hf_logits(written, sample), tiny.hf_logits(reference, sample))


@pytest.mark.parametrize("spelling", Spelling)
def test_the_spelling_of_the_base_is_written_back(copy, tmp_path, spelling):
    tensors = as_single_file(copy, spelling)
    hf = HFDirectory.open(copy)
    write_hf(tmp_path / "out", copy, hf.model_config(), hf.load_weight)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert list(weight_files(tmp_path / "out")) == ["model.safetensors"]


def test_each_tensor_keeps_its_own_dtype_and_is_asked_for_once(copy, tmp_path):
    tensors = as_single_file(copy)
    tensors = {name: tensor.half() if "norm" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, copy / "model.safetensors")
    hf = HFDirectory.open(copy)
    asked = []

    def float32(weight: Weight) -> torch.Tensor:
        asked.append(weight.name)
        return hf.load_weight(weight, dtype=torch.float32)

    write_hf(tmp_path / "out", copy, hf.model_config(), float32)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == {n: t.dtype for n, t in tensors.items()}
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert sorted(asked) == sorted(weight.name for weight in model_weights(hf.model_config()))


def test_a_base_without_weights_gives_shards_of_limited_size(saved, copy, tmp_path, monkeypatch):
    for name in weight_files(copy):
        (copy / name).unlink()
    (copy / "training_args.bin").unlink()
    hf = HFDirectory.open(saved)
    write_hf(tmp_path / "one", copy, hf.model_config(), hf.load_weight)
    assert list(weight_files(tmp_path / "one")) == ["model.safetensors"]
    monkeypatch.setattr("checkpoint.formats.hf._SHARD_BYTES", 50_000)
    write_hf(tmp_path / "many", copy, hf.model_config(), hf.load_weight)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    for content in map(load_file, files):  # a tensor larger than the limit stands alone
        assert sum(tensor.nbytes for tensor in content.values()) <= 50_000 or len(content) == 1
    for out in ("one", "many"):
        written = HFDirectory.open(tmp_path / out)
        written.check(hf.model_config())
        assert all(torch.equal(written.load_weight(w), hf.load_weight(w)) for w in model_weights(hf.model_config()))
        assert {tensor.dtype for tensor in written.tensors.values()} == {torch.bfloat16}
    total_bytes = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    assert written.index["metadata"] == {"total_size": total_bytes}


def test_other_files_of_a_base_in_published_form_are_copied_to_the_byte(copy, tmp_path):
    published = json.dumps(flat(HFDirectory.open(copy).config), separators=(",", ":"))
    (copy / "config.json").write_text(published)
    hf = HFDirectory.open(copy)
    for dtype in (None, torch.bfloat16):  # which the config says already
        write_hf(tmp_path / str(dtype), copy, hf.model_config(), hf.load_weight, dtype=dtype)
        assert (tmp_path / str(dtype) / "config.json").read_text() == published


def test_a_given_dtype_is_written_into_the_config_too(saved, tmp_path):
    hf = HFDirectory.open(saved)
    write_hf(tmp_path / "out", saved, hf.model_config(), hf.load_weight, dtype=torch.float32)
    written = HFDirectory.open(tmp_path / "out")
    assert {tensor.dtype for tensor in written.tensors.values()} == {torch.float32}
    before, after = hf.config, written.config
    assert before["dtype"] == "bfloat16" and after["dtype"] == "float32"
    assert "bfloat16" not in json.dumps(after)
    assert after.keys() == before.keys()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * hf.index["metadata"]["total_size"]


def test_a_tied_model_may_carry_an_equal_output_layer_only(copy, tmp_path):
    tied = HFDirectory.open(copy).model_config().language.tied
    tensors = as_single_file(copy)
    if not tied:
        del tensors["lm_head.weight"]
        save_file(tensors, copy / "model.safetensors")
        with pytest.raises(UserError, match=r"lacks the tensor lm_head\.weight of shape .*untie_embeddings"):
            hf = HFDirectory.open(copy)
            hf.check(hf.model_config())
        return
    tensors["lm_head.weight"] = tensors[HF_EMBEDDING_NAME].clone()
    save_file(tensors, copy / "model.safetensors")
    hf = HFDirectory.open(copy)
    hf.check(hf.model_config())
    write_hf(tmp_path / "out", copy, hf.model_config(), hf.load_weight)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], tensors["lm_head.weight"])
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight, which is no weight of the model .*untie_embeddings"):
        HFDirectory.open(copy).check(hf.model_config())


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
        lambda: hf.load_weight(weight_of(model, hf_name), 2, 1),
        lambda: write_hf(tmp_path / "out", copy, model, hf.load_weight),
    ):
        with pytest.raises(UserError, match=says):
            act()
    assert not (tmp_path / "out").exists()


def test_leftover_tensors_are_named(copy):
    hf = changed_tensors(copy, **{"model.visual.extra.weight": torch.zeros(1)})
    assert hf.unclaimed(hf.model_config()) == ("model.visual.extra.weight",)
    with pytest.raises(UserError, match=r"model\.visual\.extra\.weight, which is no weight of the model"):
        hf.check(hf.model_config())


def test_weights_of_another_model_are_refused_by_their_config(saved):
    hf = HFDirectory.open(saved)
    model = hf.model_config()
    other = dataclasses.replace(model, language=dataclasses.replace(model.language, ffn_hidden_size=80))
    with pytest.raises(UserError, match=r"text_decoder\.ffn_hidden_size +80 +\| +72"):
        hf.check(other)


def test_targets_that_must_not_be_written_are_refused(saved, copy, tmp_path):
    hf = HFDirectory.open(saved)

    def write(target: Path, base: Path = saved, overwrite: bool = False) -> None:
        write_hf(target, base, hf.model_config(), hf.load_weight, overwrite=overwrite)

    for target in (copy, copy / ".." / "copy", tmp_path):
        with pytest.raises(UserError, match="is or contains the base directory"):
            write(target, base=copy, overwrite=True)
    with pytest.raises(UserError, match="is not empty"):
        write(copy)
    (copy / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        write(copy, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        write(tmp_path / "file")


def test_overwriting_replaces_the_whole_directory(saved, copy):
    (copy / "stale.txt").write_text("old")
    hf = HFDirectory.open(saved)
    write_hf(copy, saved, hf.model_config(), hf.load_weight, overwrite=True)
    assert not (copy / "stale.txt").exists() and weight_files(copy) == weight_files(saved)
    assert [path.name for path in copy.parent.iterdir()] == ["copy"]


def test_a_failed_write_leaves_the_target_as_it_was(saved, copy):
    hf = HFDirectory.open(saved)
    before = {file.name: file.read_bytes() for file in copy.iterdir()}

    def failing(weight: Weight) -> torch.Tensor:
        if weight.layer == 2:
            raise OSError("disk gone")
        return hf.load_weight(weight)

    with pytest.raises(OSError, match="disk gone"):
        write_hf(copy, saved, hf.model_config(), failing, overwrite=True)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before
    assert [path.name for path in copy.parent.iterdir()] == ["copy"]


def test_a_rank_reads_only_its_part(saved, monkeypatch):
    hf = HFDirectory.open(saved)
    sizes = []
    original = HFTensor.read

    def counted(self, dim, ranges):
        tensor = original(self, dim, ranges)
        sizes.append(tensor.numel())
        return tensor

    monkeypatch.setattr(HFTensor, "read", counted)
    model = hf.model_config()
    for hf_name in (HF_EMBEDDING_NAME, "model.layers.0.self_attn.q_proj.weight", "visual.blocks.0.attn.qkv.weight",
                    "visual.blocks.0.mlp.down_proj.weight"):  # fmt: skip
        weight = weight_of(model, hf_name)
        sizes.clear()
        hf.load_weight(weight, 2, 1)
        whole = sum(torch.Size(shape).numel() for shape in weight.hf_shapes)
        assert sum(sizes) == whole // 2


def test_every_file_has_the_mode_of_the_umask(saved, tmp_path):
    """A colleague who may read config.json may read the weights."""
    before = os.umask(0o027)
    try:
        write_hf(tmp_path / "out", saved, HFDirectory.open(saved).model_config(), HFDirectory.open(saved).load_weight)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}
