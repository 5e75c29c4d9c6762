"""Model and data JSON: what loads, what is refused, and with which message."""

import copy
import json
from pathlib import Path

import pytest

from mm.config.data import read_data
from mm.config.layers import layers_in
from mm.config.model import placement_notes, read_model
from mm.errors import UserError
from tests.files import EXAMPLES

VISION, PROJECTOR, LANGUAGE = "image_encoder.vision_encoder", "image_encoder.vision_projector", "text_decoder"
ABSENT = object()


def changed(name: str, changes: dict[str, object]) -> dict:
    """An example file with the given key paths set, or removed if the value is ABSENT."""
    root = copy.deepcopy(json.loads((EXAMPLES / name).read_text()))
    for key_path, value in changes.items():
        *parents, key = key_path.split(".")
        found = root
        for parent in parents:
            found = found.setdefault(parent, {})
        if value is ABSENT:
            del found[key]
        else:
            found[key] = value
    return root


def write(tmp_path, root: dict) -> Path:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(root, indent=4))
    return path


def model(tmp_path, **changes):
    return read_model(write(tmp_path, changed("model_7b.json", changes))).value


def problems(read, tmp_path, name, changes) -> list[str]:
    with pytest.raises(UserError) as caught:
        read(write(tmp_path, changed(name, changes)))
    return list(caught.value.problems)


def test_sizes_of_the_7b_model():
    config = read_model(EXAMPLES / "model_7b.json").value
    vision, language = config.vision, config.language
    assert (vision.num_layers, vision.hidden_size, vision.num_attention_heads, vision.head_dim) == (32, 1280, 16, 80)
    assert vision.fullatt_block_indexes == (7, 15, 23, 31)
    assert vision.pipeline_num_layers == ((32, 0),)
    assert (language.num_layers, language.hidden_size, language.ffn_hidden_size) == (28, 3584, 18944)
    assert (language.num_attention_heads, language.num_query_groups, language.kv_channels) == (28, 4, 128)
    assert language.mrope_section == (16, 24, 24)
    assert (config.num_stages, config.num_chunks, config.image_token_id) == (2, 1, 151655)
    assert (vision.freeze, config.projector.freeze, language.freeze, language.tied) == (True, True, False, False)
    assert read_model(EXAMPLES / "model_3b.json").value.language.tied


def test_a_whole_encoder_does_not_restrict_the_tensor_parallel_size(tmp_path):
    """Each rank has all heads of the ViT, here 6, which 4 does not divide."""
    odd = {f"{VISION}.num_attention_heads": 6, f"{VISION}.hidden_size": 96, f"{PROJECTOR}.input_size": 96,
           f"{PROJECTOR}.ffn_hidden_size": 384}  # fmt: skip
    cut, whole = (model(tmp_path, encoder_placement=one, **odd) for one in (None, "tensor_ranks"))
    assert (cut.encoder_placement, cut.tp_sizes, cut.encodes_whole) == ("cut", (1, 2), False)
    assert (whole.encoder_placement, whole.tp_sizes, whole.encodes_whole) == ("tensor_ranks", (1, 2, 4), True)
    (problem,) = problems(read_model, tmp_path, "model_7b.json", {"encoder_placement": "tensor_rank"})
    assert 'encoder_placement is "tensor_rank"; supported: "cut" or "tensor_ranks"' in problem
    assert not [*placement_notes(whole, 2, "m.json")]
    (note,) = placement_notes(whole, 1, "m.json")
    assert str(note) == "encoder_placement of m.json: no effect: there is one tensor-parallel rank"


