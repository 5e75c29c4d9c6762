"""Builds a small Qwen2.5-VL checkpoint in Hugging Face format: random weights, the real architecture.

It has every element of the published checkpoints at a small size: window and full attention in the ViT, grouped-query
attention and M-RoPE in the LLM, a byte-level BPE tokenizer with Qwen2.5-VL's special tokens, the chat template, and the
file layout.  Independent of the trainer: only torch, tokenizers and transformers are used.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

NUM_BYTES = 256
# In the order of the published tokenizer.json; its ids run from 151643, ours from NUM_BYTES + num_merges.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PLAIN_ADDED_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
# Qwen2's pre-tokenizer: contractions, words, single digits, punctuation, line ends, spaces.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The published chat template of Qwen2.5-VL-Instruct.
CHAT_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEMPLATE_WORDS = "system\nYou are a helpful assistant.\nuser\nassistant\n"


@dataclass(frozen=True)
class Sizes:
    """All sizes of the checkpoint; the defaults are the demo's (``examples/qwen2.5vl/model_tiny.json``)."""

    vision_layers: int = 8
    vision_hidden_size: int = 64
    vision_heads: int = 4
    vision_ffn_size: int = 128
    window_size: int = 56
    """Side of an attention window in pixels: two merged tokens."""
    full_attention_layers: tuple[int, ...] = (3, 7)
    language_layers: int = 4
    language_hidden_size: int = 128
    language_heads: int = 4
    language_key_value_heads: int = 2
    language_ffn_size: int = 256
    mrope_section: tuple[int, int, int] = (4, 6, 6)
    """Rotary frequencies for time, height and width; they sum to half the width of a head."""
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    num_merges: int = 32
    """Byte pairs that the tokenizer learns; it determines the ids of the special tokens."""
    vocab_size: int = 320
    """Rows of the word embedding: slightly more than there are tokens, as in the published models."""
    initializer_range: float = 0.1
    """About 1 / sqrt(hidden size); the published 0.02 suits models fifty times as wide."""

    def token_id(self, token: str) -> int:
        """The id of one of the added tokens."""
        return NUM_BYTES + self.num_merges + (SPECIAL_TOKENS + PLAIN_ADDED_TOKENS).index(token)


def build(directory: Path, texts: Iterable[str], seed: int, *, sizes: Sizes = Sizes()) -> None:
    """Write a checkpoint that ``transformers`` loads into ``directory``.

    ``texts`` train the tokenizer; raises ValueError when they have too few byte pairs for ``sizes.num_merges``.
    The global random state is unchanged.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(texts, sizes.num_merges)
    config = _config(sizes)
    _write_json(directory / "config.json", config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(directory))
        model.save_pretrained(directory)
    # save_pretrained wrote a config.json that transformers 4 silently misreads: restore the flat one.
    _write_json(directory / "config.json", config)
    _write_tokenizer(directory, tokenizer, sizes)
    _write_json(directory / "preprocessor_config.json", _PREPROCESSOR)
    _write_json(directory / "generation_config.json", {
        "bos_token_id": sizes.token_id("<|endoftext|>"),
        "pad_token_id": sizes.token_id("<|endoftext|>"),
        "do_sample": False,
        "eos_token_id": [sizes.token_id("<|im_end|>"), sizes.token_id("<|endoftext|>")],
    })  # fmt: skip


_PREPROCESSOR = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}


def _config(sizes: Sizes) -> dict:
    """config.json with the flat keys of the published checkpoints, which transformers 4 and 5 both read correctly."""
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "attention_dropout": 0.0,
        "bos_token_id": sizes.token_id("<|endoftext|>"),
        "eos_token_id": sizes.token_id("<|im_end|>"),
        "vision_start_token_id": sizes.token_id("<|vision_start|>"),
        "vision_end_token_id": sizes.token_id("<|vision_end|>"),
        "vision_token_id": sizes.token_id("<|vision_pad|>"),
        "image_token_id": sizes.token_id("<|image_pad|>"),
        "video_token_id": sizes.token_id("<|video_pad|>"),
        "hidden_act": "silu",
        "hidden_size": sizes.language_hidden_size,
        "initializer_range": sizes.initializer_range,
        "intermediate_size": sizes.language_ffn_size,
        "max_position_embeddings": sizes.max_position_embeddings,
        "max_window_layers": sizes.language_layers,
        "num_attention_heads": sizes.language_heads,
        "num_hidden_layers": sizes.language_layers,
        "num_key_value_heads": sizes.language_key_value_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": list(sizes.mrope_section)},
        "sliding_window": 32768,
        "use_sliding_window": False,
        "tie_word_embeddings": sizes.tie_word_embeddings,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": sizes.vocab_size,
        "vision_config": {
            "depth": sizes.vision_layers,
            "hidden_act": "silu",
            "hidden_size": sizes.vision_hidden_size,
            "intermediate_size": sizes.vision_ffn_size,
            "num_heads": sizes.vision_heads,
            "in_chans": 3,
            "out_hidden_size": sizes.language_hidden_size,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": sizes.window_size,
            "fullatt_block_indexes": list(sizes.full_attention_layers),
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
            "initializer_range": sizes.initializer_range,
        },
    }


def _train_tokenizer(texts: Iterable[str], num_merges: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BYTES + num_merges,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, TEMPLATE_WORDS], trainer)
    found = tokenizer.get_vocab_size() - NUM_BYTES
    if found != num_merges:
        raise ValueError(f"the texts give {found} byte-pair merges; num_merges = {num_merges} needs more varied texts")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in PLAIN_ADDED_TOKENS])
    return tokenizer


def _write_tokenizer(directory: Path, tokenizer: Tokenizer, sizes: Sizes) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    # vocab.json and merges.txt: the older form of the same data, which the published checkpoints also have.
    tokenizer.model.save(str(directory))
    added = {
        str(sizes.token_id(token)): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in SPECIAL_TOKENS + PLAIN_ADDED_TOKENS
    }  # fmt: skip
    _write_json(directory / "tokenizer_config.json", {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": sizes.max_position_embeddings,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    })  # fmt: skip
    _write_json(directory / "chat_template.json", {"chat_template": CHAT_TEMPLATE})


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


_WORDS = ("How many pictures are there, and what is to be seen in each of them?", "There are two of them, 1 and 2.")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small random Qwen2.5-VL checkpoint to try commands on.")
    parser.add_argument("directory", type=Path, help="directory to write; it must not exist")
    directory = parser.parse_args().directory
    if directory.exists():
        parser.error(f"{directory} already exists; give another directory, or remove it")
    build(directory, _WORDS, seed=0)
    print(f"written: {directory} (random weights, tokenizer and processor)")


if __name__ == "__main__":
    main()
