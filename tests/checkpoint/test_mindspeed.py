"""MindSpeed-MM's layout: the canonical structure, shards that hold whole heads, and files that no converter writes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mm.checkpoint.directories import LATEST_FILE
from mm.checkpoint.mindspeed import MindSpeedDirectory
from mm.checkpoint.mindspeed_layout import Structure, is_canonical_name, stored_weights
from mm.errors import UserError
from mm.weights.fuse import fuse, shard, unshard
from mm.weights.table import model_weights
from tests.mm_convert.models import SmallModel
from tests.unfuse import unfuse


def directory(root: Path, latest: str, file: str) -> Path:
    """A directory of one file, without a manifest."""
    (root / file).parent.mkdir(parents=True)
    (root / LATEST_FILE).write_text(latest)
    save_file({"text_decoder.decoder.final_layernorm.weight": torch.zeros(1)}, root / file)
    return root


@pytest.mark.parametrize(("latest", "file", "problem"), [
    ("", "release/mp_rank_00/model.safetensors", "contains '', but .* has no such directory; write the name"),
    ("..", "release/mp_rank_00/model.safetensors", "holds no mp_rank_\\* directories"),
    ("release", "release/mp_rank_00/model3000000.safetensors", "is not a weight file"),
    ("release", "release/mp_rank_00_3000000/model.safetensors", "is not named mp_rank_TT or mp_rank_TT_PPP"),
])
def test_names_that_no_converter_writes(latest: str, file: str, problem: str, tmp_path: Path) -> None:
    """The numbers would otherwise count millions of virtual chunks or stages."""
    with pytest.raises(UserError, match=problem):
        MindSpeedDirectory.open(directory(tmp_path, latest, file))


MODEL = SmallModel(4, vision_layers=1, language_layers=1, vision_ffn=6).model


def part(name: str):
    """The canonical tensor of this name."""
    return next(stored for weight in model_weights(MODEL) for stored in stored_weights(weight, Structure.CANONICAL)
                if stored.name == name)


def test_names_and_shapes():
    """MindSpeed-MM's names, which weights that are not split keep."""
    decoder, blocks = "text_decoder.decoder.layers.0", "image_encoder.encoder.blocks.layers.0"
    found = {stored.name: stored.hf_names for weight in model_weights(MODEL)
             for stored in stored_weights(weight, Structure.CANONICAL)}
    for kind in ("weight", "bias"):
        for hf in "qkv":
            hf_name = f"model.layers.0.self_attn.{hf}_proj.{kind}"
            assert found[f"{decoder}.self_attention.{hf}_proj.{kind}"] == (hf_name,)
        for hf in ("gate", "up"):
            assert found[f"{blocks}.mlp.{hf}_proj.{kind}"] == (f"visual.blocks.0.mlp.{hf}_proj.{kind}",)
        assert found[f"{blocks}.self_attention.linear_qkv.{kind}"] == (f"visual.blocks.0.attn.qkv.{kind}",)
    assert found[f"{decoder}.mlp.gate_proj.weight"] == ("model.layers.0.mlp.gate_proj.weight",)
    assert found[f"{decoder}.mlp.linear_fc2.weight"] == ("model.layers.0.mlp.down_proj.weight",)
    assert found[f"{decoder}.self_attention.linear_proj.weight"] == ("model.layers.0.self_attn.o_proj.weight",)
    apart = {name for name in found if is_canonical_name(name)}
    assert {name.split(".")[-2] for name in apart} == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    fused = {stored.name for weight in model_weights(MODEL) for stored in stored_weights(weight, Structure.FUSED)}
    assert fused == {weight.name for weight in model_weights(MODEL)}
    assert not any(is_canonical_name(name) for name in fused)


def test_a_shard_of_the_vit_qkv_holds_its_heads():
    """Reshaped to (3, local heads, head size), as in the runtime, it holds the rank's heads."""
    weight = part("image_encoder.encoder.blocks.layers.0.self_attention.linear_qkv.weight")
    whole = torch.randn(weight.shape)
    heads = whole.reshape(3, MODEL.vision.num_attention_heads, -1, weight.shape[1])
    assert fuse(weight, [whole]) is whole and torch.equal(unfuse(weight, whole)[0], whole)
    for tp_size in (1, 2, 4):
        shards = [shard(weight, whole, tp_size, rank) for rank in range(tp_size)]
        for rank, local in enumerate(shards):
            expected = heads.chunk(tp_size, dim=1)[rank]
            assert torch.equal(local.reshape(expected.shape), expected)
        assert torch.equal(unshard(weight, shards), whole)


def test_q_and_k_are_cut_between_groups_and_gate_is_padded():
    query = part("text_decoder.decoder.layers.0.self_attention.q_proj.weight")
    whole = torch.randn(query.shape)
    assert torch.equal(torch.cat([shard(query, whole, 4, rank) for rank in range(4)]), whole)
    gate = part("image_encoder.encoder.blocks.layers.0.mlp.gate_proj.bias")
    whole = torch.randn(gate.shape)
    shards = [shard(gate, whole, 4, rank) for rank in range(4)]  # 6 columns on 4 ranks
    assert torch.equal(torch.cat(shards), torch.cat([whole, torch.zeros(2)]))
