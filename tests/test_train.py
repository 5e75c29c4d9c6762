"""The program itself: a run that stops and goes on equals the uninterrupted one, and its export is the same file."""

import importlib.metadata
import json
import shutil
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mm import process
from mm.checkpoint import convert
from mm.checkpoint import directories as files
from mm.checkpoint.mindspeed_layout import Format, Layout, Storage, Structure
from mm.config.model import read_model
from mm.lock import Claim
from mm.timeline import TIMED, seconds_key
from mm.weights.table import model_weights
from tests.files import json_lines
from tests.launch import torchrun
from tests.tiny_inputs import flags_of, metrics, run, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("train"))


def launch(inputs: Path, name: str, num_stages: int, *flags: str) -> str:
    """As ``run``, but with torchrun."""
    words = flags_of(inputs, name, num_stages, "--num-workers", "0", *flags)
    done = torchrun(num_stages, "mm.train", *words, timeout_seconds=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_mistake_before_the_start_is_reported_by_one_rank_at_once(inputs: Path) -> None:
    started = time.monotonic()
    done = torchrun(2, "mm.train", "--mm-model", str(inputs / "model_1.json"), "--mm-data", str(inputs / "data.json"),
                    "--micro-batch-size", "2", "--seq-length", "512", "--lr", "x")  # fmt: skip
    assert time.monotonic() - started < process._LAUNCHER_SECONDS
    errors = [line for line in done.stderr.splitlines() if "error: --" in line]
    assert errors == ["error: --lr is 'x'; expected a number of at least 0",
                    "error: --train-iters is missing: total number of optimizer steps; or give --num-train-epochs"]
    assert done.returncode != 0
    # torchrun's own report names the mistake and our status, and the only traceback is torchrun's of its own failure
    report = done.stderr[done.stderr.index("Root Cause"):]
    assert "exitcode  : 2" in report
    assert "traceback : --lr is 'x'; expected a number of at least 0 (1 more above)" in report
    assert done.stderr.count("Traceback") == done.stderr.count("\n    raise ChildFailedError(\n") == 1


def test_stop_and_continue_equals_the_uninterrupted_run(inputs: Path) -> None:
    hf, skipping = ("--deterministic-mode", "--load", str(inputs / "hf")), skipping_bad_samples(inputs)
    run(inputs, "whole", 1, *hf, "--export-hf", str(inputs / "whole" / "hf"))
    first = run(inputs, "halves", 1, *hf, *skipping, "--exit-interval", "3", "--export-hf",
                str(inputs / "halves" / "hf"))
    assert not (inputs / "halves" / "hf").exists()  # an export is of the finished training
    assert "elapsed time per iteration (ms):" in first and "loaded a Hugging Face checkpoint" in first
    second = run(
        inputs, "halves", 1, "--deterministic-mode", "--load", str(inputs / "halves" / "save"), *skipping,
        "--export-hf", str(inputs / "halves" / "hf"), num_workers=1,
    )  # fmt: skip
    assert "loaded a training checkpoint" in second
    whole, halves = metrics(inputs, "whole"), metrics(inputs, "halves")
    assert [row["iteration"] for row in halves] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "lr", "grad_norm", "num_tokens", "num_patches", "consumed_samples"):
        assert [row[key] for row in whole] == [row[key] for row in halves], key
    exports = [(inputs / name / "hf" / "model.safetensors").read_bytes() for name in ("whole", "halves")]
    assert exports[0] == exports[1]


def test_the_run_file_says_what_ran(inputs: Path) -> None:
    """Runs after the test above."""
    whole = json.loads((inputs / "whole" / "logs" / "run.json").read_text())
    ran_on, groups = whole["ran_on"], whole["optimizer_groups"]
    trained = [weight.name for weight in model_weights(read_model(inputs / "model_1.json").value)]
    assert {(one["max_lr"], one["weight_decay"]) for one in groups} == {(1e-3, 0.01), (1e-3, 0.0)} and len(groups) == 2
    assert sorted(name for one in groups for name in one["weights"]) == sorted(trained)  # each of them once
    assert ran_on.pop("versions")["torch"] == importlib.metadata.version("torch")
    assert ran_on.pop("kernels")["attention"] == "mm.device.cpu.cpu_attention"
    assert ran_on == {
        "device": "cpu", "backend": "gloo", "adam": "torch.optim.adamw.AdamW", "clips_in_adam": True,
        "deterministic": True, "sdpa": {"vision": "FLASH_ATTENTION", "language": "FLASH_ATTENTION"},
        "switches": {},
    }  # fmt: skip


