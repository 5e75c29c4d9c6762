"""Found before any device is used: broken or foreign files, targets that must not be written, unusable samples."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from demo.tiny_checkpoint import build
from mm.checkpoint import convert
from mm.checkpoint import training_files as writer
from mm.checkpoint import training_manifest as training
from mm.checkpoint.mindspeed_layout import Format, Layout, Storage
from mm.checkpoint.source import Kind, Source
from mm.checkpoint.training_manifest import TrainingDirectory
from mm.config.generate import load_asking
from mm.config.run import load_run
from mm.data.index.dataset import Dataset, TrainedOn
from mm.data.index.index import Measure
from mm.errors import UserError
from mm.generation.setup import find
from mm.run.preflight import check
from mm.run.sources import Sources, with_start
from mm.train import main
from tests.files import EXAMPLES, ROOT
from tests.tiny_inputs import write_data, write_model


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A checkpoint, one sample without pictures, and JSON files for one stage."""
    samples = [{"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]}]
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    build(tmp_path / "hf", ["One? 1", "Two and three and four? They are of no use here."], seed=0)
    write_data(tmp_path, tmp_path / "samples.json")
    write_model(tmp_path, "1")
    return tmp_path


def flags(inputs: Path, *more: str) -> list[str]:
    return ["--mm-model", str(inputs / "model_1.json"), "--mm-data", str(inputs / "data.json"),
            "--micro-batch-size", "1", "--seq-length", "64", "--train-iters", "1", "--lr", "1e-3",
            "--log-dir", str(inputs / "logs"), *more]


def problems(inputs: Path, *more: str) -> list[str]:
    return check(load_run(flags(inputs, *more), environment={})).problems


def set_data(inputs: Path, section: str, **keys: object) -> None:
    """Keys of a section of the data JSON."""
    data = json.loads((inputs / "data.json").read_text())
    data["dataset_param"][section] |= keys
    (inputs / "data.json").write_text(json.dumps(data))


def test_a_good_run_has_no_problems_and_writes_only_the_index(inputs: Path):
    before = sorted(inputs.rglob("*"))
    assert problems(inputs, "--load", str(inputs / "hf"), "--save", str(inputs / "a/b"), "--export-hf",
                    str(inputs / "new")) == []
    assert sorted(path for path in inputs.rglob("*") if ".mm-index" not in path.parts) == before
    assert len(list((inputs / ".mm-index").glob("*.rows"))) == 1


def test_all_problems_are_reported_together(inputs: Path):
    shutil.copytree(inputs / "hf", inputs / "cut")
    os.truncate(inputs / "cut/model.safetensors", 1000)
    (inputs / "full").mkdir()
    (inputs / "full/file").write_text("mine")
    (inputs / "hf/preprocessor_config.json").unlink()
    (inputs / "samples.json").write_text("[{}]")
    found = problems(inputs, "--load", str(inputs / "cut"), "--export-hf", str(inputs / "full"), "--save",
                     str(inputs / "data.json"))
    expected = ("model.safetensors (1000 bytes) is truncated", "has no preprocessor_config.json",
                "--export-hf: The target", "data.json is a file; give a directory", "samples.json:1: record 0")
    assert len(found) == len(expected)
    for what, problem in zip(expected, found, strict=True):
        assert what in problem
    assert (inputs / "full/file").read_text() == "mine"


def test_a_pattern_that_matches_no_weight_is_a_problem(inputs: Path):
    found = problems(inputs, "--lr-scale-modules", "mlp", "visoin", "--lr-mult", "0.5", "--freeze-modules", "embd")
    assert found[0] == "--freeze-modules has 'embd', which matches no weight name (did you mean 'embedding'?)"
    assert found[1].startswith("--lr-scale-modules has 'visoin', which matches no weight name; names start with ")
    assert len(found) == 2


def test_a_wrong_name_of_a_target_is_one_problem(inputs: Path):
    """Consequences, that nothing is left to train and that no rank fits, are not reported."""
    others = ("--load", str(inputs / "hf"), "--lora-rank-pattern", "q_prj=4", "--lr-scale-modules", "lora_A",
              "--lr-mult", "2")
    for more in ((), others):
        assert problems(inputs, "--lora-target-modules", "q_prj", *more) == [
            "--lora-target-modules has 'q_prj', which matches no linear layer (did you mean 'q_proj'?)"]


def test_features_are_cached_only_for_a_frozen_vit(inputs: Path):
    kept = ("--vision-feature-cache", str(inputs / "kept"))
    (problem,) = problems(inputs, *kept)
    assert "--vision-feature-cache keeps the ViT's output" in problem and "vision_encoder.freeze to true" in problem
    assert problems(inputs, *kept, "--freeze-modules", "image_encoder.encoder") == []
    (problem,) = problems(inputs, "--vision-feature-cache", str(inputs / "data.json"), "--freeze-modules",
                          "image_encoder.encoder")
    assert problem.startswith("--vision-feature-cache is ") and "is a file; give a directory" in problem


def test_an_unfinished_checkpoint_is_rejected(inputs: Path):
    (inputs / "save/iter_0000004").mkdir(parents=True)
    (inputs / "save/latest_checkpointed_iteration.txt").write_text("4")
    (problem,) = problems(inputs, "--load", str(inputs / "save"))
    assert "has no manifest.json, so it is not a complete checkpoint" in problem


def converted(inputs: Path, tp_size: int = 1) -> Path:
    """The checkpoint in MindSpeed-MM's layout, on two stages."""
    layout, storage = Layout(((5, 3),), ((0, 4),), tp_size), Storage(Format.TORCH)
    convert.hf_to_mm(inputs / "hf", inputs / "mm", layout, storage).run(num_workers=1)
    return inputs / "mm"


def test_all_problems_of_a_converted_directory_are_reported_together(inputs: Path, capsys):
    path = converted(inputs, tp_size=2)
    files = [path / f"release/mp_rank_0{rank}_001/model_optim_rng.pt" for rank in range(2)]
    for file in files:
        os.truncate(file, 5000)
    capsys.readouterr()
    assert main(flags(inputs, "--check", "--load", str(path), "--save", str(path))) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 3
    for file, problem in zip(files, printed[:2], strict=True):
        assert problem.startswith(f"error: {file} cannot be read by torch.load") and "truncated" in problem
    assert printed[2].startswith(f"error: --save is {str(path)!r}, which holds weights in MindSpeed-MM's layout")


def test_the_optimizer_state_of_a_mindspeed_checkpoint_is_not_read(inputs: Path):
    path = converted(inputs)
    (path / "manifest.json").unlink()
    (path / "release").rename(path / "iter_0000100")
    (path / "latest_checkpointed_iteration.txt").write_text("100")
    assert problems(inputs, "--load", str(path), "--finetune") == []
    assert problems(inputs, "--load", str(path), "--no-load-optim") == []
    (problem,) = problems(inputs, "--load", str(path))
    assert "add --no-load-optim to continue from that iteration" in problem
    assert "--finetune to start at step 0" in problem


def test_checking_imports_no_megatron():
    code = "import sys, mm.run.preflight; print([name for name in sys.modules if name.startswith('megatron')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          check=True)
    assert done.stdout == "[]\n"


def test_an_export_over_its_base_is_rejected(inputs: Path):
    for target in (inputs / "hf", inputs / "hf" / ".." / "hf", inputs):
        (problem,) = problems(inputs, "--export-hf", str(target))
        assert problem.startswith("--export-hf: The target ") and "is or contains the base directory" in problem


def test_missing_files_are_only_notes_in_a_dry_run(inputs: Path):
    shutil.rmtree(inputs / "hf")
    (inputs / "samples.json").unlink()
    assert problems(inputs, "--dry-run", "--load", "nowhere", "--export-hf", str(inputs / "new")) == []
    with pytest.raises(UserError):
        problems(inputs, "--check")


def test_check_reports_success_or_exits_with_status_2_and_a_dry_run_shows_notes(inputs: Path, capsys):
    assert main(flags(inputs, "--global-batch-size", "4", "--dry-run")) == 0
    assert "  - there are only 1 sample for the 4 of one step: each step repeats some\n" in capsys.readouterr().out
    assert main(flags(inputs, "--check")) == 0
    assert "would stop this run" in capsys.readouterr().out
    (inputs / "samples.json").write_text("[{}]")
    assert main(flags(inputs, "--check")) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and "samples.json:1" in printed.err
    if not torch.cuda.is_available():
        assert main(flags(inputs, "--check", "--device", "cuda")) == 2
        of_samples, of_device = capsys.readouterr().err.splitlines()
        assert "samples.json:1" in of_samples and "--device cuda: torch finds no CUDA device" in of_device


def test_a_script_reports_an_error_once_exits_with_status_2_and_writes_nothing(inputs: Path):
    environment = os.environ | {
        "PYTHON": sys.executable, "MM_MODEL": str(inputs / "model_1.json"), "MM_DATA": str(inputs / "data.json"),
        "LOAD_PATH": str(inputs / "nowhere"), "SAVE_PATH": str(inputs / "save"), "LOG_DIR": str(inputs / "logs"),
        "PP": "1", "LR": "fast", "MASTER_PORT": "29555",
    }  # fmt: skip
    done = subprocess.run(["bash", str(EXAMPLES / "finetune_qwen2_5_vl_tiny.sh")], env=environment, cwd=inputs,
                          capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 2
    assert "--lr is 'fast'" in done.stderr and "LOAD_PATH (--pretrained-checkpoint) is" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert not (inputs / "logs").exists() and not (inputs / "save").exists()


def test_a_load_path_without_weights_is_named_by_its_variable(inputs: Path, monkeypatch):
    """--load is where the run resumes; the weights are what --pretrained-checkpoint names."""
    empty = inputs / "empty"
    empty.mkdir()
    more = ("--load", str(inputs / "save"), "--save", str(inputs / "save"), "--pretrained-checkpoint", str(empty))
    with pytest.raises(UserError, match=r"^--pretrained-checkpoint .*empty is neither a Hugging Face directory"):
        with_start(load_run(flags(inputs, *more)))
    monkeypatch.setenv("LOAD_PATH", str(empty))
    with pytest.raises(UserError, match=r"^LOAD_PATH \(--pretrained-checkpoint\) .*empty is neither"):
        with_start(load_run(flags(inputs, *more)))
    with pytest.raises(UserError, match=r"^LOAD_PATH \(--load\) .*empty is neither a Hugging Face directory"):
        find(load_asking(["--load", str(empty), "--prompt", "?", "--model-name-or-path", str(inputs / "hf")]))


def test_another_model_in_the_hf_directories_is_rejected(inputs: Path):
    directory = inputs / "other"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "hidden_size": 2048}))
    (found,) = problems(inputs, "--load", str(directory))
    assert found.startswith("--load: ") and "text_decoder.hidden_size  128  |  2048" in found
    set_data(inputs, "preprocess_parameters", model_name_or_path=str(directory))
    (found,) = problems(inputs)
    named_by = f"{inputs / 'data.json'}: model_name_or_path"
    assert found.startswith(f"{named_by}: ") and "text_decoder.hidden_size  128  |  2048" in found
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "hidden_act": "gelu"}))
    (found,) = problems(inputs, "--load", str(directory))
    assert found.startswith(f"{named_by} and --load: {directory / 'config.json'}: hidden_act is 'gelu'; expected ")