def test_images_are_encoded_together_where_one_slot_has_the_whole_vit(tmp_path):
    whole = model(tmp_path, encoder_batch_microbatches=4)
    assert (whole.encoder_batch_microbatches, whole.encoder_batch_size) == (4, 4)
    assert model(tmp_path, encoder_batch_microbatches=None).encoder_batch_size == 1
    assert not [*placement_notes(whole, 1, "m.json")]
    divided = model(tmp_path, **{"encoder_batch_microbatches": 4, f"{VISION}.pipeline_num_layers": [20, 12],
                                 f"{LANGUAGE}.pipeline_num_layers": [0, 28]})
    assert divided.encoder_batch_size == 1
    (note,) = placement_notes(divided, 1, "m.json")
    assert str(note) == (f"encoder_batch_microbatches of m.json: no effect: {VISION}.pipeline_num_layers divides the "
                         f"ViT over several positions; put all of its layers on one")
    (problem,) = problems(read_model, tmp_path, "model_7b.json", {"encoder_batch_microbatches": 0})
    assert "encoder_batch_microbatches is 0" in problem


def test_layers_and_words_that_freeze(tmp_path):
    config = model(tmp_path, **{f"{VISION}.freeze_layers": "0-2, 5", f"{LANGUAGE}.freeze_layers": None,
                                "freeze_modules": ["norm", "bias"]})
    assert layers_in(config.vision.freeze_layers) == {0, 1, 2, 5} and not layers_in(config.language.freeze_layers)
    assert (config.freeze_modules, config.trainable_modules) == (("norm", "bias"), ())


def test_aliases_and_recompute(tmp_path):
    config = model(tmp_path, **{f"{LANGUAGE}.rope_theta": ABSENT, f"{LANGUAGE}.rotary_base": 5000,
                                f"{LANGUAGE}.recompute_granularity": "full", f"{LANGUAGE}.recompute_method": "block",
                                f"{LANGUAGE}.recompute_num_layers": 2, f"{VISION}.recompute_granularity": "selective"})
    assert config.language.rope_theta == 5000.0
    recompute = config.language.recompute
    assert (recompute.granularity, recompute.method, recompute.num_layers) == ("full", "block", 2)
    assert config.vision.recompute.granularity == "selective"


def test_the_video_token_as_image_token_is_read_as_mindspeed_mm_writes_it(tmp_path):
    read = read_model(write(tmp_path, changed("model_7b.json", {"img_context_token_id": 151656})))
    assert read.value.visual_token_ids == (151655, 151656)
    assert any("img_context_token_id is 151656, which is the video token" in note for note in read.notes)


