"""Views of real sizes cover every index of the model once, from config alone."""

import math
from collections import Counter

import pytest
import torch

from mm.checkpoint.mindspeed_layout import Storage, mindspeed_targets
from mm.config.model import read_model
from mm.weights.fuse import local_shape
from mm.weights.table import model_weights
from mm.weights.views import ViewIndex, shard_spans
from tests.files import EXAMPLES


@pytest.mark.parametrize(("size", "tp_size"), [("3b", 1), ("3b", 2), ("7b", 4), ("72b", 8)])
def test_real_sizes(size: str, tp_size: int):
    model = read_model(EXAMPLES / f"model_{size}.json").value
    dtypes = {name: torch.bfloat16 for weight in model_weights(model) for name in weight.hf_names}
    views, files = mindspeed_targets(model, tp_size, Storage(), dtypes)
    assert [view.stored for view in views] == [tensor for file in files for tensor in file.tensors]
    index, held = ViewIndex(views), Counter()
    for view in views:
        for span in view.spans:
            held[span.key] += span.length
    for weight in model_weights(model):
        is_doubled = weight.name.endswith("word_embeddings.weight") and model.language.tied and model.num_stages > 1
        times = (tp_size if weight.tp_dim is None else 1) * (2 if is_doubled else 1)
        for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
            dim = weight.tp_dim or 0
            assert held[name] == shape[dim] * times, name
    padded = sum(one.span.length * one.view.num_rows * one.view.index_bytes for one in index.padding)
    assert padded == sum(2 * (tp_size * math.prod(local_shape(weight, tp_size)) - math.prod(weight.shape))
                         for weight in model_weights(model) if weight.tp_dim is not None)


def test_spans_of_a_padded_shard():
    model = read_model(EXAMPLES / "model_7b.json").value
    fc1 = next(weight for weight in model_weights(model) if weight.name.endswith("layers.0.mlp.linear_fc1.weight"))
    spans = [(span.key, span.start, span.length) for span in shard_spans(fc1, 8, 7)]
    gate, up = fc1.hf_names
    assert fc1.hf_shapes == ((3420, 1280),) * 2
    assert spans == [(gate, 2996, 424), (None, 0, 4), (up, 2996, 424), (None, 0, 4)]
