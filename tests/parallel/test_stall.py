"""Deep pipelines whose messages change their shape at every microbatch do not stall, as Megatron's batched P2P does.

A few steps in every run; with --hypothesis-profile=many 200, on up to 8 ranks.  A stall ends with the watchdog's
report.
"""

import json
from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.many import IS_MANY

NUM_STEPS = 200 if IS_MANY else 6
NAMES = ("pp4", "vpp2-pp4", "vpp2-pp2", *(("pp8",) if IS_MANY else ()))
LOSS_TOLERANCE = 1e-5  # measured 8.1e-8, over the first 12 steps


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """By layout: what the worker wrote."""
    directory: Path = tmp_path_factory.mktemp("stall")
    run_ranks(0, "tests.parallel.stall_worker", str(directory), str(NUM_STEPS), *NAMES, timeout_seconds=3600)
    return {name: json.loads((directory / f"{name}.json").read_text()) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_no_step_stalls(name: str, trained: dict[str, dict]) -> None:
    found = trained[name]
    assert len(found["losses"]) == NUM_STEPS
    assert found["num_changes"] > 0.95 * found["num_microbatches"], "lengths do not change at every microbatch"


@pytest.mark.parametrize("name", NAMES[1:])
def test_all_layouts_train_the_same(name: str, trained: dict[str, dict]) -> None:
    assert trained[name]["losses"][:6] == pytest.approx(trained["pp4"]["losses"][:6], rel=LOSS_TOLERANCE)