@pytest.mark.parametrize(("changes", "what"), [
    ({f"{LANGUAGE}.num_layer": 28}, "text_decoder.num_layer is not a known key (did you mean 'num_layers'?)"),
    ({f"{LANGUAGE}.activation_func": "gelu"}, 'text_decoder.activation_func is "gelu"; supported: "silu"'),
    ({f"{LANGUAGE}.rope_scaling": {"type": "dynamic"}}, "supported: null"),
    ({f"{LANGUAGE}.add_qkv_bias": False}, "add_qkv_bias is false; supported: true"),
    ({f"{VISION}.hidden_size": True}, "hidden_size is true; expected an integer of at least 1"),
    ({f"{LANGUAGE}.vocab_size": ABSENT}, "text_decoder.vocab_size is missing; expected an integer"),
    ({"text_decoder": ABSENT}, "text_decoder is missing; expected an object"),
    ({"patch": {"use_fsdp1": True}}, "patch.use_fsdp1 is true; supported: null or false"),
    ({"img_context_token_id": 151655, "video_token_id": 151655}, "and video_token_id are both 151655; expected the"),
    ({"video_token_id": 152064}, "video_token_id is 152064 and vision_start_token_id is 151652; expected all below"),
    ({f"{VISION}.fullatt_block_indexes": [7, 32]}, "fullatt_block_indexes has [32]; expected layers 0 to 31"),
    ({f"{VISION}.window_attn_size": 100}, "expected a multiple of patch_size x spatial_merge_size = 28"),
    ({f"{VISION}.num_attention_heads": 17}, "expected a multiple of 4 x num_attention_heads = 68"),
    ({f"{PROJECTOR}.input_size": 1024}, "input_size is 1024; expected the ViT's hidden_size = 1280"),
    ({f"{PROJECTOR}.ffn_hidden_size": 1280}, "expected input_size x spatial_merge_size^2 = 5120"),
    ({f"{PROJECTOR}.hidden_size": 2048}, "hidden_size is 2048; expected text_decoder.hidden_size = 3584"),
    ({f"{LANGUAGE}.num_query_groups": 5}, "num_query_groups is 5; expected a divisor of num_attention_heads = 28"),
    ({f"{LANGUAGE}.mrope_section": [16, 24, 20]}, "such as 3360 = 28 x 120"),
    ({f"{LANGUAGE}.num_attention_heads": 32}, "text_decoder.hidden_size is 3584, num_attention_heads 32, kv_channels"),
    ({f"{LANGUAGE}.mrope_section": [-8, 40, 32]}, "expected three numbers of at least 0"),
    ({f"{VISION}.layernorm_epsilon": 1e-5}, "vision_encoder.layernorm_epsilon is 1e-05; expected 1e-06, which"),
    ({f"{LANGUAGE}.kv_channels": 64}, "num_attention_heads 28, kv_channels 64 (by default their quotient)"),
    ({f"{LANGUAGE}.freeze_layers": "3-40"}, "freeze_layers is '3-40', which contains layer 28; expected 0 to 27"),
    ({f"{LANGUAGE}.num_layers": 10**9}, "num_layers is 1000000000; expected an integer of at least 1 and at most 1000"),
    ({f"{VISION}.freeze_layers": "5-3"}, 'freeze_layers is "5-3"; expected layers and spans of them, such as "0-15'),
    ({"freeze_modules": "norm"}, 'freeze_modules is "norm"; expected one or more words'),
    ({f"{LANGUAGE}.cpu_offloading_activations": False, f"{LANGUAGE}.cpu_offloading_num_layers": 3},
     "text_decoder.cpu_offloading_num_layers is 3, but text_decoder.cpu_offloading_activations is false; set it to"),
    ({f"{LANGUAGE}.cpu_offloading_weights": True}, "cpu_offloading_weights is true"),
    ({f"{LANGUAGE}.recompute_granularity": "ful"}, 'granularity is "ful"; supported: "full" or "selective" (did you'),
    ({f"{LANGUAGE}.recompute_granularity": "full"}, "which also needs text_decoder.recompute_method"),
    ({f"{LANGUAGE}.recompute_num_layers": 1}, "need text_decoder.recompute_granularity 'full'"),
    ({f"{LANGUAGE}.recompute_modules": ["mlp"]}, "recompute_modules needs text_decoder.recompute_granularity"),
    ({f"{LANGUAGE}.recompute_modules": ["moe"]}, 'recompute_modules is ["moe"]; supported: "layernorm", "mlp_act"'),
])
def test_refused_model(tmp_path, changes, what):
    found = problems(read_model, tmp_path, "model_7b.json", changes)
    assert any(what in problem for problem in found), found
    assert all("file.json" in problem for problem in found)


def test_data_of_the_7b_example():
    data = read_data(EXAMPLES / "data_7b.json").value
    assert data.model_name_or_path == "./ckpt/hf_path/Qwen2.5-VL-7B-Instruct"
    assert data.dataset == ("./data/mllm_format_llava_instruct_data.json",)
    assert (data.dataset_dir, data.image_max_pixels, data.image_min_pixels) == ("./data", 262144, 0)
    assert (data.attr.messages, data.attr.role_tag, data.attr.user_tag) == ("messages", "role", "user")
    assert (data.attr.images, data.attr.system, data.attr.system_tag) == ("images", None, None)
    assert (data.is_shuffled, data.train_on_prompt, data.max_samples) == (True, False, None)


