"""A directory without a manifest is recognised by its shapes, and nothing else is taken for a published model."""

import dataclasses
from pathlib import Path

import pytest

from mm.checkpoint.hf_config import model_from_hf
from mm.checkpoint.mindspeed import MindSpeedDirectory
from mm.checkpoint.mindspeed_layout import Storage
from mm.checkpoint.source import open_source
from mm.config.model import ModelConfig, read_model
from mm.errors import UserError
from mm.families.qwen2_5_vl import published_config
from mm.weights.table import model_weights
from tests.files import EXAMPLES
from tests.mm_convert.models import write_sparse_mm

SIZES = ("3b", "7b", "32b", "72b")


def directory_of(model: ModelConfig, tp_size: int, root: Path) -> MindSpeedDirectory:
    """Real headers, without the bytes of the weights."""
    write_sparse_mm(model, tp_size, Storage(), root)
    return MindSpeedDirectory.open(root)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_those_of_the_examples(size):
    """In everything that shapes and heads depend on."""
    example, known = read_model(EXAMPLES / f"model_{size}.json").value, model_from_hf(published_config(size.upper()))
    assert model_weights(known) == model_weights(example)
    placed = dataclasses.replace(known.language, pipeline_num_layers=example.language.pipeline_num_layers,
                                 max_position_embeddings=example.language.max_position_embeddings,
                                 init_method_std=example.language.init_method_std, freeze=example.language.freeze,
                                 recompute=example.language.recompute)
    assert placed == example.language


@pytest.mark.parametrize(("size", "tp_size"), [("3b", 1), ("7b", 4), ("32b", 8), ("72b", 1)])
def test_a_published_model_is_recognized(size, tp_size, tmp_path):
    model = read_model(EXAMPLES / f"model_{size}.json").value
    directory = directory_of(model, tp_size, tmp_path)
    assert open_source(tmp_path).model == directory.layout.place(model_from_hf(published_config(size.upper())))
    assert directory.layout.vision == model.vision.pipeline_num_layers
    assert directory.layout.language == model.language.pipeline_num_layers
    assert directory.layout.tp_size == tp_size


def test_another_vocabulary_is_not(tmp_path):
    model = model_from_hf(published_config("7B"))
    other = dataclasses.replace(model, language=dataclasses.replace(model.language, vocab_size=151660))
    directory_of(other, 1, tmp_path)
    with pytest.raises(UserError, match="no manifest that describes its model"):
        open_source(tmp_path)
