"""Validation counts every sample once in any layout, as transformers does, and does not change the training."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen2_5_VLForConditionalGeneration

from mm.batch import IGNORE_INDEX
from mm.config.data import read_data
from mm.config.model import read_model
from mm.data.encode import SampleEncoder
from mm.data.index.dataset import Dataset
from mm.run.progress import BestSoFar
from tests.data.oracle import transformers_inputs
from tests.launch import run_ranks
from tests.tiny_inputs import metrics, run, short_flags, write_inputs

SIZES = (7, 8, 13)
CUT_SHORT = 4
"""A validation sample of ``bad.json`` whose picture has no pixels."""
TOLERANCE = 1e-6
"""Measured: 1.1e-7 with TP2, 4.5e-8 with one rank, against transformers in fp32."""
STILL = ("--lr", "0", "--global-batch-size", "4", "--eval-interval", "1")
"""Weights stay those of the checkpoint."""
WEIGHT_SHARDS = ("--data-parallel-sharding-strategy", "optim_grads_params", "--overlap-grad-reduce",
                 "--overlap-param-gather")
LAYOUTS: dict[str, tuple[int, str, tuple[str, ...]]] = {  # ranks, model JSON, flags
    "dp1": (1, "model_1", ()),
    "dp2": (2, "model_1", ()),
    "dp4": (4, "model_1", ()),
    "chunks": (4, "model_chunks", ("--virtual-pipeline-model-parallel-size", "2")),
    "cp2-dp2, weight shards": (4, "model_1", (*WEIGHT_SHARDS, "--context-parallel-size", "2")),
    "tp2-pp2": (4, "model_2", ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
}
FEWER_SIZES = {"tp2-pp2": (13,), "cp2-dp2, weight shards": (13,)}
"""Layouts with fewer sizes than ``SIZES``."""
MOVING: dict[str, tuple[str, str, tuple[str, ...]]] = {  # model JSON, data JSON, flags
    "chunks with overlap": ("model_chunks", "val_7", (
        "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--global-batch-size", "4")),
    "weight shards": ("model_1", "packed", (*WEIGHT_SHARDS, "--micro-batch-size", "2")),
}


def write_cases(directory: Path) -> None:
    """The files and command lines of every case."""
    write_inputs(directory)
    records = json.loads((directory / "samples.json").read_text())
    samples = [{**records[number % 10], "messages": [
        {"role": "user", "content": records[number % 10]["messages"][0]["content"] + " more" * number},
        {"role": "assistant", "content": f"Number {number}." * (1 + number % 3)}]} for number in range(13)]
    (directory / "short.png").write_bytes((directory / samples[CUT_SHORT]["images"][0]).read_bytes()[:120])
    bad = [{**one, "images": ["short.png"]} if number == CUT_SHORT else one for number, one in enumerate(samples)]

    def write_data(name: str, validation: list[dict], **basic: bool) -> None:
        (directory / f"{name}.samples.json").write_text(json.dumps(validation))
        data = json.loads((directory / "data.json").read_text())
        data["dataset_param"]["basic_parameters"] |= {
            "val_dataset": str(directory / f"{name}.samples.json"), **basic}
        if basic:
            data["dataloader_param"]["sampler_type"] = "BalancedBatchSampler"
        (directory / f"{name}.json").write_text(json.dumps(data))

    for size in (1, *SIZES):
        write_data(f"val_{size}", samples[:size])
    write_data("packed", samples, packing=True)
    write_data("bad", bad)

    argv, cases = partial(short_flags, directory), {}
    for name, (num_ranks, model, flags) in LAYOUTS.items():
        sets = [f"val_{size}" for size in FEWER_SIZES.get(name, SIZES)] + (["packed"] if name in ("dp2", "dp4") else [])
        sets += ["val_1"] if name in ("dp4", "chunks", "cp2-dp2, weight shards") else []  # replicas without a sample
        runs = [argv(name, model, data, number + 1, *STILL, *flags) for number, data in enumerate(sets)]
        if name == "dp2":
            runs.append(argv(name, model, "val_13", len(runs) + 1, *STILL, "--eval-iters", "2"))
            runs.append(argv(name, model, "bad", len(runs) + 1, *STILL, "--bad-sample", "skip"))
            runs.append(argv(name, model, "bad", len(runs) + 1, *STILL, "--bad-sample", "skip", "--max-bad-fraction",
                             "0.05"))
        cases[name] = {"num_ranks": num_ranks, "runs": runs}
    for name, (model, data, flags) in MOVING.items():
        moving = ("--lr", "1e-3", "--global-batch-size", "8", *flags)
        saved = ("--save", str(directory / name / "save"), "--save-best")
        with_it = argv(name, model, data, 3, *moving, "--eval-interval", "1", *saved)
        without = argv(f"{name}, without", model, data, 3, *moving, "--eval-iters", "0")
        cases |= {name: {"num_ranks": 4, "runs": [with_it]}, f"{name}, without": {"num_ranks": 4, "runs": [without]}}
    (directory / "cases.json").write_text(json.dumps(cases))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("validation")
    write_cases(directory)
    return directory


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[str, dict]:
    run_ranks(4, "tests.run.validation_worker", str(directory), timeout_seconds=600)
    return json.loads((directory / "results.json").read_text())


def validations(result: dict) -> list[dict]:
    return [row for row in result["rows"] if "validation_loss" in row]


@pytest.fixture(scope="module")
def transformers_losses(directory: Path) -> list[tuple[float, int]]:
    """For each of the 13 samples, the sum of its token losses and the number of its tokens."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory / "hf", dtype=torch.float32).eval()
    data = read_data(directory / "packed.json").value
    encoder = SampleEncoder.from_config(data, read_model(directory / "model_1.json").value, 450)
    found = []
    for sample in Dataset(data, split="validation"):
        one = encoder.encode(sample)
        with torch.no_grad():
            logits = model(**transformers_inputs(encoder, sample, one)).logits[0]
        losses = cross_entropy(logits.double(), one.labels, ignore_index=IGNORE_INDEX, reduction="sum")
        found.append((float(losses), one.num_target_tokens))
    return found