def test_pictures_that_mindspeed_would_enlarge_are_noted_once(inputs: Path):
    Image.new("RGB", (640, 480)).save(inputs / "large.png")
    records = [{"messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "Yes."}],
                "images": ["large.png"]}] * 3
    (inputs / "samples.json").write_text(json.dumps(records))
    set_data(inputs, "preprocess_parameters", image_max_pixels=262144)

    def found_notes() -> list[str]:
        found = check(load_run(flags(inputs, "--seq-length", "512"), 1, {}))
        assert found.problems == []
        return found.notes

    (note,) = found_notes()
    assert "large.png becomes 315 tokens" in note and "which makes 336" in note
    for rule in ("transformers", "llamafactory"):
        set_data(inputs, "preprocess_parameters", image_resize=rule)
        assert found_notes() == []


def test_data_that_differs_from_the_checkpoints_is_found(inputs: Path, monkeypatch: pytest.MonkeyPatch):
    """An older version's checkpoint has no data facts."""
    run = load_run(flags(inputs), environment={})
    (contents,) = Dataset(run.data, measure=Measure.from_config(run.data, run.model, 64)).fingerprints()

    def saved(data: dict | None) -> str:
        folder = writer.begin(inputs / "save", 1, 0)
        path = writer.commit(folder, training.CheckpointManifest(1, 4, 1, 1, 1, run.model, None, {}, (), data=data))
        source = Source(path, Kind.TRAINING, run.model, 1, (), (), TrainingDirectory.open(path), iteration=1)
        monkeypatch.setattr("mm.run.preflight.open_start", lambda _: Sources(source))
        return str(inputs / "save")

    def found(*more: str) -> tuple[list[str], list[str]]:
        checked = check(load_run(flags(inputs, *more), environment={}))
        return ([one for one in checked.problems if "data differ" in one],
                [one for one in checked.notes if one.startswith("--allow-new-data")])

    for data in (None, TrainedOn((contents,)).to_json()):
        assert found("--load", saved(data)) == ([], [])
    other = replace(contents, samples_sha256="other", num_samples=2)
    load = ("--load", saved(TrainedOn((other,)).to_json()))
    (problem,), _ = found(*load)
    what = f"other samples of {inputs}/samples.json are used (2 then, 1 now)"
    assert problem.startswith(f"the data differ from those of the checkpoint: {what}") and "--allow-new-data" in problem
    assert found(*load, "--finetune") == ([], [])
    (none, (note,)) = found(*load, "--allow-new-data")
    assert none == [] and note.startswith(f"--allow-new-data: {what}") and note.endswith("on with the first sample")


