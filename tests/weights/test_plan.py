"""The plan covers every byte once, for all real sizes, from config alone."""

import math
from collections import Counter

import pytest
import torch

from mm.config.model import ModelConfig, read_model
from mm.errors import UserError
from mm.formats.storage import Storage, mindspeed_targets
from mm.placement import layout_problems
from mm.weights.cut import Span, shard_spans
from mm.weights.plan import CopyPlan, ViewIndex, make_plan
from mm.weights.table import local_shape, model_weights
from mm.weights.views import Stored, View, whole_view
from tests.files import EXAMPLES

PARAMETERS = {"3b": 3_754_622_976, "7b": 8_292_166_656, "32b": 33_452_718_336, "72b": 73_410_777_344}
"""Parameters of the published models; 3B without its head, which is tied to the embedding."""


def hf_views(model: ModelConfig) -> list[View]:
    """A single file that holds every Hugging Face tensor."""
    views, offset = [], 8
    for weight in model_weights(model):
        for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
            stored = Stored("model.safetensors", name, torch.bfloat16, shape, offset)
            views.append(whole_view(stored, name, weight))
            offset += stored.num_bytes
    return views


def plan_of(model: ModelConfig, tp_size: int) -> tuple[CopyPlan, list[View], list[View]]:
    sources = hf_views(model)
    dtypes = {view.stored.name: torch.bfloat16 for view in sources}
    targets, files = mindspeed_targets(model, tp_size, Storage(), dtypes)
    return make_plan(ViewIndex(sources), targets, files), sources, targets


@pytest.mark.parametrize("tp_size", [1, 2, 8])
@pytest.mark.parametrize("size", PARAMETERS)
def test_real_sizes(size: str, tp_size: int):
    model = read_model(EXAMPLES / f"model_{size}.json").value
    assert not layout_problems(model.vision.pipeline_num_layers, model.language.pipeline_num_layers,
                               model.vision.num_layers, model.language.num_layers)
    if model.language.num_query_groups % tp_size:
        with pytest.raises(UserError, match="does not divide"):
            plan_of(model, tp_size)
        return
    plan, sources, targets = plan_of(model, tp_size)
    assert sum(view.stored.num_bytes for view in sources) == 2 * PARAMETERS[size]
    assert [view.stored for view in targets] == [tensor for file in plan.files for tensor in file.tensors]

    written = [target for job in plan.jobs for target in job.targets]
    assert Counter(written) == Counter(view.stored for view in targets)  # each once
    read = Counter()
    for job in plan.jobs:
        reached = dict.fromkeys(job.targets, 0)
        for move in job.moves:
            width = move.target.num_bytes // job.num_rows
            assert reached[move.target] <= move.target_start  # no byte twice
            reached[move.target] = move.target_start + move.num_bytes
            assert reached[move.target] <= width
            assert 0 <= move.source_start <= move.source.num_bytes // job.num_rows - move.num_bytes
            read[move.source.name] += move.num_bytes * job.num_rows
    for weight in model_weights(model):
        is_doubled = weight.name.endswith("word_embeddings.weight") and model.language.tied and model.num_stages > 1
        times = (tp_size if weight.tp_dim is None else 1) * (2 if is_doubled else 1)
        for name, shape in zip(weight.hf_names, weight.hf_shapes, strict=True):
            assert read[name] == math.prod(shape) * 2 * times, name
    header_bytes = sum(len(file.pieces[0][1]) for file in plan.files)
    assert plan.num_bytes - header_bytes == sum(read.values()) + padding(model, tp_size)


def padding(model: ModelConfig, tp_size: int) -> int:
    """Bytes of zeros on all ranks together."""
    return sum(2 * (tp_size * math.prod(local_shape(weight, tp_size)) - math.prod(weight.shape))
               for weight in model_weights(model) if weight.tp_dim is not None)


def test_spans_of_a_padded_shard():
    model = read_model(EXAMPLES / "model_7b.json").value
    fc1 = next(weight for weight in model_weights(model) if weight.name.endswith("layers.0.mlp.linear_fc1.weight"))
    spans = [(span.key, span.start, span.length) for span in shard_spans(fc1, 8, 7)]
    gate, up = fc1.hf_names
    assert fc1.hf_shapes == ((3420, 1280),) * 2
    assert spans == [(gate, 2996, 424), (None, 0, 4), (up, 2996, 424), (None, 0, 4)]


def small(name: str, start: int, length: int, dtype=torch.bfloat16) -> View:
    weight = model_weights(read_model(EXAMPLES / "model_3b.json").value)[0]
    return View(Stored("a", name, dtype, (length, 2), 0), weight, (Span("w", start, length),))


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([small("x", 0, 4)], [small("y", 0, 6)], "does not have index 4 to 5 of w, needed for y"),
        ([small("x", 0, 4), small("z", 4, 2)], [small("y", 0, 4)], "z has no counterpart"),
        ([small("x", 0, 4)], [small("y", 0, 4, torch.float32)], "x is bfloat16, but y in a would be float32"),
        ([small("x", 0, 4), small("z", 3, 3)], [small("y", 0, 6)], "both contain index 3 of w"),
    ],
)
def test_leftovers_are_errors(sources, targets, message):
    with pytest.raises(UserError, match=message):
        make_plan(ViewIndex(sources), targets, ())