def skipping_bad_samples(inputs: Path) -> tuple[str, ...]:
    """Flags of a run on the same samples with two among them that cannot be used: the others are those of every run."""
    records = json.loads((inputs / "samples.json").read_text())
    (inputs / "some_bad.json").write_text(json.dumps([records[0], {}, *records[1:], {"messages": []}]))
    data = json.loads((inputs / "data.json").read_text())
    data["dataset_param"]["basic_parameters"]["dataset"] = str(inputs / "some_bad.json")
    (inputs / "data_some_bad.json").write_text(json.dumps(data))
    return "--mm-data", str(inputs / "data_some_bad.json"), "--bad-sample", "skip", "--max-bad-fraction", "0.5"


MEASURED = ("--log-timers", "--profile-pipeline", "5", "--profile", "--profile-step-start", "2", "--profile-step-end",
            "5", "--profile-ranks", "1")
"""Flags of everything that measures.  The run begins at iteration 4."""


def test_another_layout_continues_to_rounding(inputs: Path) -> None:
    """Runs after the test above: from its checkpoint at iteration 3, as two stages of chunks, then as two replicas."""
    checkpoint = inputs / "halves" / "save"
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("3")
    exported = inputs / "stages" / "hf"
    launch(inputs, "stages", 2, "--load", str(checkpoint), "--mm-model", str(inputs / "model_chunks.json"),
           "--virtual-pipeline-model-parallel-size", "2", "--export-hf", str(exported), *skipping_bad_samples(inputs),
           *MEASURED)
    ours, expected = (load_file(path / "model.safetensors") for path in (exported, inputs / "whole" / "hf"))
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5)  # measured 1.3e-6
    said = run(inputs, "replicas", 1, "--load", str(checkpoint), "--use-distributed-optimizer",
               *skipping_bad_samples(inputs), num_ranks=2)
    (listed,) = (inputs / "replicas" / "logs").glob("quarantine.jsonl")
    assert f"note: 2 samples left out; {listed} lists them" in said
    assert [row["reason"] for row in json_lines(listed)] == [
        "has no 'messages'; attr.messages in the data JSON must name that column, unless it is 'messages' or "
        "'conversations'.",
        "'messages' is []; expected a non-empty list of messages."]
    expected = [row["loss"] for row in metrics(inputs, "whole")][3:]
    for name in ("stages", "replicas"):
        assert [row["loss"] for row in metrics(inputs, name)] == pytest.approx(expected, rel=1e-5)  # measured: equal


def saved(directory: Path) -> dict[int, str | None]:
    """The runs of the checkpoints."""
    return files.run_ids(directory)


def test_another_runs_checkpoints_are_neither_replaced_nor_deleted(inputs: Path) -> None:
    """Runs after the tests above: into a copy of the directory with iterations 3 and 6 of one run."""
    save = Path(shutil.copytree(inputs / "halves" / "save", inputs / "used" / "save"))
    before = {path: path.read_bytes() for path in save.rglob("*") if path.is_file()}
    (first,) = set(saved(save).values())
    assert list(saved(save)) == [3, 6] and first is not None and saved(inputs / "whole" / "save")[6] != first
    # another start than that of the run in --save, which this command would continue
    fresh = ("--pretrained-checkpoint", str(inputs / "hf"), "--exit-interval", "3", "--keep-last-checkpoints", "1")
    for flags, mend in ((fresh, f"give --load {save} to continue that run, or another --save for a new one"),
                        (("--load", str(save), "--finetune"), f"leave it out and give --load {save}")):
        with pytest.raises(AssertionError) as failure:
            run(inputs, "used", 1, *flags)
        said = str(failure.value)
        assert f"error: --save is {str(save)!r}, but {save} holds checkpoints of another run (iterations: 3, 6)" in said
        assert mend in said and "add --allow-used-save" in said
    busy = r"error: --log-dir .* is being written by another run, process \d+ on "
    with Claim() as claim, pytest.raises(AssertionError, match=busy):
        claim.add({"--log-dir": str(inputs / "used" / "logs")}, print)
        run(inputs, "used", 1, *fresh, "--allow-used-save")
    assert {path: path.read_bytes() for path in save.rglob("*") if path.is_file()} == before
    run(inputs, "used", 1, *fresh, "--allow-used-save")
    found = saved(save)
    assert found[6] == first != found[3]  # 3 is replaced, as the flag says; 6 is not this run's to delete
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    with pytest.raises(AssertionError, match=rf"another run \(iterations: 6\), not of the run that "
                                             rf"continues from {save}/iter_0000003"):
        run(inputs, "used", 1, "--load", str(save))