def test_bad_samples_for_validation_are_found_before_training(inputs: Path):
    (inputs / "val.json").write_text('[{"messages": []}]')
    set_data(inputs, "basic_parameters", val_dataset=str(inputs / "val.json"))
    (problem,) = problems(inputs)
    assert problem.startswith(f"{inputs}/val.json:1: record 0 (counted from 0): 'messages' is []")
    (inputs / "val.json").unlink()
    with pytest.raises(UserError, match=r"val_dataset is '.*val.json', which is not a file"):
        problems(inputs)


def test_questions_for_the_model_in_training_are_fully_checked(inputs: Path):
    """A picture with a good header and bad pixels, a question that is too long, and one without an answer."""
    Image.new("RGB", (56, 56), "red").save(inputs / "whole.png")
    (inputs / "cut.png").write_bytes((inputs / "whole.png").read_bytes()[:60])
    asked = [{"question": "What?", "image": "whole.png", "answer": "red"}, {"question": "What?", "answer": ["1", "2"]}]
    path = inputs / "questions.json"

    def found(*more: dict) -> list[str]:
        path.write_text(json.dumps([*asked, *more]))
        run = load_run(flags(inputs, "--eval-generate-interval", "1", "--eval-generate-questions", str(path),
                             "--eval-generate-rule", "exact"), environment={})
        return [one for one in check(run).problems if one.startswith(f"{path}:")]

    assert found() == []
    cut, long = found({"question": "What?", "image": "cut.png", "answer": "a"}, {"question": "x" * 9000, "answer": "a"})
    assert cut.startswith(f"{path}:1: question 2 (counted from 0): ") and "cut.png" in cut
    assert long.startswith(f"{path}:1: question 3 (counted from 0): has ")
    assert "the model has 4096 positions, including the answer" in long
    (missing,) = found({"question": "What?", "image": "whole.png"})
    assert missing.startswith(f"{path}:1: question 2 (counted from 0): 'answer' is null")
    with pytest.raises(UserError, match=r"--eval-generate-questions is 'none\.json', which is not a file"):
        load_run(flags(inputs, "--eval-generate-interval", "1", "--eval-generate-questions", "none.json",
                       "--eval-generate-rule", "exact"), environment={})


