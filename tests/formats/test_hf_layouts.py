"""Round trip of Hugging Face weights through every layout of the parity matrix: every tensor is bit-equal."""

from pathlib import Path

import pytest
import torch

from mm.formats.source import open as open_source
from mm.weights.table import model_weights, stage_weights, unshard
from tests.parallel.cases import CASES
from tests.tiny import hf_model, hf_tensors, our_config
from tests.unfuse import unfuse

LAYOUTS = sorted({(case.vision_chunks, case.language_chunks, case.tp, case.tied) for case in CASES})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The small model, untied and tied, as transformers saves it."""
    directories = {}
    for tied in (False, True):
        directories[tied] = tmp_path_factory.mktemp(f"tied_{tied}")
        hf_model(tied).save_pretrained(directories[tied])
    return directories


@pytest.mark.parametrize(("vision", "language", "tp", "tied"), LAYOUTS)
def test_there_and_back(saved, vision: tuple, language: tuple, tp: int, tied: bool) -> None:
    source = open_source(saved[tied])
    config = our_config(vision, language, tied)
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
    source = hf_tensors(hf_model(tied))
    assert set(back) == set(source)
    for name, tensor in source.items():
        assert torch.equal(back[name], tensor), name
