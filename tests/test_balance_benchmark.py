"""The figures of benchmarks.balance come out, and those that hold on any machine are as the document says."""

import json

import numpy as np
import pytest

from mm.plan.layouts import DISTRIBUTIONS, SEQ_LENGTH
from tests.launch import run_ranks


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> tuple[dict, str]:
    """The figures, and what was printed."""
    path = tmp_path_factory.mktemp("balance") / "found.json"
    text = run_ranks(0, "benchmarks.balance", "--quick", "--output", str(path))
    return json.loads(path.read_text()), text


def test_balance_is_even_and_shortens_the_step(output: tuple[dict, str]) -> None:
    found, text = output
    by = {(row["set"], row["sampler"]): row for row in found["rows"]}
    for name in ("llava", "documents", "videos"):
        plain = by[name, "BaseRandomBatchSampler"]
        for sampler in ("BalancedBatchSampler", "BalancedBatchSampler with packing"):
            row = by[name, sampler]
            assert row["worst_step"] <= 1.01 and row["cost_of_plain"] == pytest.approx(1 / plain["step"], rel=0.01)
        assert by[name, "BaseRandomBatchSampler with packing"]["full"] >= 0.95 and plain["of_rank"] == 32
    assert found["planning"]["full"] >= 0.97 and "20,480 samples: " in text


@pytest.mark.parametrize(("name", "mean_tokens"), [
    ("llava", 689), ("documents", 2700), ("videos", 2700), ("text", 600)])  # fmt: skip
def test_sets_are_as_described(name: str, mean_tokens: int) -> None:
    lengths = DISTRIBUTIONS[name](20_000)
    assert lengths.num_tokens.mean() == pytest.approx(mean_tokens, rel=0.03)
    assert lengths.num_target_tokens.min() > 0 and (lengths.num_target_tokens <= lengths.num_tokens).all()
    assert lengths.num_tokens.max() <= SEQ_LENGTH
    assert (lengths.num_patches // 4 < lengths.num_tokens).all()
    assert np.array_equal(DISTRIBUTIONS[name](100).num_tokens, DISTRIBUTIONS[name](100).num_tokens)
