"""The figures of benchmarks.balance come out, and those that hold on any machine are as the document says."""

import json

import numpy as np
import pytest

from benchmarks import balance
from benchmarks.lengths import SEQ_LENGTH, SETS


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("balance") / "found.json"
    balance.main(["--quick", "--output", str(path)])
    return json.loads(path.read_text())


def test_balance_is_even_and_shortens_the_step(found: dict) -> None:
    by = {(row["set"], row["sampler"]): row for row in found["rows"]}
    for name in SETS:
        plain = by[name, "BaseRandomBatchSampler"]
        for sampler in ("BalancedBatchSampler", balance.BALANCED_PACKS):
            row = by[name, sampler]
            assert row["worst_step"] <= 1.01 and row["cost_of_plain"] == pytest.approx(1 / plain["step"], rel=0.01)
        assert by[name, balance.FULLEST_PACKS]["full"] >= 0.95 and plain["of_rank"] == balance.SAMPLES_OF_RANK
        assert by[name, "BucketBatchSampler, data_reordering_img"]["turn"] < plain["turn"]
    assert found["planning"]["full"] >= 0.97


def test_every_goal_is_told(found: dict) -> None:
    text = balance.shown(found)
    assert all(what in text for what, *_ in balance.goals(found))
    assert text.count("reached") + text.count("**missed**") == len(balance.goals(found))


@pytest.mark.parametrize(("name", "mean_tokens"), [("LLaVA-like", 689), ("documents", 2700), ("videos", 2700)])
def test_sets_are_as_described(name: str, mean_tokens: int) -> None:
    lengths = SETS[name](20_000)
    assert lengths.num_tokens.mean() == pytest.approx(mean_tokens, rel=0.03)
    assert lengths.num_target_tokens.min() > 0 and (lengths.num_target_tokens <= lengths.num_tokens).all()
    assert lengths.num_tokens.max() <= SEQ_LENGTH
    assert (lengths.num_patches // 4 < lengths.num_tokens).all()
    assert np.array_equal(SETS[name](100).num_tokens, SETS[name](100).num_tokens)
