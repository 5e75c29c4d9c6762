"""Any layout trains exactly the Hugging Face model: loss, every gradient, gradient norm and the first update."""

import json
from functools import cache
from pathlib import Path

import pytest

from tests.launch import torchrun
from tests.parallel.cases import CASES, NOT_FINITE, Case

# Largest errors measured over all cases, fp32 on CPU: loss 1.8e-7 (before and after the update), gradient 8.2e-6,
# weight 7.0e-5, gradient norm 5.4e-7.
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
# Adam's first update is the sign of the gradient: elements whose gradient is all rounding may step the other way.
WEIGHT_TOLERANCE = 2e-4
NORM_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory):
    """Errors of a case; the first case of a world size runs all cases of that size in one launch."""
    directory: Path = tmp_path_factory.mktemp("parity")

    @cache
    def run(world_size: int) -> dict[str, dict]:
        output = directory / f"{world_size}.json"
        torchrun(world_size, "tests.parallel.parity_worker", str(output))
        return json.loads(output.read_text())

    return lambda case: run(case.world_size)[case.name]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout_equals_transformers(case: Case, errors) -> None:
    measured = errors(case)
    if case.batch == "no targets":
        assert measured["loss"] == 0.0 and measured["grad_norm"] == 0.0
    assert measured["loss_error"] <= LOSS_TOLERANCE, measured
    assert measured["loss_after_error"] <= LOSS_TOLERANCE, measured
    assert measured["gradient_error"] <= GRADIENT_TOLERANCE, measured
    assert measured["weight_error"] <= WEIGHT_TOLERANCE, measured
    assert measured["grad_norm_error"] <= NORM_TOLERANCE, measured
    assert measured["num_gradients"] == measured["expected_gradients"] and not measured["uncovered"], measured


@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_gradient_that_is_not_finite_is_refused_by_all_ranks(name: str, errors) -> None:
    (case,) = [case for case in CASES if case.name == name]
    assert errors(case)["refused"] is True


def test_every_world_size_is_run() -> None:
    assert {case.world_size for case in CASES} == {1, 2, 4}
    assert len({case.name for case in CASES}) == len(CASES)
