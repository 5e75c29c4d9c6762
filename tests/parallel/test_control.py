"""The cost of control groups grows with the number of ranks, not of pairs; for more ranks the same law computes it."""

import json
import math
import subprocess
import sys
from dataclasses import asdict

import pytest

from mm.environment import installed
from mm.training.machine import has_lazy_gloo
from tests.files import ROOT
from tests.parallel.control import COLLECTIVES, computed, computed_of_pairs

NUM_RANKS = 16


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    """In a process of its own: the open files that are counted are the process's."""
    command = [sys.executable, "-m", "tests.parallel.control", str(NUM_RANKS)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in said.splitlines() if line.startswith("{")]  # gloo's reports are dropped
    return {row["collective"]: row for row in map(json.loads, lines)}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_ranks_ask_the_store_and_open_follows_the_law(rows: dict[str, dict], name: str) -> None:
    row = rows[name]
    if has_lazy_gloo(installed("torch")):
        assert row["made"] == {"store_calls": NUM_RANKS, "store_bytes": 0, "open_files": 4 * NUM_RANKS}
        assert row["used"] == row["computed"]
    else:
        assert row["made"] == row["used"] == asdict(computed_of_pairs(NUM_RANKS))


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("num_ranks", [16, 128, 4096])
def test_a_rank_talks_with_a_logarithm_of_the_ranks(num_ranks: int, name: str) -> None:
    cost, powers = computed(num_ranks, name), math.log2(num_ranks)
    assert cost.store_calls <= num_ranks * (1 + 4 * powers)
    assert cost.open_files <= num_ranks * (4 + 2 * powers)
