"""Round trip of Hugging Face weights through every layout of the parity matrix: every tensor is bit-equal."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mm.formats.source import open_source
from mm.weights.placed import stage_weights
from mm.weights.table import model_weights, unshard
from tests.parallel.cases import CASES
from tests.tiny import hf_model, hf_tensors, our_config
from tests.unfuse import unfuse

LAYOUTS = sorted({(case.vision_chunks, case.language_chunks, case.tp, case.whole_encoder, case.tied, case.num_key_heads)
                  for case in CASES})
MODELS = sorted({(tied, num_key_heads) for *_, tied, num_key_heads in LAYOUTS})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, int], Path]:
    """The small models, untied and tied, with each number of key heads, as transformers saves them."""
    directories = {}
    for tied, num_key_heads in MODELS:
        directories[tied, num_key_heads] = tmp_path_factory.mktemp(f"tied_{tied}")
        hf_model(tied, num_key_heads=num_key_heads).save_pretrained(directories[tied, num_key_heads])
    return directories


@pytest.mark.parametrize(("vision", "language", "tp", "is_whole", "tied", "num_key_heads"), LAYOUTS)
def test_there_and_back(
    saved, vision: tuple, language: tuple, tp: int, is_whole: bool, tied: bool, num_key_heads: int
) -> None:
    source = open_source(saved[tied, num_key_heads])
    config = our_config(vision, language, tied, num_key_heads=num_key_heads)
    config = replace(config, encoder_placement="tensor_ranks" if is_whole else "cut")
    placement = config.placement()
    held: dict[str, list[torch.Tensor]] = {}
    for spec in placement.slots:
        for weight in stage_weights(config, spec):
            held[weight.name] = [source.read(weight, tp, rank, torch.float32) for rank in range(tp)]
    back = {
        name: tensor
        for weight in model_weights(config)
        for name, tensor in zip(weight.hf_names, unfuse(weight, unshard(weight, held[weight.name])), strict=True)
    }
    source = hf_tensors(hf_model(tied, num_key_heads=num_key_heads))
    assert set(back) == set(source)
    for name, tensor in source.items():
        assert torch.equal(back[name], tensor), name
