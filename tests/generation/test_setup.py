"""The stages on which a model is placed for generation; errors of the loaded directory name the flag that gave it."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint.cli import main as convert
from demo.tiny_checkpoint import build
from mm.config.generate import load_asking
from mm.config.model import read_model
from mm.errors import UserError
from mm.generation.setup import even_lists, find, placed
from mm.placement import layout_problems
from mm.weights.table import stage_weights
from tests.test_examples import EXAMPLES
from tests.tiny import our_config


def test_a_refused_config_json_names_its_flag_or_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``other`` is a copy of ``hf`` whose config.json has another activation."""
    hf, other = str(tmp_path / "hf"), str(tmp_path / "other")
    build(tmp_path / "hf", ["One? 1", "Two and three and four? They are of no use here."], seed=0)
    shutil.copytree(hf, other)
    path = Path(other, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "gelu"}))
    wrong = f"{path}: hidden_act is 'gelu'; expected 'silu'"
    for flag, load, named in (("--model-name-or-path", hf, other), ("--load", other, hf)):
        with pytest.raises(UserError) as caught:
            find(load_asking(["--load", load, "--model-name-or-path", named, "--prompt", "One?"], {}))
        assert str(caught.value).startswith(f"{flag}: {wrong}")
    assert convert(["Qwen2_5_VLConverter", "hf_to_mm", "--cfg.mm_dir", str(tmp_path / "mm"),
                    "--cfg.hf_config.hf_dir", other, "--cfg.parallel_config.llm_pp_layers", "[[4]]",
                    "--cfg.parallel_config.vit_pp_layers", "[[4]]", "--cfg.parallel_config.tp_size", "1"]) == 2
    assert f"--cfg.hf_config.hf_dir: {wrong}" in capsys.readouterr().err


TWO = our_config(((3, 1),), ((0, 4),))


@pytest.mark.parametrize(("num_stages", "world_size", "expected"), [
    (None, 1, ((4,), (4,))), (None, 2, ((3, 1), (0, 4))), (2, 2, ((3, 1), (0, 4))), (1, 2, ((4,), (4,))),
])
def test_the_lists_are_used_if_there_are_enough_ranks(num_stages, world_size, expected):
    model, _ = placed(TWO, 1, num_stages, world_size)
    assert (model.vision.pipeline_num_layers[0], model.language.pipeline_num_layers[0]) == expected


def test_another_number_of_stages_is_noted_and_chunks_need_several():
    model, notes = placed(TWO, 1, 4, 4)
    assert model.num_stages == 4 and "are for 2 stages; with 4" in notes[0]
    assert placed(TWO, 1, 2, 2)[1] == ()
    model, _ = placed(our_config(((2,), (2,)), ((0,), (4,))), 1, None, 1)
    assert (model.num_stages, model.num_chunks) == (1, 1)


@pytest.mark.parametrize(("size", "num_stages"), [("3b", 1), ("7b", 5), ("32b", 8), ("72b", 16)])
def test_even_lists_are_legal_and_about_even(size: str, num_stages: int):
    model = read_model(EXAMPLES / f"model_{size}.json").value
    vision, language = even_lists(model, num_stages)
    assert layout_problems(vision, language, model.vision.num_layers, model.language.num_layers) == []
    model = replace(model, vision=replace(model.vision, pipeline_num_layers=vision),
                    language=replace(model.language, pipeline_num_layers=language))
    loads = [sum(math.prod(weight.shape) for weight in stage_weights(model, spec)) for spec in model.placement().slots]
    heaviest = 2 * model.language.vocab_size * model.language.hidden_size  # a layer with the output layer is lighter
    assert max(loads) <= sum(loads) / num_stages + heaviest


@pytest.mark.parametrize(("tp_size", "num_stages", "world_size", "what"), [
    (3, 1, 3, "--tensor-model-parallel-size is 3"), (2, 2, 2, "is 2, not a multiple of tensor x pipeline"),
])
def test_indivisible_sizes_are_refused(tp_size, num_stages, world_size, what):
    with pytest.raises(UserError, match=what):
        placed(TWO, tp_size, num_stages, world_size)
