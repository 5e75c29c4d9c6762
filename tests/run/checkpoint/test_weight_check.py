"""One flipped bit in one replica's weight is found, and named with its rank, in every kind of layout."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mm.run.checkpoint.weight_check import digest
from tests.launch import run_ranks
from tests.tiny_inputs import flags_of, write_data, write_inputs

EMBEDDING = "text_decoder.embedding.word_embeddings.weight"
EXPECTED = {
    "dp4": {"2": "rank 2 differs from ranks 0 to 1, 3", "0": "rank 0 differs from ranks 1 to 3"},
    "tp2-dp2": {"1": "ranks 1, 3 do not agree", "1 norm": "rank 1 differs from ranks 0, 2 to 3"},
    "pp2-tied-dp2": {"0": "rank 0 differs from ranks 1 to 3", "3": "rank 3 differs from ranks 0 to 2",
                     "2": "ranks 2 to 3 do not agree"},
}
"""By layout and damaged rank."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    output = tmp_path_factory.mktemp("weights") / "found.json"
    run_ranks(4, "tests.run.weight_check_worker", str(output))
    return json.loads(output.read_text())


@pytest.mark.parametrize("layout", EXPECTED)
def test_a_flipped_bit_is_found_with_its_rank(layout: str, found: dict[str, dict[str, str]]) -> None:
    results = found[layout]
    assert results.pop("") == results.pop("mended") == ""
    assert len(results) == len(EXPECTED[layout])
    for (damage, error), expected in zip(results.items(), EXPECTED[layout].values(), strict=True):
        rank, name = damage.split()
        shown = EMBEDDING if name == "text_decoder.output_layer.weight" else name
        assert f"hold different ones: {shown}: {expected}. Nothing was saved" in error, (rank, error)


def test_weights_are_compared_at_the_interval_and_before_each_save(tmp_path: Path) -> None:
    """The first validation, after step 2, saves the best checkpoint, before any other save and the interval."""
    inputs = write_inputs(tmp_path)
    write_data(inputs, inputs / "samples.json", packing=False, val_rate=0.2)
    words = flags_of(inputs, "run", 1, "--num-workers", "0", "--load", str(inputs / "hf"), "--lr", "0",
                     "--eval-interval", "2", "--save-best", "--save-interval", "3", "--check-weights-interval", "4")
    run_ranks(1, "tests.run.checked_worker", str(inputs / "found.json"), *words)
    best, third = "best/iter_0000002", "iter_0000003"
    assert json.loads((inputs / "found.json").read_text()) == [
        [2, []], [3, [best]], [4, [best, third]], [6, [best, third]]]


@given(st.integers(0, 999), st.integers(0, 15))
def test_one_changed_bit_changes_the_digest(index: int, bit: int) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    changed = tensor.clone()
    changed.view(torch.int16)[index] ^= 1 << bit if bit < 15 else -32768
    assert digest(changed) != digest(tensor) == digest(tensor.clone())
