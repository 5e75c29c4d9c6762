"""A rank keeps the bytes that the dry run says, counted in the tensors of two real processes.

tests/test_budgets.py and tests/test_shard_budgets.py trace the same for models of real sizes, and the peaks of their
steps.
"""

import json

import pytest

from tests.launch import run_ranks
from tests.parallel.kept_cases import STATES, STRATEGIES

TOLERANCE = 0.03
"""Measured at most 1.5%, with shards: norms and biases are also kept whole, and buckets are padded for the ranks,
which the small model feels."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    output = tmp_path_factory.mktemp("kept") / "kept.json"
    run_ranks(2, "tests.parallel.kept_worker", str(output))
    return json.loads(output.read_text())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("states", STATES)
def test_kept_bytes_are_those_of_the_dry_run(strategy: str, states: str, counted: dict[str, list[int]]) -> None:
    device_bytes, expected, host_bytes, expected_on_host = counted[f"{strategy}, {states}"]
    assert device_bytes == pytest.approx(expected, rel=TOLERANCE)
    assert host_bytes == pytest.approx(expected_on_host, rel=TOLERANCE) and (host_bytes > 0) is (states == "offloaded")