def mean(losses: list[tuple[float, int]]) -> float:
    return sum(loss for loss, _ in losses) / sum(count for _, count in losses)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_loss_equals_transformers_over_exactly_these_samples(
    results: dict, transformers_losses: list[tuple[float, int]], name: str
) -> None:
    rows = validations(results[name])
    sizes = FEWER_SIZES.get(name, SIZES)
    assert len(rows) >= len(sizes)
    for size, row in zip(sizes, rows, strict=False):  # later rows have other samples
        expected = transformers_losses[:size]
        assert (row["num_samples"], row["num_target_tokens"]) == (size, sum(count for _, count in expected))
        assert row["validation_loss"] == pytest.approx(mean(expected), rel=TOLERANCE), name


def test_any_number_of_replicas_gets_bit_equal_losses(results: dict) -> None:
    """For 7, 8 and 13 samples, and for 13 in packs."""
    losses = {name: [row["validation_loss"] for row in validations(results[name])] for name in ("dp1", "dp2", "dp4")}
    assert losses["dp1"] == losses["dp2"][:3] == losses["dp4"][:3]
    assert losses["dp2"][3] == losses["dp4"][3] == pytest.approx(losses["dp1"][2], rel=TOLERANCE)
    assert len({*losses["dp2"][:4]}) == 4


def test_ranks_have_problems_only_if_a_sample_is_bad(results: dict) -> None:
    assert {*LAYOUTS, *MOVING} <= results.keys()
    numbers = {name: [len(problems) for problems in result["problems"]] for name, result in results.items()}
    assert {name: found for name, found in numbers.items() if any(found)} == {"dp2": [1, 1]}


@pytest.mark.parametrize("name", ["dp4", "chunks", "cp2-dp2, weight shards"])
def test_replicas_may_have_no_sample(results: dict, transformers_losses: list, name: str) -> None:
    last = validations(results[name])[-1]
    assert (last["num_samples"], last["num_target_tokens"]) == (1, transformers_losses[0][1])
    assert last["validation_loss"] == pytest.approx(mean(transformers_losses[:1]), rel=TOLERANCE)


