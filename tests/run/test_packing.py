"""Packing and balancing only redistribute work: loss and gradient of each step equal the plain run's.  And in such
runs, a slow rank is named.
"""

import json
from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.tiny_inputs import short_flags, write_inputs

PACKING = {"basic_parameters": {"packing": True}}
BALANCED = {"sampler_type": "BalancedBatchSampler"}
SLOW = ("--train-iters", "8", "--log-interval", "2", "--global-batch-size", "4", "--lr-decay-style", "constant")
CASES: dict[str, tuple[dict, dict, tuple[str, ...]]] = {  # what is in the data JSON, and flags
    "plain": ({}, {}, ()),
    "packed": (PACKING, {}, ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")),
    "chunks": (PACKING, BALANCED, ("--virtual-pipeline-model-parallel-size", "2", "--profile-pipeline", "2")),
    "buckets": ({}, {"sampler_type": "BucketBatchSampler", "priority_mode": "data_reordering_img"}, ()),
    "sample": ({}, {}, ("--calculate-per-sample-loss",)),
    "sample, packed evenly": (PACKING, BALANCED, ("--calculate-per-sample-loss", "--log-timers")),
    "slow data": ({}, {}, SLOW),
}
LIKE_PLAIN = ("packed", "chunks", "buckets")


def write_cases(directory: Path) -> None:
    """The files and command line of every case."""
    write_inputs(directory)
    for name, (dataset_param, dataloader_param, flags) in CASES.items():
        data = json.loads((directory / "data.json").read_text())
        for section, keys in dataset_param.items():
            data["dataset_param"][section] |= keys
        data["dataloader_param"] |= dataloader_param
        (directory / f"{name}.json").write_text(json.dumps(data))
        model = "model_chunks" if name == "chunks" else "model_2"
        (directory / f"{name}.argv.json").write_text(json.dumps(short_flags(
            directory, name, model, name, 3, "--global-batch-size", "20", "--lr", "1e-3", *flags)))
    (directory / "names.json").write_text(json.dumps(list(CASES)))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """The results and the log of all cases."""
    directory = tmp_path_factory.mktemp("packing")
    write_cases(directory)
    said = run_ranks(4, "tests.run.packing_worker", str(directory))
    return json.loads((directory / "results.json").read_text()), said


@pytest.fixture(scope="module")
def results(ran: tuple[dict, str]) -> dict:
    return ran[0]


@pytest.mark.parametrize(("name", "reference"), [
    *((name, "plain") for name in LIKE_PLAIN), ("sample, packed evenly", "sample")])
def test_loss_and_gradient_of_each_step_equal_the_plain_runs(results: dict, name: str, reference: str) -> None:
    found, expected = results[name]["metrics"], results[reference]["metrics"]
    assert [row["iteration"] for row in found] == [1, 2, 3]
    for key in ("num_tokens", "num_target_tokens", "num_patches", "consumed_samples", "lr"):
        assert [row[key] for row in found] == [row[key] for row in expected], key
    for key in ("loss", "grad_norm"):
        values, others = ([row[key] for row in rows] for rows in (found, expected))
        assert values == pytest.approx(others, rel=2e-6), key  # measured: 2.9e-7


def test_the_runs_differ_in_the_distribution_of_samples(results: dict) -> None:
    """Otherwise the test above would prove nothing."""
    dealt = {name: result["microbatches"] for name, result in results.items()}
    for name in sorted(CASES.keys() - {"slow data"}):
        for step, plain in zip(dealt[name], dealt["plain"], strict=True):
            assert samples_of(step) == samples_of(plain)
    for name in LIKE_PLAIN:
        assert dealt[name] != dealt["plain"]
    counts = {name: [[len(replica) for replica in step] for step in steps] for name, steps in dealt.items()}
    assert any(len(set(step)) == 2 for step in counts["packed"]), counts  # replicas with different numbers of packs
    assert {count for step in counts["chunks"] for count in step} == {8}  # 4 for each stage, of 10 samples


def samples_of(step: list) -> list[int]:
    return sorted(one for replica in step for microbatch in replica for one in microbatch)


def test_a_slow_rank_is_named(ran: tuple[dict, str]) -> None:
    """Rank 1 reads a step's samples for 0.9 s."""
    results, said = ran
    compared = [row for row in results["slow data"]["metrics"] if row["slowest_ranks"]]
    assert [row["iteration"] for row in compared] == [4, 6, 8]  # those of iteration 2 have no step to compare yet
    first = [row["slowest_ranks"][0] for row in compared]
    assert [one["ranks"] for one in first].count([1]) >= 2, first
    slow = [one for one in first if one["ranks"] == [1]]
    assert {(one["stage"], one["compared_with"]) for one in slow} == {(0, "replicas")}
    for one in slow:
        assert one["share"] > 0.4 and one["own_seconds"] > 0.89, one
        assert one["share"] == pytest.approx(one["own_seconds"] / one["median_seconds"] - 1)
    assert compared[-1]["slowest_rank_share"] == first[-1]["share"]
    assert " slowest ranks over the last 2 steps: rank 1 (host " in said
