"""The tiny checkpoint is a complete Qwen2.5-VL checkpoint that ``transformers`` loads."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from demo import tiny_checkpoint
from demo.tiny_checkpoint import PLAIN_ADDED_TOKENS, SPECIAL_TOKENS, Sizes
from mm.config.model import read_model

TEXTS = ["Which digit is this?", "Which two digits are these?", "3 and 7"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_checkpoint.build(path, TEXTS, seed=0)
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> Qwen2_5_VLForConditionalGeneration:
    loaded, report = Qwen2_5_VLForConditionalGeneration.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
        directory, output_loading_info=True)  # transformers' types lack the report
    assert not any(report.values()), report
    return loaded


def test_config_has_the_flat_keys_that_both_transformers_majors_read(directory: Path):
    config = json.loads((directory / "config.json").read_text())
    assert config["rope_scaling"] == {"type": "mrope", "mrope_section": [4, 6, 6]}
    assert config["rope_theta"] == 1000000.0
    assert config["hidden_size"] == 128
    assert "text_config" not in config


def test_vision_has_window_and_full_attention_and_llm_has_grouped_queries(model):
    vision, text = model.config.vision_config, model.config.text_config
    assert (vision.depth, vision.fullatt_block_indexes, vision.window_size) == (8, [3, 7], 56)
    assert (text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads) == (4, 4, 2)
    assert text.rope_parameters["mrope_section"] == [4, 6, 6]
    assert text.rope_parameters["rope_theta"] == 1000000.0


def test_special_tokens_have_the_published_order_and_are_one_token_each(directory: Path):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = [tokenizer(token)["input_ids"] for token in SPECIAL_TOKENS + PLAIN_ADDED_TOKENS]
    first = Sizes().token_id("<|endoftext|>")
    assert ids == [[first + offset] for offset in range(22)]
    published = AutoTokenizer.from_pretrained(directory).convert_tokens_to_ids
    # In the published tokenizer <|endoftext|> is 151643, <|vision_start|> 151652 and <|image_pad|> 151655.
    assert published("<|vision_start|>") - first == 151652 - 151643
    assert published("<|image_pad|>") - first == 151655 - 151643
    assert tokenizer.eos_token == "<|im_end|>"


def test_tokenizer_spells_any_text_and_splits_digits(directory: Path):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in ("Which digit is this?", "汉字 and \U0001f600\n\ttabs", "it's 1234"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert [tokenizer.decode(one) for one in tokenizer("1234")["input_ids"]] == ["1", "2", "3", "4"]
    assert len(tokenizer) <= Sizes().vocab_size


def test_chat_template_frames_pictures_and_turns(directory: Path):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    content = [{"type": "image"}, {"type": "text", "text": "Which digit is this?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|><|image_pad|><|vision_end|>Which digit is this?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_image_processor_loads(directory: Path):
    processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    assert (processor.patch_size, processor.merge_size, processor.temporal_patch_size) == (14, 2, 2)


def test_generation_stops_at_the_end_of_a_turn(directory: Path):
    config = GenerationConfig.from_pretrained(directory)
    assert Sizes().token_id("<|im_end|>") in config.eos_token_id


def test_same_seed_same_weights_and_random_state_untouched(directory: Path, tmp_path: Path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny_checkpoint.build(tmp_path / "same", TEXTS, seed=0)
    assert torch.equal(torch.rand(3), expected)
    tiny_checkpoint.build(tmp_path / "other", TEXTS, seed=1)
    weights = (directory / "model.safetensors").read_bytes()
    assert (tmp_path / "same/model.safetensors").read_bytes() == weights
    assert (tmp_path / "other/model.safetensors").read_bytes() != weights


def test_sizes_are_free(tmp_path: Path):
    sizes = Sizes(vision_layers=2, full_attention_layers=(1,), language_layers=1, tie_word_embeddings=True,
                  num_merges=20)  # fmt: skip
    tiny_checkpoint.build(tmp_path, TEXTS, seed=0, sizes=sizes)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert len(model.model.visual.blocks) == 2
    assert AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("<|image_pad|>") == model.config.image_token_id


def test_texts_with_too_few_merges_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"give \d+ byte-pair merges; num_merges = 500"):
        tiny_checkpoint.build(tmp_path, TEXTS, seed=0, sizes=Sizes(num_merges=500))


def test_model_tiny_json_describes_this_checkpoint(directory: Path):
    ours = read_model("examples/qwen2.5vl/model_tiny.json").value
    config = json.loads((directory / "config.json").read_text())
    vision, sizes = config["vision_config"], Sizes()
    assert (ours.vision.num_layers, ours.language.num_layers) == (vision["depth"], config["num_hidden_layers"])
    assert ours.vision.hidden_size == ours.projector.input_size == vision["hidden_size"]
    assert ours.vision.ffn_hidden_size == vision["intermediate_size"]
    assert ours.vision.num_attention_heads == vision["num_heads"]
    assert list(ours.vision.fullatt_block_indexes) == vision["fullatt_block_indexes"]
    assert ours.vision.window_attn_size == vision["window_size"]
    assert ours.projector.hidden_size == ours.language.hidden_size == config["hidden_size"]
    assert ours.language.ffn_hidden_size == config["intermediate_size"]
    assert ours.language.num_attention_heads == config["num_attention_heads"]
    assert ours.language.num_query_groups == config["num_key_value_heads"]
    assert ours.language.vocab_size == config["vocab_size"]
    assert ours.language.rope_theta == config["rope_theta"]
    assert list(ours.language.mrope_section) == config["rope_scaling"]["mrope_section"]
    assert ours.language.tied == config["tie_word_embeddings"]
    assert ours.image_token_id == sizes.token_id("<|image_pad|>")
    assert ours.video_token_id == sizes.token_id("<|video_pad|>")
    assert ours.vision_start_token_id == sizes.token_id("<|vision_start|>")
