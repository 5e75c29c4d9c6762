"""A small Hugging Face directory, pictures and dataset files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2Tokenizer

from demo.tiny_checkpoint import CHAT_TEMPLATE, SPECIAL_TOKENS
from mm.config.data import DataConfig
from mm.config.model import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from tests.data.oracle import PREPROCESSOR, RECORDS, TEXTS, Transformers, data_config, photo


@pytest.fixture(scope="session")
def hf_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer, chat template and preprocessor config of a checkpoint."""
    directory = tmp_path_factory.mktemp("hf")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    model = json.loads(bpe.to_str())["model"]
    newline = "\u010a"  # how byte-level BPE writes a newline
    merges = [tuple(merge) for merge in model["merges"]] + [(newline, newline)]
    vocabulary = model["vocab"]
    vocabulary.setdefault(newline * 2, len(vocabulary))
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=merges, eos_token="<|im_end|>", extra_special_tokens=[*SPECIAL_TOKENS])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return directory


@pytest.fixture(scope="session")
def tokenizer(hf_directory: Path) -> Qwen2Tokenizer:
    """As transformers loads it."""
    return AutoTokenizer.from_pretrained(hf_directory, local_files_only=True)


@pytest.fixture(scope="session")
def media_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("media")
    photo(200, 90, seed=1).save(directory / "wide.png")
    photo(61, 143, seed=2).save(directory / "tall.jpg")
    return directory


@pytest.fixture
def write_dataset(tmp_path: Path, hf_directory: Path, media_directory: Path) -> Callable[..., DataConfig]:
    """Writes records given as in ``RECORDS`` to a file and returns a config that reads it."""

    def write(records: list[dict] = RECORDS, **changes) -> DataConfig:
        raw = [{**record, "messages": [{"role": role, "content": text} for role, text in record["messages"]]}
               for record in records]
        path = tmp_path / "data.json"
        path.write_text(json.dumps(raw, ensure_ascii=False, indent=1), encoding="utf-8")
        return data_config(hf_directory, media_directory, path, **{"media_roots": (str(tmp_path),), **changes})

    return write


@pytest.fixture(scope="session")
def model_config(tokenizer: Qwen2Tokenizer) -> ModelConfig:
    """Only the fields that the data side reads match the tokenizer; sizes are small."""
    return ModelConfig(
        vision=VisionConfig(
            num_layers=1, pipeline_num_layers=((1,),), hidden_size=16, ffn_hidden_size=16, num_attention_heads=1,
            window_attn_size=112, fullatt_block_indexes=(0,)),
        projector=ProjectorConfig(input_size=16, ffn_hidden_size=64, hidden_size=16),
        language=LanguageConfig(
            num_layers=1, pipeline_num_layers=((1,),), hidden_size=16, ffn_hidden_size=16, num_attention_heads=1,
            num_query_groups=1, vocab_size=len(tokenizer), max_position_embeddings=4096, mrope_section=(2, 3, 3),
            kv_channels=16),
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
    )


@pytest.fixture(scope="session")
def reference(tokenizer: Qwen2Tokenizer, hf_directory: Path, media_directory: Path) -> Transformers:
    return Transformers(tokenizer, hf_directory, media_directory)