@pytest.mark.parametrize(("sampler", "shuffle", "expected"), [
    ("BaseRandomBatchSampler", True, True),
    ("BaseRandomBatchSampler", False, False),
    ("SequentialSampler", True, False),
    ("stateful_distributed_sampler", ABSENT, True),
])
def test_samplers(tmp_path, sampler, shuffle, expected):
    root = changed("data_7b.json", {"dataloader_param.sampler_type": sampler, "dataloader_param.shuffle": shuffle})
    assert read_data(write(tmp_path, root)).value.is_shuffled is expected


@pytest.mark.parametrize("key", ["basic_parameters.packing", "basic_parameters.neat_packing", "attr.packing"])
@pytest.mark.parametrize(("value", "expected"), [(True, True), (False, False), (None, False)])
def test_each_word_for_packing_packs(tmp_path, key, value, expected):
    data = read_data(write(tmp_path, changed("data_7b.json", {f"dataset_param.{key}": value}))).value
    assert data.packs is expected


def test_words_of_the_peers_first_version(tmp_path):
    """2.0.0 named the pixel bound image_resolution, and the model qwen2vl; without windows it is a different model."""
    preprocess = "dataset_param.preprocess_parameters"
    root = changed("data_7b.json", {f"{preprocess}.image_max_pixels": ABSENT, f"{preprocess}.image_resolution": 12345})
    assert read_data(write(tmp_path, root)).value.image_max_pixels == 12345
    read = read_data(write(tmp_path, changed("data_7b.json", {f"{preprocess}.image_resolution": 12345})))
    assert read.value.image_max_pixels == 262144
    assert any(note.startswith(f"{preprocess}.image_resolution of")
               and note.endswith(f": no effect: {preprocess}.image_max_pixels is given too") for note in read.notes)
    assert read_model(write(tmp_path, changed("model_7b.json", {"model_id": "qwen2vl"})))
    (found,) = problems(read_model, tmp_path, "model_7b.json", {"model_id": "qwen2vl",
                                                                f"{VISION}.window_attn_size": ABSENT})
    assert "window_attn_size is missing" in found


@pytest.mark.parametrize(("changes", "what"), [
    ({"dataset_param.dataset_type": "multimodal"}, 'supported: "huggingface"'),
    ({"dataset_param.basic_parameters.packing_max_patches": 64}, "packing_max_patches is 64, but packing is not true"),
    ({"dataset_param.attr.packing": True, "dataloader_param.sampler_type": "BucketBatchSampler"},
     'set sampler_type to "BalancedBatchSampler"'),
    ({"dataset_param.attr.formatting": "alpca"}, 'supported: "sharegpt" or "alpaca" (did you mean \'alpaca\'?)'),
    ({"dataset_param.attr.audios": "audios"}, "not on audio"),
    ({"dataset_param.basic_parameters.streaming": True}, "streaming is true; supported: null or false"),
    ({"dataset_param.basic_parameters.val_rate": 1.0}, "val_rate is 1.0; expected a number of at least 0 and less"),
    ({"dataset_param.basic_parameters.cutoff_len": 512}, "--seq-length is the longest sample"),
    ({"dataset_param.preprocess_parameters.model_name_or_path": ABSENT}, "model_name_or_path is missing"),
    ({"dataset_param.preprocess_parameters.image_max_pixel": 3}, "did you mean 'image_max_pixels'?"),
    ({"dataset_param": ABSENT}, "dataset_param is missing; expected an object"),
    ({"dataloader_param.sampler_type": "LengthGroupedSampler"}, '"BucketBatchSampler" or "BalancedBatchSampler"'),
    ({"dataloader_param.collate_param.model_name": "internvl"}, 'supported: "qwen2vl"'),
])
def test_refused_data(tmp_path, changes, what):
    found = problems(read_data, tmp_path, "data_7b.json", changes)
    assert any(what in problem for problem in found), found
    assert len(found) == 1
