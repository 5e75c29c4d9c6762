"""Every cause is found in a directory with exactly that mistake, and in no other."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint.diff import diff_directories
from mm.conversion import convert
from mm.conversion.convert import Options
from mm.formats.layout import Layout
from mm.formats.storage import Format, Storage
from tests.checkpoint.models import SmallModel

SMALL = SmallModel(2, vision_ffn=5, language_ffn=6)
LAYOUT = Layout(((2, 0),), ((1, 2),), 2)
LANGUAGE, VISION = "text_decoder.decoder.layers.0", "image_encoder.encoder.blocks.layers.1"
HF_LANGUAGE, HF_VISION = "model.layers.0", "visual.blocks.1"

Tensors = dict[str, Tensor]


@pytest.fixture
def hf(tmp_path) -> Path:
    SMALL.save(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def mm(hf) -> Path:
    return to_mm(hf)


def to_mm(hf: Path, layout: Layout = LAYOUT, kind: Storage | None = None) -> Path:
    convert.hf_to_mm(hf, hf.with_name("mm"), layout, kind).run(Options(num_workers=1))
    return hf.with_name("mm")


def read_hf(directory: Path) -> Tensors:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def rewrite_hf(directory: Path, changes: Tensors) -> None:
    for path in directory.glob("*.safetensors"):
        content = load_file(path)
        save_file({name: changes.get(name, tensor).contiguous().clone() for name, tensor in content.items()}, path,
                  metadata={"format": "pt"})


def rank_file(directory: Path, rank: int, stage: int = 0) -> Path:
    return directory / "release" / f"mp_rank_{rank:02d}_{stage:03d}" / "model.safetensors"


def rewrite_mm(directory: Path, name: str, make: Callable[[int, Tensor], Tensor], stage: int = 0) -> None:
    """Replace a tensor on every rank with the result of ``make`` for the rank and the tensor."""
    for rank in range(2):
        path = rank_file(directory, rank, stage)
        content = load_file(path)
        content[name] = make(rank, content[name]).contiguous().clone()
        save_file(content, path, metadata={"format": "pt"})


def causes(source: Path, target: Path) -> list[str]:
    """The causes that diff reports, for all tensors in model order."""
    found = diff_directories(source, target, None, 1)
    assert not found.is_equal
    return [line.partition("likely cause: ")[2] for line in found.lines if "likely cause: " in line]


def qkv(tensors: Tensors) -> list[Tensor]:
    return [tensors[f"{HF_LANGUAGE}.self_attn.{letter}_proj.weight"] for letter in "qkv"]


def gate_up(tensors: Tensors) -> list[Tensor]:
    return [tensors[f"{HF_LANGUAGE}.mlp.{name}_proj.weight"] for name in ("gate", "up")]


# qkv order


def test_stacked_language_qkv(hf, mm):
    parts = [part.chunk(2) for part in qkv(read_hf(hf))]
    rewrite_mm(mm, f"{LANGUAGE}.self_attention.linear_qkv.weight",
               lambda rank, _: torch.cat([part[rank] for part in parts]))
    # with one group per rank this is the correct order
    assert diff_directories(hf, mm, None, 1).is_equal


@pytest.mark.parametrize("swap", [False, True])
def test_stacked_qkv_of_two_groups_per_rank(tmp_path, swap):
    SmallModel(4).save(tmp_path / "hf")
    mm = to_mm(tmp_path / "hf")
    parts = [part.chunk(2) for part in qkv(read_hf(tmp_path / "hf"))]
    parts = [parts[0], parts[2], parts[1]] if swap else parts
    rewrite_mm(mm, f"{LANGUAGE}.self_attention.linear_qkv.weight",
               lambda rank, _: torch.cat([part[rank] for part in parts]))
    order = "[Q; V; K]" if swap else "[Q; K; V]"
    assert causes(tmp_path / "hf", mm) == [f"qkv order: {order} one after the other (in {mm})"]
    # in reverse, the order of the Hugging Face directory is suspected
    assert causes(mm, tmp_path / "hf")[0].startswith("qkv order: ")


def test_stacked_vision_qkv(hf, tmp_path):
    SmallModel(4).save(tmp_path / "more" / "hf")
    mm = to_mm(tmp_path / "more" / "hf")
    whole = read_hf(tmp_path / "more" / "hf")[f"{HF_VISION}.attn.qkv.weight"]
    rewrite_mm(mm, f"{VISION}.self_attention.linear_qkv.weight",
               lambda rank, _: torch.cat([part.chunk(2)[rank] for part in whole.chunk(3)]))
    assert causes(tmp_path / "more" / "hf", mm) == [f"qkv order: [Q; K; V] one after the other (in {mm})"]


def test_vision_qkv_cut_as_a_whole(hf, mm):
    whole = read_hf(hf)[f"{HF_VISION}.attn.qkv.weight"]
    rewrite_mm(mm, f"{VISION}.self_attention.linear_qkv.weight", lambda rank, _: whole.chunk(2)[rank])
    assert causes(hf, mm) == ["qkv order: [Q; K; V] one after the other as a whole, and then cut, as MindSpeed-MM "
                              f"2.2.0 and 2.3.0 leave the ViT's; convert again with mm-convert hf_to_mm (in {mm})"]


def test_vision_qkv_of_two_releases_of_mindspeed_mm(hf):
    mm = to_mm(hf, Layout(((2,),), ((3,),), 1))
    path = mm / "release" / "mp_rank_00" / "model.safetensors"
    content, tensors = load_file(path), read_hf(hf)
    for layer in range(2):
        for kind in ("weight", "bias"):
            name = f"image_encoder.encoder.blocks.layers.{layer}.self_attention.linear_qkv.{kind}"
            content[name] = tensors[f"visual.blocks.{layer}.attn.qkv.{kind}"]
    save_file(content, path)
    assert causes(hf, mm) == ["qkv order: [Q; K; V] one after the other, as MindSpeed-MM 2.2.0 and 2.3.0 leave the "
                            f"ViT's; convert again with mm-convert hf_to_mm (in {mm})"] * 4


def test_hf_that_was_never_ungrouped(hf, mm):
    """The fused tensor was cut into q, k and v without reordering its rows."""
    tensors = read_hf(hf)
    fused = torch.cat([load_file(rank_file(mm, rank))[f"{LANGUAGE}.self_attention.linear_qkv.weight"]
                       for rank in range(2)])
    names = [f"{HF_LANGUAGE}.self_attn.{letter}_proj.weight" for letter in "qkv"]
    rewrite_hf(hf, dict(zip(names, fused.split([tensors[name].shape[0] for name in names]), strict=True)))
    assert causes(mm, hf) == [f"qkv order: per group [q, k, v] (in {hf})"]


def test_k_and_v_swapped_in_hf(hf, mm):
    tensors = read_hf(hf)
    k, v = (f"{HF_LANGUAGE}.self_attn.{letter}_proj.weight" for letter in "kv")
    rewrite_hf(hf, {k: tensors[v], v: tensors[k]})
    assert causes(mm, hf) == [f"qkv order: [Q; V; K] one after the other (in {hf})"]


# gate/up order


@pytest.mark.parametrize("kind", [Storage(), Storage(Format.TORCH)])
def test_up_before_gate(hf, kind):
    mm = to_mm(hf, kind=kind)
    parts = [part.chunk(2) for part in gate_up(read_hf(hf))]
    name = f"{LANGUAGE}.mlp.linear_fc1.weight"
    if kind.format is Format.TORCH:
        for rank in range(2):
            path = rank_file(mm, rank).with_name("model_optim_rng.pt")
            content = torch.load(path, weights_only=True)
            content["model"][name] = torch.cat([parts[1][rank], parts[0][rank]])
            torch.save(content, path)
    else:
        rewrite_mm(mm, name, lambda rank, _: torch.cat([parts[1][rank], parts[0][rank]]))
    assert causes(hf, mm) == [f"gate/up order: [up; gate] instead of [gate; up] (in {mm})"]


def test_gate_up_cut_as_a_whole(hf, mm):
    whole = torch.cat(gate_up(read_hf(hf)))
    rewrite_mm(mm, f"{LANGUAGE}.mlp.linear_fc1.weight", lambda rank, _: whole.chunk(2)[rank])
    (cause,) = causes(hf, mm)
    assert cause == (f"gate/up order: [gate; up] is cut over the ranks as a whole, instead of gate and up each (in "
                     f"{mm})")


# Tied head


def test_head_that_is_the_embedding(hf, mm):
    rewrite_hf(hf, {"lm_head.weight": read_hf(hf)["model.embed_tokens.weight"]})
    assert causes(mm, hf) == [f"tied head: the output layer is the embedding (in {hf})"]
    assert causes(hf, mm) == [f"tied head: the output layer is the embedding (in {hf})"]


def test_stale_copy_of_the_embedding(tmp_path):
    SmallModel(2, tied=True).save(tmp_path / "hf")
    mm = to_mm(tmp_path / "hf")
    rewrite_mm(mm, "text_decoder.output_layer.weight", lambda _, tensor: tensor + 1, stage=1)
    expected = "tied head: the output layer is a stale copy of the embedding"
    assert causes(tmp_path / "hf", mm) == [expected] * 2
    assert causes(mm, tmp_path / "hf") == [expected] * 2


@pytest.mark.parametrize("is_copy", [False, True])
def test_tied_and_untied(tmp_path, is_copy):
    SmallModel(2, tied=True).save(tmp_path / "hf")
    mm = to_mm(tmp_path / "hf")
    SmallModel(2).save(tmp_path / "untied")
    tensors = read_hf(tmp_path / "hf")
    rewrite_hf(tmp_path / "untied", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + (not is_copy)})
    (cause,) = causes(tmp_path / "untied", mm)
    assert cause.startswith("tied head: it equals" if is_copy else "tied head: it is not a copy of")


# Transposed cut


def test_shards_in_the_wrong_order(hf, mm):
    name = f"{LANGUAGE}.mlp.linear_fc2.weight"
    parts = read_hf(hf)[f"{HF_LANGUAGE}.mlp.down_proj.weight"].chunk(2, dim=1)
    rewrite_mm(mm, name, lambda rank, _: parts[1 - rank])
    assert causes(hf, mm) == [f"transposed cut: the ranks 0, 1 hold the shards of the ranks 1, 0 (in {mm})"]
    rewrite_mm(mm, name, lambda rank, _: parts[1])
    assert causes(hf, mm) == [f"transposed cut: the ranks 0, 1 hold the shards of the ranks 1, 1 (in {mm})"]


def test_transposed_square_matrix_in_hf(hf, mm):
    names = [f"{HF_LANGUAGE}.self_attn.{kind}_proj.weight" for kind in "qo"]
    tensors = read_hf(hf)
    rewrite_hf(hf, {name: tensors[name].T for name in names})
    assert causes(mm, hf) == [f"transposed cut: the matrix is transposed (in {hf})"] * 2


def test_transposed_before_the_cut(hf, mm):
    whole = read_hf(hf)[f"{HF_LANGUAGE}.self_attn.o_proj.weight"]
    rewrite_mm(mm, f"{LANGUAGE}.self_attention.linear_proj.weight", lambda rank, _: whole.T.chunk(2, dim=1)[rank])
    assert causes(hf, mm) == [f"transposed cut: the matrix was transposed and then cut (in {mm})"]


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        (lambda whole, rank: whole.chunk(2, dim=0)[rank], "it is cut along dimension 0 instead of 1"),
        (lambda whole, rank: whole, "every rank holds the whole matrix, uncut"),
        (lambda whole, rank: whole.chunk(2, dim=1)[rank].T, "the matrix is transposed"),
    ],
)
def test_shards_of_another_shape(hf, mm, wrong, cause):
    name = f"{LANGUAGE}.mlp.linear_fc2.weight"
    whole = read_hf(hf)[f"{HF_LANGUAGE}.mlp.down_proj.weight"]
    rewrite_mm(mm, name, lambda rank, _: wrong(whole, rank))
    assert causes(hf, mm) == [f"transposed cut: {cause} (in {mm})"]
    # the same shape with other values does not have this cause
    rewrite_mm(mm, name, lambda rank, tensor: tensor + 1)
    assert causes(hf, mm) == []


# Padding


def test_padding_that_is_not_zero(hf, mm):
    def trained(rank: int, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[:, -1] += rank
        return tensor

    rewrite_mm(mm, f"{VISION}.mlp.linear_fc2.weight", trained)
    found = diff_directories(hf, mm, None, 1)
    assert found.lines[2] == ("69 of 69 tensors of the model are bit-equal; stored with padding that is not zero: "
                              "1 tensor.")
    assert found.lines[3:] == (
        f"{HF_VISION}.mlp.down_proj.weight: padding that is not zero",
        f"    {rank_file(mm, 1)}: {VISION}.mlp.linear_fc2.weight",
        "    likely cause: padding: it was trained, is damaged, or is in the wrong place",
    )
    assert diff_directories(mm, hf, None, 1).lines[3:] == found.lines[3:]


def zero_padded(tensor: Tensor, dim: int, before: int, after: int) -> Tensor:
    zeros = [torch.zeros([size if d != dim else count for d, size in enumerate(tensor.shape)], dtype=tensor.dtype)
             for count in (before, after)]
    return torch.cat([zeros[0], tensor, zeros[1]], dim=dim)


def test_padding_in_the_wrong_place(tmp_path):
    """6 columns over 4 ranks: 2, 2, 2 and 0, not 2, 2, 1 and 1."""
    SmallModel(4, vision_ffn=6).save(tmp_path / "hf")
    mm = to_mm(tmp_path / "hf", Layout(((2, 0),), ((1, 2),), 4))
    tensors = read_hf(tmp_path / "hf")
    down = tensors[f"{HF_VISION}.mlp.down_proj.weight"]
    halves = [tensors[f"{HF_VISION}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    at_start = zero_padded(down, 1, 2, 0).chunk(4, dim=1)
    for rank in range(4):
        content = load_file(rank_file(mm, rank))
        content[f"{VISION}.mlp.linear_fc2.weight"] = at_start[rank].contiguous()
        pieces = [half.tensor_split(4)[rank] for half in halves]
        content[f"{VISION}.mlp.linear_fc1.weight"] = torch.cat(
            [zero_padded(piece, 0, 0, 2 - len(piece)) for piece in pieces])
        save_file(content, rank_file(mm, rank))
    assert causes(tmp_path / "hf", mm) == [f"padding: not at the end of the weights (in {mm})"] * 2


def test_gate_up_padded_as_a_whole(hf, mm):
    tensors = read_hf(hf)
    stacked = torch.cat([tensors[f"{HF_VISION}.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    rewrite_mm(mm, f"{VISION}.mlp.linear_fc1.weight", lambda rank, _: zero_padded(stacked, 0, 0, 2).chunk(2)[rank])
    assert causes(hf, mm) == ["gate/up order: [gate; up] is cut over the ranks as a whole, instead of gate and up "
                              f"each, with the padding after both (in {mm})"]


# Values


def test_one_flipped_bit(hf, mm):
    name = "model.embed_tokens.weight"
    tensor = read_hf(hf)[name]
    tensor.view(torch.int16)[5, 3] ^= 1 << 9
    rewrite_hf(hf, {name: tensor})
    assert causes(mm, hf) == ["one flipped bit: a damaged copy"]
    tensor.view(torch.int16)[5, 3] ^= 3 << 4
    rewrite_hf(hf, {name: tensor})
    assert causes(mm, hf) == ["a few values differ, as in a damaged copy or after very little training"]


@pytest.mark.parametrize("keeps_dtype", [False, True])
def test_rounding(hf, keeps_dtype):
    generator = torch.Generator().manual_seed(1)
    wide = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in read_hf(hf).items()}
    rewrite_hf(hf, wide)
    mm = to_mm(hf)
    name = "model.norm.weight"
    narrow = wide[name].bfloat16()
    rewrite_hf(hf, {name: narrow.float() if keeps_dtype else narrow})
    expected = f"dtype: rounded to bfloat16 (in {hf})" if keeps_dtype else (
        f"dtype: {hf} holds the values of {mm}, rounded to bfloat16")
    assert causes(mm, hf) == [expected]
    found = diff_directories(mm, hf, None, 1)
    assert ("    float32 and bfloat16" in found.lines) != keeps_dtype


def test_layers_shifted_by_one(hf, mm):
    tensors = read_hf(hf)
    shifted = {name: tensors[name.replace("layers.0.", "layers.1.")] for name in tensors if "layers.0." in name}
    rewrite_hf(hf, shifted)
    found = causes(mm, hf)
    assert len(found) == 7 and set(found) == {
        f"another layer: these are the weights of layer 1 (+1) of {mm} (in {hf})"}


def test_zeros_and_values_that_are_not_numbers(hf, mm):
    name, other = "model.norm.weight", f"{HF_LANGUAGE}.mlp.down_proj.weight"
    tensors = read_hf(hf)
    tensors[other][0, 0] = float("nan")
    tensors[other][1] += 1
    rewrite_hf(hf, {name: torch.zeros_like(tensors[name]), other: tensors[other]})
    assert causes(mm, hf) == [f"infinite values or NaN (in {hf})",
                            f"only zeros, as if never written (in {hf})"]
    assert any("elements differ, some infinite or NaN; the first is [0, 0]" in line
               for line in diff_directories(mm, hf, None, 1).lines)


def test_constant_tensors_prove_nothing(hf):
    """An embedding of zeros does not prove a tied head, nor norms of ones another layer."""
    norm = "model.layers.{}.input_layernorm.weight"
    tensors = read_hf(hf)
    ones = {norm.format(layer): torch.ones_like(tensors[norm.format(layer)]) for layer in range(3)}
    zeros = torch.zeros_like(tensors["lm_head.weight"])
    rewrite_hf(hf, ones | {"lm_head.weight": zeros, "model.embed_tokens.weight": zeros})
    mm = to_mm(hf)
    rewrite_hf(hf, {norm.format(1): tensors[norm.format(1)], "lm_head.weight": tensors["lm_head.weight"]})
    expected = ["values differ, as after training", f"only zeros, as if never written (in {mm})"]
    assert causes(mm, hf) == causes(hf, mm) == expected


def test_training(hf, mm):
    tensors = read_hf(hf)
    generator = torch.Generator().manual_seed(1)
    rewrite_hf(hf, {name: tensor + torch.randn(tensor.shape, generator=generator) / 100
                    for name, tensor in tensors.items()})
    found = diff_directories(mm, hf, None, 1)
    assert causes(mm, hf) == ["values differ, as after training"] * 10
    assert found.lines[-1].endswith("more weights differ in the model after these.")
