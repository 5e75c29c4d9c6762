"""Suggestions for an unknown word."""

import pytest

from mm.config.flags import TRAIN
from mm.errors import nearest


@pytest.mark.parametrize(("word", "known", "expected"), [
    ("--seq-lenght", ["--seq-length", "--save"], "--seq-length"),
    ("--vision_tower_lr", ["--vision-tower-lr"], "--vision-tower-lr"),
    ("num_layer", ["num_layers", "num_query_groups"], "num_layers"),
    ("mmmu_val", ["mmmu_dev_val", "ai2d"], "mmmu_dev_val"),
    ("layers.9.mlp.up_proj", ["layers.3.mlp.up_proj"], "layers.3.mlp.up_proj"),
    ("embd", ["embedding", "norm"], "embedding"),
])
def test_a_misspelling_gets_a_suggestion(word, known, expected):
    assert nearest(word, known) == f" (did you mean {expected!r}?)"


@pytest.mark.parametrize("flag", [
    "--log-params-norm", "--fp8-format", "--fp8-param-gather", "--disable-mamba-mem-eff-path",
    "--microbatch-group-size-per-virtual-pipeline-stage", "--log-loss-scale-to-tensorboard",
])
def test_a_flag_of_another_program_gets_no_suggestion(flag):
    """They share most letters with unrelated flags of this program, such as --lora-r."""
    assert nearest(flag, TRAIN.fields) == ""
