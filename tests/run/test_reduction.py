"""Gradients summed in bf16 equal those in fp32 up to rounding, on any layout.

That such a run resumes to the bit: tests/run/checkpoint/test_restore.py.
"""

import json
from pathlib import Path

import pytest

from tests.launch import run_ranks

TOLERANCE = 1e-2
"""Measured 1.8e-3 to 2.2e-3: two microbatches, on one or two ranks; each sum is rounded to bf16 (2^-9 is 2e-3)."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    output: Path = tmp_path_factory.mktemp("reduction") / "found.json"
    run_ranks(2, "tests.parallel.reduction_worker", str(output))
    return json.loads(output.read_text())


@pytest.mark.parametrize("layout", ["dp2-distributed", "tp2", "tp2-sequence", "tp2-whole-encoder", "pp2-tied"])
def test_gradients_in_bf16(found: dict, layout: str) -> None:
    assert found[layout]["dtypes"] == [["torch.float32"], ["torch.bfloat16"]]
    assert 1e-4 < found[layout]["error"] <= TOLERANCE, found
