"""``mm-plan`` without a command: a report with the best layouts, files that the trainer takes, and bad input."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.files import EXAMPLES, ROOT
from tests.plan.test_cli import said


def flags(size: str = "7b", world_size: int = 8, **other: object) -> list[str]:
    found = {
        "mm_model": EXAMPLES / f"model_{size}.json", "mm_data": EXAMPLES / f"data_{size}.json", "seq_length": 1024,
        "micro_batch_size": 4, "global_batch_size": 64, "lr": 1e-5, "train_iters": 10, "world_size": world_size,
        "lengths": "llava", **other,
    }  # fmt: skip
    words = [word for name, value in found.items() for word in ("--" + name.replace("_", "-"), str(value))]
    return [*words, "--bf16", "--use-distributed-optimizer"]


def test_the_best_layouts_are_shown_and_the_trainer_takes_the_best(capsys, tmp_path: Path) -> None:
    text = said(capsys, 0, "--device", "h200", "--fix", "PP=1/2,VPP=1/2,MBS=2/4", "--write", str(tmp_path / "best"),
                *flags())  # fmt: skip
    assert re.search(r"^Advice +layout 1: ", text, re.MULTILINE) and "published figures of H200" in text
    seconds = [float(found) for found in re.findall(r"^\d+ .*(?:none|selective|full) +([\d.]+) ", text, re.MULTILINE)]
    assert seconds == sorted(seconds) and len(seconds) >= 2
    assert re.search(r"^now ", text, re.MULTILINE)
    least = float(re.search(r"take less than ([\d.]+) s", text)[1])
    assert least <= seconds[0]
    source = f'set -e; source {tmp_path}/best/layout.sh; NPUS_PER_NODE=8 bash {EXAMPLES}/finetune_qwen2_5_vl_7b.sh'
    done = subprocess.run(["bash", "-c", f'{source} "${{LAYOUT_FLAGS[@]}}" --dry-run'], cwd=ROOT, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Batch     64 samples per step" in done.stdout and f"{tmp_path}/best/model.json" in done.stdout
    paths = EXAMPLES / "model_7b.json", tmp_path / "best/model.json"
    given, written = (json.loads(path.read_text()) for path in paths)
    for model in (given, written):
        for tower in (model["image_encoder"]["vision_encoder"], model["text_decoder"]):
            for key in [key for key in tower if key == "pipeline_num_layers" or key.startswith("recompute")]:
                del tower[key]
    assert written == given  # nothing else has changed


@pytest.mark.parametrize(("fixed", "other", "messages"), [
    ("PP=1/2,VPP=1,MBS=4", {"data_parallel_sharding_strategy": "optim_grads_params"},
     ("give --data-parallel-sharding-strategy optim_grads to search the others",
      "the present layout is not legal: --data-parallel-sharding-strategy optim_grads_params needs one")),
    ("PP=1,MBS=1", {"world_size": 1, "global_batch_size": 8, "lora_target_modules": "all-linear"},
     ("the present layout is not legal: The world size is 1, not a multiple of",)),
])
def test_a_present_layout_that_is_not_possible_is_explained(fixed, other, messages, capsys) -> None:
    """Weights in shards have layouts with one stage."""
    text = said(capsys, 0, "--device", "h200", "--fix", fixed, *flags(**other))
    assert re.search("Now +the present layout", text) and all(one in text for one in messages)


def test_the_encoder_batch_can_be_fixed_and_is_written(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    text = said(capsys, 0, "--device", "h200", "--fix", "TP=2,PP=1,MBS=1,ENCODER=tensor_ranks,EB=4", "--write",
                str(tmp_path), *flags())  # fmt: skip
    assert "tensor_ranks x 4" in text
    model = json.loads((tmp_path / "model.json").read_text())
    assert (model["encoder_placement"], model["encoder_batch_microbatches"]) == ("tensor_ranks", 4)


@pytest.mark.parametrize(("words", "message"), [
    (["--device", "h2000"], r"--device is 'h2000', which is not known .*did you mean 'h200'.*mm-plan calibrate"),
    (["--device", "a100"], r"which may be A100 40GB or A100 80GB; expected one of"),
    ([], r"--device is absent and --calibration is absent; give one of them"),
    (["--device", "h200", "--fix", "TB=2"], r"--fix has 'TB=2'; expected TP, CP, PP"),
    (["--device", "h200", "--fix", "TP=x"], r"--fix has 'TP=x'; expected an integer of at least 1, as in TP=2"),
    (["--device", "h200", "--fix", "SAMPLER=best"], r"--fix has SAMPLER=best; expected as given, balanced"),
    (["--device", "h200", "--lengths", "lava"], r"--lengths has 'lava'; expected one of llava, .*did you mean 'llava'"),
    (["--device", "h200", "--lengths", "text=-1"], r"--lengths has 'text=-1'; expected a share above 0"),
    (["--device", "h200", "--world-size", "7", "--fix", "PP=2"],
     r"no layout is legal for --world-size 7 .* change --world-size"),
    (["--device", "h200", "--memory-gib", "2"], r"no layout fits into 2.0 GiB: the smallest of \d+ needs [\d.]+ GiB .*"
                                                r"GiB too much; use more or larger devices"),
    (["--calibration", "none.json"], r"none.json: cannot be read"),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused(words, message, capsys: pytest.CaptureFixture) -> None:
    text = said(capsys, 2, *flags(), *words)
    assert re.search(message, text, re.DOTALL), text


@pytest.mark.parametrize(("fixed", "sampler", "words", "change"), [
    ("MBS=2", {}, ["--calculate-per-microbatch-loss"], "MBS must stay 4"),
    ("MBS=4,SAMPLER=balanced", {"sampler_type": "BucketBatchSampler"}, [], "SAMPLER must stay 'as given'"),
    ("MBS=4,SAMPLER=balanced", {}, ["--calculate-per-microbatch-loss"], "SAMPLER must stay 'as given'"),
    ("MBS=4", {}, ["--calculate-per-microbatch-loss"], None),
    ("MBS=4,SAMPLER=as given", {"sampler_type": "BucketBatchSampler"}, [], None),
])  # fmt: skip
def test_fixed_values_that_would_change_what_is_learnt_are_refused(
    fixed, sampler, words, change, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    data = json.loads((EXAMPLES / "data_7b.json").read_text())
    data["dataloader_param"] |= sampler
    (tmp_path / "data.json").write_text(json.dumps(data))
    text = said(capsys, 2 * bool(change), "--device", "h200", "--top", "1", "--fix", f"TP=1,PP=2,VPP=1,{fixed}",
                *flags(mm_data=tmp_path / "data.json"), *words)  # fmt: skip
    assert (change or "with the same loss and gradients") in text