def test_a_damaged_checkpoint_is_refused_with_the_command_that_uses_the_older_one(inputs: Path) -> None:
    """Runs after the tests above, on a copy of the directory with iterations 3 and 6 of one run."""
    save = Path(shutil.copytree(inputs / "halves" / "save", inputs / "damaged" / "save"))
    latest, newest = save / files.LATEST_FILE, save / "iter_0000006"
    latest.write_text("6\n")
    flags = ("--deterministic-mode", "--load", str(save), *skipping_bad_samples(inputs))
    weights = newest / "weights_tp00_pp00.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(AssertionError) as failure:
        run(inputs, "damaged", 1, *flags, "--train-iters", "7", "--override-opt_param-scheduler")
    older, command = save / "iter_0000003", f"echo 3 > {latest}"
    assert f" is damaged (its crc32 differs from manifest.json); use another checkpoint: the newest before it is " \
           f"{older}. To continue from it, run `{command}` and start again, " in str(failure.value)
    subprocess.run(["sh", "-c", command], check=True)
    assert f"loaded a training checkpoint from {save}, iteration 3" in run(inputs, "damaged", 1, *flags)
    whole, mended = metrics(inputs, "whole"), metrics(inputs, "damaged")
    assert [row["loss"] for row in mended] == [row["loss"] for row in whole][3:]
    assert latest.read_text() == "6\n"
    assert weights.read_bytes() != content, "the damaged checkpoint has been replaced"


def test_another_seed_and_another_schedule_are_refused_or_chosen(inputs: Path) -> None:
    """Runs after the tests above: from iteration 3 of 6 with 4 samples each."""
    load = ("--load", str(inputs / "halves" / "save"), *skipping_bad_samples(inputs), "--global-batch-size", "2")
    with pytest.raises(AssertionError) as failure:
        run(inputs, "smaller", 1, *load, "--seed", "5", "--lr", "2e-3")
    said = str(failure.value)
    for what in ("--lr was 0.001 and is 0.002 now", "(6 steps x --global-batch-size 4) and ends after 12 now (6 x 2)",
                 "the samples were shuffled by --seed 3, and are now shuffled by --seed 5"):
        assert said.count(what) == 1
    said = run(inputs, "smaller", 1, *load, "--use-checkpoint-opt_param-scheduler", "--exit-interval", "5")
    assert "note: --use-checkpoint-opt_param-scheduler continues with the checkpoint's settings: the decay" in said
    rows, whole = metrics(inputs, "smaller"), metrics(inputs, "whole")
    assert [row["consumed_samples"] for row in rows] == [14, 16]
    assert rows[0]["lr"] == whole[3]["lr"] > rows[1]["lr"] > whole[4]["lr"]  # after 12, 12, 14 and 16 samples


