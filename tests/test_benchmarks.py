"""The benchmarks run, and both of their sides train the same model.  How fast is not judged here."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.config.model import read_model
from mm.weights.table import model_weights
from tests import workload
from tests.files import EXAMPLES, ROOT
from tests.launch import run_ranks, warm_python

OURS, PEER = "ours", "transformers"
PAGE = ROOT / "docs" / "performance.md"
BEGIN = "<!-- measured on a device: written by python -m benchmarks.device_hour.render -->"
END = "<!-- end of what was measured on a device -->"
HOUR = ("ceilings", "parity", "mixed", "kernels")
COMMANDS = {
    # parity is a command of its own below: here its limit ends it, as a command that fails
    "hour": ("benchmarks.device_hour", "--rehearse", "--steps", *HOUR, "--limit", "parity=1"),
    "parity": ("benchmarks.step", "parity", "--device", "cpu"),
    "train": ("benchmarks.step", "train", "--device", "cpu", "--precision", "bf16 remainders"),
    "speed": ("benchmarks.step", "speed", "--device", "cpu", "--size", "tiny", "--tokens", "700",
              "--num-microbatches", "2", "--warmup", "1", "--steps", "1", "--recompute", "--freeze", "vision"),
    "cpu": ("benchmarks.step", "cpu", "--quick", "--rounds", "1", "--num-microbatches", "2"),
    "encoder": ("benchmarks.step", "encoder", "--quick", "--rounds", "1"),
    "sharding": ("benchmarks.step", "sharding", "--quick", "--rounds", "1"),
    "data": ("benchmarks.data", "--rounds", "1"),
    "plan": ("benchmarks.plan", "--quick", "--rounds", "1"),
    "shipped": ("benchmarks.plan.shipped", "--size", "7b", "--data", "llava"),
    "fits": ("benchmarks.plan.fits", "--size", "3b"),
    "pipeline": ("benchmarks.pipeline", "--only", "2 virtual chunks", "--rounds", "1", "--steps", "1"),
    "convert": ("benchmarks.convert", "--size", "tiny", "--rounds", "1", "--caches", "cold"),
    "states": ("benchmarks.states", "--iters", "3", "--last", "2", "--without", "bf16 moments", "no copies",
               "--max-samples", "192"),
    "save": ("benchmarks.save", "--device", "cpu", "--mib", "40", "--rounds", "1"),
    "index": ("benchmarks.data.index", "--records", "800", "--images", "5", "--processes", "1"),
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """Every benchmark, two at a time, in forks of the warm process, except for the one whose memory is looked at."""
    folder = tmp_path_factory.mktemp("benchmarks")
    (folder / "files").mkdir()
    further = {
        "convert": ("--folder", str(folder / "files")),
        "speed": ("--output", str(folder / "speed"), "--profile", str(folder / "profile.txt")),
    }

    python = str(warm_python())

    def result(name: str) -> dict | list | Path:
        words = [*COMMANDS[name], *further.get(name, ("--output", str(folder / name)))]
        done = subprocess.run(
            [sys.executable if name == "convert" else python, "-m", *words], cwd=ROOT, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip
        if name == "convert":
            assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
            assert list((folder / "files").iterdir()) == []
            return json.loads(done.stdout[done.stdout.index("{") :])
        if name == "hour":
            assert done.returncode == 1 and done.stdout.endswith("failed: parity\n"), f"{done.stdout}\n{done.stderr}"
            return folder / name
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        found = json.loads((folder / name).read_text())
        return {**found, "folder": folder} if name == "speed" else found

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(result, name) for name in COMMANDS}


def test_a_save_in_blocks_is_compared_with_one_thing_after_another(started: dict[str, Future]) -> None:
    """The benchmark itself compares the files, byte for byte."""
    result = started["save"].result()
    names = {name for name, one in result.items() if isinstance(one, dict) and "times_as_fast" in one}
    assert names == {"save, blocks of 16 MiB", "wait for --async-save"}


def test_predictions_are_compared_with_measured_steps(started: dict[str, Future]) -> None:
    """How right they are is for the whole benchmark: its quick model is far too small."""
    result = started["plan"].result()
    assert len(result["rows"]) == 4 and 0 <= result["share_in_interval"] <= 1
    for row in result["rows"]:
        assert 0 <= row["low"] < row["predicted"] < row["high"] and row["measured"] > 0
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)


def test_runs_of_the_program_are_compared(started: dict[str, Future]) -> None:
    (case,) = started["train"].result()["cases"].values()
    assert case["resumes_to_the_bit"] and case["exports_the_same_file"]
    assert 1e-3 < case["loss_error"] < 6e-2  # measured 2.8e-2; the reference is in fp32


def test_trainings_with_rounded_states_are_compared(started: dict[str, Future]) -> None:
    """In the first steps rounding changes far less than another order of the samples."""
    found = started["states"].result()["mean_loss_over_fp32"]
    assert found["fp32"] == 0 < abs(found["both"]) < abs(found["fp32, another seed"])


def test_planned_layouts_beat_those_of_the_scripts(started: dict[str, Future]) -> None:
    theirs, same_sizes, ours = started["shipped"].result()
    assert (theirs["name"], theirs["speedup"]) == ("MindSpeed-MM", 1.0) and 0.8 < theirs["share_of_bound"] < 0.95
    assert ours["seconds"] <= same_sizes["seconds"] < theirs["seconds"]
    assert same_sizes["share_of_bound"] > 0.96


def test_the_page_has_the_table_of_what_fits(started: dict[str, Future]) -> None:
    page = (ROOT / "docs" / "planning.md").read_text().splitlines()
    lines = started["fits"].result()
    assert len(lines) == 2 + 3 and set(lines) <= set(page)


def num_vision_params() -> int:
    """Weights of the tiny ViT."""
    weights = model_weights(read_model(EXAMPLES / "model_tiny.json").value)
    return sum(math.prod(one.shape) for one in weights if one.name.startswith("image_encoder.encoder"))


def records_of(path: Path) -> list[dict]:
    """Whole lines of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_kind(records: list[dict], kind: str, **values: object) -> list[dict]:
    wanted = {"kind": kind, **values}
    return [one for one in records if all(one.get(key) == value for key, value in wanted.items())]


