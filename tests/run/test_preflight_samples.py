"""Problems and notes on the samples, found before any device is used."""

import dataclasses
import json
from pathlib import Path

import pytest
from PIL import Image

from mm.checkpoint import training_files as writer
from mm.checkpoint import training_manifest as training
from mm.checkpoint.source import Kind, Source
from mm.checkpoint.training_manifest import TrainingDirectory
from mm.config.run import load_run
from mm.data.index.dataset import Dataset, TrainedOn
from mm.data.index.index import Measure
from mm.errors import UserError
from mm.run.preflight import check
from mm.run.sources import Sources
from mm.train import main
from tests.run.preflight_runs import flags, make_inputs, problems, set_preprocessing


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    return make_inputs(tmp_path)


def test_pictures_that_mindspeed_would_enlarge_are_noted_once(inputs: Path):
    Image.new("RGB", (640, 480)).save(inputs / "large.png")
    records = [{"messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "Yes."}],
                "images": ["large.png"]}] * 3
    (inputs / "samples.json").write_text(json.dumps(records))
    set_preprocessing(inputs, image_max_pixels=262144)

    def found_notes() -> list[str]:
        found = check(load_run(flags(inputs, "--seq-length", "512"), 1, {}))
        assert found.problems == []
        return found.notes

    (note,) = found_notes()
    assert "large.png becomes 315 tokens" in note and "which makes 336" in note
    for rule in ("transformers", "llamafactory"):
        set_preprocessing(inputs, image_resize=rule)
        assert found_notes() == []


def test_data_that_differs_from_the_checkpoints_is_found(inputs: Path, monkeypatch: pytest.MonkeyPatch):
    """An older version's checkpoint has no data facts."""
    run = load_run(flags(inputs), environment={})
    (fingerprint,) = Dataset(run.data, measure=Measure.from_config(run.data, run.model, 64)).fingerprints()

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

    for data in (None, TrainedOn((fingerprint,)).to_json()):
        assert found("--load", saved(data)) == ([], [])
    other = dataclasses.replace(fingerprint, samples_sha256="other", num_samples=2)
    load = ("--load", saved(TrainedOn((other,)).to_json()))
    (problem,), _ = found(*load)
    what = f"other samples of {inputs}/samples.json are used (2 then, 1 now)"
    assert problem.startswith(f"the data differ from those of the checkpoint: {what}") and "--allow-new-data" in problem
    assert found(*load, "--finetune") == ([], [])
    (none, (note,)) = found(*load, "--allow-new-data")
    assert none == [] and note.startswith(f"--allow-new-data: {what}") and note.endswith("on with the first sample")


def test_bad_samples_for_validation_are_found_before_training(inputs: Path):
    (inputs / "val.json").write_text('[{"messages": []}]')
    data = json.loads((inputs / "data.json").read_text())
    data["dataset_param"]["basic_parameters"]["val_dataset"] = str(inputs / "val.json")
    (inputs / "data.json").write_text(json.dumps(data))
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
    data = json.loads((inputs / "data.json").read_text())
    data["dataset_param"]["basic_parameters"] |= {"val_dataset": str(inputs / "val.json"), "val_rate": None}
    (inputs / "data.json").write_text(json.dumps(data))
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


def test_a_dry_run_shows_the_notes_of_the_preflight(inputs: Path, capsys):
    assert main(flags(inputs, "--global-batch-size", "4", "--dry-run")) == 0
    assert "  - there are only 1 sample for the 4 of one step: each step repeats some\n" in capsys.readouterr().out