def test_a_measured_run_leaves_its_timeline(inputs: Path) -> None:
    """Runs after the test above, in which the measured run's losses are those of the others."""
    logs = inputs / "stages" / "logs"
    assert ElementTree.parse(logs / "pipeline_step_5.svg").getroot().tag.endswith("svg")
    events = [event for event in json.loads((logs / "pipeline_step_5.json").read_text())["traceEvents"]
              if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in events} == {(0, 0), (1, 1)}
    done = Counter((event["cat"], event["tid"], event["args"]["chunk"], event["args"]["microbatch"])
                   for event in events)
    all_of_them, with_images = (0, 1), tuple(number for number in (0, 1) if done["vision_forward", 0, 0, number])
    slots = {"vision_forward": {(0, 0): with_images, (1, 0): with_images, (0, 1): with_images},  # (rank, chunk)
             "language_forward": {(0, 1): all_of_them, (1, 1): all_of_them},
             "backward": {(0, 0): with_images, (1, 0): with_images, (0, 1): all_of_them, (1, 1): all_of_them},
             "inputs": dict.fromkeys([(0, 0), (1, 0), (0, 1), (1, 1)], all_of_them)}
    for work, expected in slots.items():
        assert {key: count for key, count in done.items() if key[0] == work} == {
            (work, *slot, number): 1 for slot, numbers in expected.items() for number in numbers}
    assert with_images
    for rank in (0, 1):
        mine = [event for event in events if event["tid"] == rank]
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1e-3 for one, other in pairwise(mine))  # us, rounded
        assert all(done[work, rank, None, None] == 1 for work in ("data", "reduction", "update_wait"))
        assert done["exchange", rank, None, None] > 4
    assert [path.name.partition(".")[0] for path in (logs / "profile").iterdir()] == ["rank1"]
    for row in metrics(inputs, "stages"):
        assert set(row["timers"]) == {seconds_key(work) for work in TIMED}
        assert 0 < row["timers"]["vision_forward_seconds"] < row["step_seconds"]
    assert all(row["timers"] is None for row in metrics(inputs, "whole"))


def test_a_converted_checkpoint_trains_like_the_one_it_was_made_of(inputs: Path) -> None:
    """Runs after the first test: its first two steps, from other files of the same weights.

    The first test's runs were in deterministic mode and this one is not: on a CPU there is no difference.
    """
    kind, layout = Storage(Format.TORCH, Structure.CANONICAL), Layout(((5, 3), (0, 0)), ((0, 1), (1, 2)), 2)
    convert.hf_to_mm(inputs / "hf", inputs / "mm", layout, kind).run(num_workers=1)
    said = run(inputs, "converted", 1, "--load", str(inputs / "mm"), "--exit-interval", "2")
    assert f"loaded a converted checkpoint from {inputs / 'mm'}, iteration 0" in said
    whole, found = metrics(inputs, "whole")[:2], metrics(inputs, "converted")
    for key in ("loss", "grad_norm", "lr", "num_tokens", "consumed_samples"):
        assert [row[key] for row in found] == [row[key] for row in whole], key


def test_the_same_command_begins_and_goes_on(inputs: Path) -> None:
    """Runs after the tests above: the base is the data JSON's, --load-base-model's or --pretrained-checkpoint's."""
    save = inputs / "same" / "save"
    same = ("--load", str(save), "--save-interval", "2", "--deterministic-mode")
    said = run(inputs, "same", 1, *same, "--exit-interval", "2")
    base = f"the run starts from the weights of {inputs / 'hf'} (model_name_or_path of {inputs / 'data.json'})"
    assert f"note: --load {save} holds no checkpoint yet, so {base}" in said
    said = run(inputs, "same", 1, *same)
    assert f"loaded a training checkpoint from {save}, iteration 2" in said and "starts from the weights" not in said
    assert [row["loss"] for row in metrics(inputs, "same")] == [row["loss"] for row in metrics(inputs, "whole")]
    given = ("--load", str(inputs / "other" / "save"), "--load-base-model", str(inputs / "mm"), "--exit-interval", "1")
    said = run(inputs, "other", 1, *given)
    assert f"starts from the weights of {inputs / 'mm'} (--load-base-model)" in said
    (first,) = metrics(inputs, "other")
    assert first["loss"] == metrics(inputs, "whole")[0]["loss"]
    again = ("--load", str(inputs / "third" / "save"), "--pretrained-checkpoint", str(inputs / "same" / "save"))
    said = run(inputs, "third", 1, *again, "--train-iters", "7")
    assert f"loaded a training checkpoint from {inputs / 'same' / 'save'}, iteration 6" in said
    assert "--no-load-optim: the learning-rate schedule restarts after iteration 6" in said
    said = run(inputs, "third", 1, *again, "--train-iters", "7", "--finetune", "--lr-decay-style", "cosine")
    assert f"loaded a training checkpoint from {inputs / 'third' / 'save'}, iteration 7" in said
    assert "(--pretrained-checkpoint), so --finetune is ignored as well" in said
    with pytest.raises(AssertionError, match=r"--load is '.*none', which is not a directory"):
        run(inputs, "other", 1, "--load", str(inputs / "none"))
