"""The small Hugging Face directory, pictures and dataset files of the tests of ``mm/data``."""

from tests.data.conftest import hf_directory, media_directory, model_config, tokenizer, write_dataset

__all__ = ["hf_directory", "media_directory", "model_config", "tokenizer", "write_dataset"]