def test_fewer_batches_and_bad_samples_are_counted(
    results: dict, transformers_losses: list[tuple[float, int]], directory: Path
) -> None:
    some, skipped = validations(results["dp2"])[4:]
    assert some["num_samples"] == 8  # 2 global batches of 4
    without = [loss for number, loss in enumerate(transformers_losses) if number != CUT_SHORT]
    assert (skipped["num_samples"], skipped["num_target_tokens"]) == (12, sum(count for _, count in without))
    assert skipped["validation_loss"] == pytest.approx(mean(without), rel=TOLERANCE)
    (listed,) = (directory / "dp2" / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(listed)["index"] == CUT_SHORT and "short.png" in json.loads(listed)["path"]
    first, second = results["dp2"]["problems"]
    assert first == second and "1 of 13 samples cannot be used, more than --max-bad-fraction 0.05" in first[0]


@pytest.mark.parametrize("name", MOVING)
def test_the_training_is_bit_equal(results: dict, name: str) -> None:
    found, without = results[name], results[f"{name}, without"]
    steps = [[row for row in result["rows"] if "loss" in row] for result in (found, without)]
    for key in ("loss", "grad_norm", "lr", "num_tokens", "num_target_tokens", "consumed_samples"):
        assert [row[key] for row in steps[0]] == [row[key] for row in steps[1]], key
    assert len({row["loss"] for row in steps[0]}) == 3
    assert found["states"] == without["states"]
    losses = [row["validation_loss"] for row in validations(found)]
    assert len(losses) == 3 and losses[2] < losses[0] and not validations(without)


@pytest.mark.parametrize("name", MOVING)
def test_a_better_validation_replaces_the_best(results: dict, directory: Path, name: str) -> None:
    rows, best = validations(results[name]), directory / name / "save" / "best"
    least = min(rows, key=lambda row: row["validation_loss"])["iteration"]
    assert [row["best_iteration"] for row in rows][::2] == [1, least] and least > 1
    assert [one.name for one in best.glob("iter_*")] == [f"iter_{least:07}"]
    assert (best / "latest_checkpointed_iteration.txt").read_text().strip() == str(least)


# With the program itself


def test_the_best_is_saved_and_a_resumed_run_stops_early(directory: Path) -> None:
    """With a learning rate of 0, no validation is better than the first."""
    still = ("--lr", "0", "--mm-data", str(directory / "val_7.json"), "--eval-interval", "1", "--save-best",
             "--early-stopping-patience", "2", "--keep-last-checkpoints", "1")
    save, exported = directory / "stops" / "save", directory / "stops" / "hf"
    first = run(directory, "stops", 1, *still, "--load", str(directory / "hf"), "--exit-interval", "2",
                num_ranks=2)
    assert "validation loss at iteration 1 | loss value: " in first and "stopped early" not in first
    second = run(directory, "stops", 1, *still, "--load", str(save), "--export-hf", str(exported))
    stopped = ("stopped early after iteration 3 of 6: the last 2 validations had no lower loss than iteration 1 "
               "(--early-stopping-patience 2)")
    assert stopped in second and (exported / "config.json").is_file()
    rows = metrics(directory, "stops")
    assert [row["iteration"] for row in rows if "loss" in row] == [1, 2, 3]
    found = [row for row in rows if "validation_loss" in row]
    assert [(row["iteration"], row["best_iteration"]) for row in found] == [(1, 1), (2, 1), (3, 1)]
    assert len({row["validation_loss"] for row in found}) == 1  # two replicas and one
    assert sorted(one.name for one in save.glob("iter_*")) == ["iter_0000003"]
    assert [one.name for one in (save / "best").glob("iter_*")] == ["iter_0000001"]
    assert (save / "best" / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
    again = run(directory, "stops", 1, *still, "--load", str(save))
    assert stopped in again and "elapsed time per iteration" not in again


# The best so far


def test_the_lowest_loss_and_validations_since_are_tracked() -> None:
    best = BestSoFar(samples="a")
    for iteration, loss in enumerate((3.0, 2.0, 2.0, None, 2.5), 1):
        best = best.after(loss, iteration)
    assert best == BestSoFar(2.0, 2, 3, "a")
    assert best.after(1.0, 6) == BestSoFar(1.0, 6, 0, "a")
    assert best.of("a") is best and best.of("b") == BestSoFar(samples="b")
    assert BestSoFar().after(None, 1) == BestSoFar(num_since=1)