def rendered(folder: Path, records: list[dict] | Path | None, page: str) -> str:
    """``page`` with what ``records`` render to; None: those that are kept."""
    if isinstance(records, list):
        (folder / "made.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
        records = folder / "made.jsonl"
    (folder / "page.md").write_text(page)
    words = ["--document", str(folder / "page.md"), *(["--records", str(records)] if records else [])]
    run_ranks(0, "benchmarks.device_hour.render", *words)
    return (folder / "page.md").read_text()


def block(page: str) -> str:
    """What stands between the comments."""
    return page.partition(f"{BEGIN}\n\n")[2].partition(f"\n{END}")[0]


def test_loading_images(started: dict[str, Future]) -> None:
    """The benchmark itself compares the patches of both processors, bit for bit."""
    result = started["data"].result()
    assert len(result) == 3
    assert all(one["exact_speed_ratio"] > 0 < one["fast_speed_ratio"] for one in result.values())


def test_device_step_parity(started: dict[str, Future]) -> None:
    result = started["parity"].result()
    assert {name.rpartition(", ")[2] for name in result["cases"]} == {"fp32", "bf16"} and len(result["cases"]) == 4
    assert all(case["passed"] for case in result["cases"].values())
    # a comparison that cannot fail would show the same error in both precisions
    for name, case in result["cases"].items():
        worst = case["ours"]["gradient_error_max"]
        assert worst > 1e-3 if name.endswith("bf16") else 0 < worst < 1e-4


def test_device_step_speed(started: dict[str, Future]) -> None:
    result = started["speed"].result()
    assert result["loss_error"] < 1e-5 and result["grad_norm_error"] < 1e-5
    for side in (result["ours"], result["transformers"]):
        assert side["tokens"] == 2 * 689 and side["patches"] == 2 * 1260
        assert side["tokens_per_second"] * side["step_seconds"]["median"] == pytest.approx(side["tokens"])
        assert side["last_loss"] < side["first_loss"]
        assert side["hardware_flops"] > side["model_flops"]  # the LLM is recomputed
        memory = side["expected_memory_gib"]
        num_frozen = num_vision_params()
        assert memory["states"] * 2**30 == pytest.approx(18 * side["params_trained"] + 2 * num_frozen, rel=1e-12)
        assert memory["activations"] > 0 and memory["at_work"] > 0
    for name in ("profile.txt", "profile_transformers.txt"):
        assert "aten::addmm" in (result["folder"] / name).read_text()


def test_cpu_step(started: dict[str, Future]) -> None:
    results = started["cpu"].result()
    assert [result["processes"] for result in results] == [1, 2]
    assert all(result["our_speed_over_peer"]["median"] > 0 and result["tokens_per_step"] > 0 for result in results)


def test_encoder_placements(started: dict[str, Future]) -> None:
    results = started["encoder"].result()
    assert [result["batch"] for result in results] == ["even", "mixed", "one"]
    for result in results:
        assert result["patches"] > 0 and result["seconds"]["cut"] > 0
        for encoder in ("whole", "together"):
            assert result["time_ratio"][encoder]["least"] > 0 and result["predicted_ratio"][encoder] > 0


def test_sharding_strategies(started: dict[str, Future]) -> None:
    result = started["sharding"].result()
    assert list(result["ratio"]) == [
        "optim", "optim_grads", "optim_grads, overlapped", "optim_grads_params", "optim_grads_params, overlapped"]
    assert all(one["least"] > 0 for one in result["ratio"].values())


def test_pipeline(started: dict[str, Future]) -> None:
    """The ideal is (m + (p - 1) / v)(f + b).  That sleeps on a busy machine come near to it is not asked for."""
    ((name, found),) = started["pipeline"].result()["sleep"].items()
    assert name == "2 virtual chunks" and found["ideal_seconds"] == pytest.approx((16 + 3 / 2) * 0.09)
    assert 0 < found["share_of_ideal"] < 1


def test_convert(started: dict[str, Future]) -> None:
    """Every command at its smallest; the exit status says whether the times of a real size would be good enough."""
    result = started["convert"].result()
    commands = {name: one for name, one in result["cold"].items() if name != "copy"}
    assert {name.split()[0] for name in commands} == {"hf_to_mm", "mm_to_hf", "resplit"} and len(commands) == 3
    assert all(one["ratio"]["median"] > 0 and 10 < one["memory_mib"] < 512 for one in commands.values())


def names_left(folder: Path) -> list[str]:
    """Commands that the hour would run."""
    listed = run_ranks(0, "benchmarks.device_hour", "--list", "--output", str(folder))
    return [line.partition(" (at most ")[0] for line in listed.splitlines() if " (at most " in line]


def test_hour_goes_on_after_a_command_that_fails(started: dict[str, Future], tmp_path: Path) -> None:
    folder = started["hour"].result()
    ended = {one["label"]: one["status"] for one in of_kind(records_of(folder / "records.jsonl"), "command")}
    assert ended == dict.fromkeys(HOUR, 0) | {"parity": "ended at its limit of 1 s"}
    every = names_left(tmp_path)
    assert set(HOUR) < set(every)
    assert names_left(folder) == [name for name in every if name == "parity" or name not in HOUR]


def test_kernels_compute_the_same_in_every_form(started: dict[str, Future]) -> None:
    records = records_of(started["hour"].result() / "records.jsonl")
    kernels = of_kind(records, "kernel")
    assert {one["group"] for one in kernels} == {"ceilings", "attention"}
    assert all(0 < one["ms_min"] <= one["ms"] <= one["ms_max"] and one["repeats"] >= 3 for one in kernels)
    assert 0 < max(one["difference"] for one in kernels) < 1e-5  # measured: 3e-7


def test_mixed_samples_reach_attention_of_different_lengths(started: dict[str, Future]) -> None:
    records = records_of(started["hour"].result() / "records.jsonl")
    (mixed,) = of_kind(records, "kernel", case="LLM, mixed lengths", name=OURS, part="forward")
    assert mixed["num_equal_runs"] == mixed["num_segments"] > 2
    (ours,), (theirs,) = (of_kind(records, "side", label="mixed", side=side) for side in (OURS, PEER))
    for step in (ours, theirs):
        assert step["phases_ms"].keys() == {"start", "forward", "backward", "optimizer"}
        assert all(value > 0 for value in step["phases_ms"].values())
        (seconds,) = step["steps_seconds"]
        assert sum(step["phases_ms"].values()) == pytest.approx(1000 * seconds)
    assert ours["first_loss"] == pytest.approx(theirs["first_loss"], rel=1e-5)


def test_a_rehearsal_is_rendered(started: dict[str, Future], tmp_path: Path) -> None:
    """The same text as in the command's own file; a second time changes nothing, and no records remove it."""
    folder = started["hour"].result()
    text = (folder / "tables.md").read_text()
    once = rendered(tmp_path, folder / "records.jsonl", PAGE.read_text())
    assert block(once) == text and rendered(tmp_path, folder / "records.jsonl", once) == once
    records = records_of(folder / "records.jsonl")
    sides = [of_kind(records, "side", label="mixed", side=side)[0] for side in (OURS, PEER)]
    rates = [side["tokens"] / side["steps_seconds"][0] for side in sides]
    speed = re.search(r"\| tokens/s relative to transformers, mixed samples.* \| ([\d.]+)x \|", text)
    assert speed is not None and float(speed[1]) == pytest.approx(rates[0] / rates[1], rel=1e-2)
    for line in ("A rehearsal", "| mixed | ours | 800 |", "parity (ended at its limit"):
        assert line in text
    assert "Nothing was measured yet" in rendered(tmp_path, [], once)


def test_the_document_shows_the_records_that_are_kept(tmp_path: Path) -> None:
    """No figure without its record: the block is what the kept records render to."""
    page = PAGE.read_text()
    assert rendered(tmp_path, None, page) == page and block(page)


def test_records_of_two_devices_are_refused(tmp_path: Path) -> None:
    machine = {"kind": "machine", "label": "kernels", "size": "3b", "date": "2026-01-01", "versions": {}}
    records = [machine | {"device": "one"}, machine | {"device": "another"}, {"kind": "side", "label": "kernels"}]
    with pytest.raises(AssertionError, match="another and one; expected one device"):
        rendered(tmp_path, records, PAGE.read_text())


def test_a_command_that_ends_in_an_error_is_recorded(tmp_path: Path) -> None:
    """And a last line that was cut off is left out."""
    words = ["benchmarks.device_hour", "--rehearse", "--steps", "tests", "--output", str(tmp_path)]
    done = subprocess.run([str(warm_python()), "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTEST_ADDOPTS": "--no-such-flag"})  # fmt: skip
    assert done.returncode == 1 and done.stdout.endswith("failed: tests\n"), f"{done.stdout}\n{done.stderr}"
    *_, ended = records_of(tmp_path / "records.jsonl")
    assert ended["status"] != 0 and "usage" in ended["tail"] and ended["tail"] in (tmp_path / "log.txt").read_text()
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"kind": "cut off')
    rendered(tmp_path, tmp_path / "records.jsonl", PAGE.read_text())


@given(tokens=st.integers(16, 20_000), seed=st.integers(0, 99))
def test_mixed_samples_hold_the_tokens_asked_for(tokens: int, seed: int) -> None:
    samples = workload.mixed_samples(tokens, seed)
    lengths = [workload.num_tokens(sample) for sample in samples]
    assert sum(lengths) == tokens and lengths == sorted(lengths) and samples == workload.mixed_samples(tokens, seed)
    assert all(num_text >= workload.MIN_TEXT_TOKENS for _, num_text in samples)
    grids = [grid for grids, _ in samples for grid in grids]
    assert all(h % 2 == w % 2 == 0 and h * w // 4 <= workload.MAX_PICTURE_TOKENS for _, h, w in grids)


def test_index(started: dict[str, Future]) -> None:
    """Both starts see the same samples; the second one reads them from the first one's index."""
    found = started["index"].result()
    first, second = found["first_start"], found["second_start"]
    for key in ("num_samples", "tokens_per_sample", "patches_per_sample"):
        assert first[key] == second[key] > 0
    assert first["num_samples"] == found["records"] == 800 and found["index_megabytes"] > 0
