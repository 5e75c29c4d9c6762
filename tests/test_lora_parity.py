"""Adapters in any layout train exactly PEFT's model: loss, gradient of every A and B, and weights after two steps."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch import results_by_size, run_ranks
from tests.many import IS_MANY
from tests.parallel.lora_cases import CASES, DROPOUT_CASES, MATRIX, LoraCase

# Largest errors measured over all cases, fp32 on CPU: loss of two steps 2.1e-7, gradient 1.1e-5, weight after two steps
# 3.2e-5.  The tolerances are those of tests/test_parity.py.
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 2e-4
# With dropout, any two layouts: measured 1.6e-7 between losses and 5.6e-7 between norms of gradients.
DROPOUT_TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[LoraCase], dict]:
    """What a case gives; the first of a world size runs all of that size in one launch."""
    run = results_by_size(tmp_path_factory.mktemp("lora"), "tests.parallel.lora_worker")
    return lambda case: run(case.layout.world_size)[case.name]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout_equals_peft(case: LoraCase, found: Callable[[LoraCase], dict]) -> None:
    assert_exact(found(case))


def assert_exact(measured: dict) -> None:
    assert measured["loss_error"] <= LOSS_TOLERANCE, measured
    assert measured["gradient_error"] <= GRADIENT_TOLERANCE, measured
    assert measured["weight_error"] <= WEIGHT_TOLERANCE, measured
    assert measured["num_gradients"] == measured["expected_gradients"] and not measured["uncovered"], measured


@pytest.mark.parametrize("world_size", [2, 4] if IS_MANY else [4])
def test_every_strategy_equals_peft(world_size: int, tmp_path: Path) -> None:
    """With every way to have replicas."""
    names = [case.name for case in MATRIX if case.layout.world_size == world_size]
    run_ranks(world_size, "tests.parallel.lora_worker", str(tmp_path / "found.json"), *names)
    found = json.loads((tmp_path / "found.json").read_text())
    assert sorted(found) == sorted(names)
    for name in names:
        assert_exact(found[name])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_frozen_weights_have_no_gradients_no_state_and_no_copies(
    case: LoraCase, found: Callable[[LoraCase], dict]
) -> None:
    """By count, on every rank: numbers in megatron's gradient buffers, in Adam's moments and in its fp32 copies."""
    measured = found(case)
    assert measured["buffers"] == measured["trained"], measured
    assert 0 < sum(measured["trained"]) < sum(measured["weights"]), measured
    copies = 1 if case.layout.sharding == "no_shard" else case.layout.dp * case.layout.cp
    assert sum(measured["moments"]) * copies == 2 * sum(measured["trained"]), measured
    assert not any(measured["copies"]), "in fp32 Adam works on the weights themselves"


def test_dropout_is_the_same_in_every_layout(found: Callable[[LoraCase], dict]) -> None:
    expected, *others = (found(case) for case in DROPOUT_CASES)
    first, second, without = expected["losses"]
    assert len({first, second, without}) == 3, "another step drops others, and validation none"
    for case, one in zip(DROPOUT_CASES[1:], others, strict=True):
        assert one["losses"] == pytest.approx(expected["losses"], rel=DROPOUT_TOLERANCE), case.name
        assert one["grad_norm"] == pytest.approx(expected["grad_norm"], rel=DROPOUT_TOLERANCE), case.name


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_checkpoints_go_on_bit_for_bit_and_under_another_layout(layout: str, tmp_path: Path) -> None:
    """And what is exported gives PEFT our loss."""
    (tmp_path / "files").mkdir()
    run_ranks(2, "tests.parallel.lora_worker", str(tmp_path / "out.json"), "--files", layout, str(tmp_path / "files"))
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["resumed"] == result["straight"]
    assert not result["different_weights"]
    assert result["other_layout"] == pytest.approx(result["straight"], rel=LOSS_TOLERANCE)  # measured 0
    assert result["peft_loss"] == pytest.approx(result["our_loss"], rel=LOSS_TOLERANCE)  # measured 8.4e-8
    assert result["merged_loss"] == pytest.approx(result["our_loss"], rel=LOSS_TOLERANCE)  # measured 8.4e-8
    assert result["merge_error"] <= 1e-6, "of PEFT's merge, relative; measured 0"
    assert result["saved_names"] == result["trained_names"], "the base model is not saved again"
    assert result["loaded_from_peft"] == pytest.approx(result["our_loss"], rel=1e-6)