def test_skipped_samples_are_counted_beforehand(inputs: Path, capsys):
    """4 of 10 for training and 1 of 2 for validation; too many exit with status 2, as in training."""
    (good,) = json.loads((inputs / "samples.json").read_text())
    records = [{"id": f"bad-{number}", "messages": []} if number in (0, 3, 4, 7) else good for number in range(10)]
    (inputs / "samples.json").write_text(json.dumps(records))
    (inputs / "val.json").write_text(json.dumps([records[1], {"messages": []}]))
    set_data(inputs, "basic_parameters", val_dataset=str(inputs / "val.json"), val_rate=None)
    given = flags(inputs, "--bad-sample", "skip", "--check")
    assert main([*given, "--max-bad-fraction", "0.5"]) == 0
    printed = capsys.readouterr().out
    for note in ("4 of 10 samples for training cannot be used and are left out (--bad-sample skip)",
                 "1 of 2 samples for validation cannot be used and are left out (--bad-sample skip)"):
        assert f"note: {note}\n" in printed
    assert main([*given[:-1], "--dry-run", "--max-bad-fraction", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "Notes:\n" in printed and "  - 4 of 10 samples for training cannot be used" in printed
    assert main([*given, "--max-bad-fraction", "0.4"]) == 2
    (problem,) = capsys.readouterr().err.splitlines()
    assert problem.startswith("error: validation: 1 of 2 samples cannot be used, more than --max-bad-fraction 0.4 ")
    assert main([*given, "--max-bad-fraction", "0.3"]) == 2
    training, _ = capsys.readouterr().err.splitlines()
    assert "4 of 10 samples cannot be used" in training
    assert f"{inputs}/samples.json:1: record 0 (counted from 0, id 'bad-0'): 'messages' is []" in training


def test_keys_that_nothing_reads_are_noted_and_others_refused(inputs: Path, capsys):
    """ms-swift's grounding would train the word <bbox>."""
    (good,) = json.loads((inputs / "samples.json").read_text())
    (inputs / "samples.json").write_text(json.dumps([good | {"id": "a", "solution": "x"}] * 4))
    assert main(flags(inputs, "--check")) == 0
    assert (f"note: 4 records, the first is {inputs}/samples.json: record 0 (id 'a'): nothing reads 'solution'; "
            f"docs/data.md lists the keys that are read\n") in capsys.readouterr().out
    (inputs / "samples.json").write_text(json.dumps([good, good | {"objects": {"bbox": [[1, 2, 3, 4]]}}]))
    assert main(flags(inputs, "--check")) == 2
    (problem,) = capsys.readouterr().err.splitlines()
    assert f"{inputs}/samples.json:1: record 1 (counted from 0): has 'objects', which this version does not" in problem
