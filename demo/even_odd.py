"""The demo's second task: LoRA adapters for the exported model learn to tell whether a digit is even or odd.

Without them the export answers with the digit, as it was trained to.  ``mm.evaluate`` asks the same held-out questions
before and after; the training goes through the shell script.  Depends only on their flags and files.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from demo import digits
from demo.stages import Clock, DemoError, run_python, run_script

QUESTION = "<image>Is this digit even or odd?"
MAXIMUM_ACCURACY_BEFORE = 0.5
"""The accuracy of guessing.  Above it, the model would already know what the adapters should teach."""
LEARNING_RATE = 5e-3
LORA = ("--lora-target-modules", "all-linear", "--lora-r", "8", "--lora-alpha", "16")
_MAX_NEW_TOKENS = 8
_BATCH_SIZE = 60


@dataclass(frozen=True)
class EvenOdd:
    """The files of this part."""

    directory: Path
    """Folder of this part."""
    device: str
    model_json: Path
    """For two pipeline stages."""
    export: Path
    """The model that the adapters extend."""
    train_json: Path
    questions: Path
    """Held-out digits.  Like ``train_json``, it is in the folder of the pictures."""

    @property
    def data_json(self) -> Path:
        return self.directory / "data.json"

    @property
    def adapter(self) -> Path:
        """In PEFT's layout."""
        return self.directory / "adapter"


@dataclass(frozen=True)
class Learnt:
    """Share of correct answers to the held-out questions."""

    before: float
    after: float
    """With the adapters."""
    num_questions: int

    def check(self, minimum: float) -> None:
        """Raises DemoError unless the adapters taught something and at least ``minimum`` of the answers are right."""
        if self.before > MAXIMUM_ACCURACY_BEFORE or self.after < minimum:
            raise DemoError(
                f"{self.summary()} Expected at most {MAXIMUM_ACCURACY_BEFORE:.0%} without adapters and at least "
                f"{minimum:.0%} with them")

    def summary(self) -> str:
        """One line with both accuracies."""
        return (f"Even or odd? Of {self.num_questions} held-out answers {self.before:.1%} are right without adapters, "
                f"{self.after:.1%} with them.")


def prepare(
    dataset: digits.DigitsDataset, data_json: Path, model_json: Path, export: Path, directory: Path, device: str
) -> EvenOdd:
    """Write the questions, and a data JSON that is like ``data_json`` except for its dataset and model."""
    directory.mkdir()
    names = (dataset.directory / f"even_odd_{part}.json" for part in ("train", "held_out"))
    task = EvenOdd(directory, device, model_json, export, *names)
    digits.write_samples(task.train_json, _samples(dataset.train))
    digits.write_samples(task.questions, _samples(dataset.held_out))
    data = json.loads(data_json.read_text(encoding="utf-8"))
    data["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = str(export)
    data["dataset_param"]["basic_parameters"]["dataset"] = str(task.train_json)
    task.data_json.write_text(json.dumps(data, indent=4) + "\n", encoding="utf-8")
    return task


def _samples(path: Path) -> list[dict]:
    """The samples of ``path`` with one digit, with the other question."""
    asked = []
    for sample in json.loads(path.read_text(encoding="utf-8")):
        question, digit = (message["content"] for message in sample["messages"])
        if question == digits.QUESTION:
            answer = "odd" if int(digit) % 2 else "even"
            asked.append(digits.sample(QUESTION, answer, images=sample["images"]))
    return asked


def learn(task: EvenOdd, num_steps: int, clock: Clock) -> Learnt:
    """Score the export, train adapters for it, and score both together."""
    clock.stage("scoring the export with mm.evaluate: is a held-out digit even or odd?")
    before, num_questions = _accuracy(task, "before", load=task.export)
    print(f"    {before:.1%} of {num_questions} answers are right")
    clock.stage(f"training adapters (LoRA) for the export on two pipeline stages, steps 1 to {num_steps}")
    _train(task, num_steps)
    clock.stage("scoring the export with its adapters")
    after, _ = _accuracy(task, "after", load=task.adapter)
    print(f"    {after:.1%} of {num_questions} answers are right")
    return Learnt(before, after, num_questions)


def _train(task: EvenOdd, num_steps: int) -> None:
    variables = {
        "DEVICE": task.device,
        "NPUS_PER_NODE": "2",
        "TP": "1",
        "PP": "2",
        "MM_DATA": str(task.data_json),
        "MM_MODEL": str(task.model_json),
        "LOAD_PATH": str(task.export),
        "SAVE_PATH": str(task.directory / "save"),
        "LOG_DIR": str(task.directory / "logs"),
        "TRAIN_ITERS": str(num_steps),
        "SAVE_INTERVAL": str(num_steps),
        "LR": str(LEARNING_RATE),
    }
    flags = (*LORA, "--export-hf", str(task.adapter))
    run_script(variables, flags, task.directory / "train.log", 1, num_steps)


def _accuracy(task: EvenOdd, name: str, *, load: Path) -> tuple[float, int]:
    """The share of questions that ``load`` (the export, or adapters for it) answers correctly, and their number."""
    output = task.directory / name
    run_python("mm.evaluate", [
        "--load", str(load), "--model-name-or-path", str(task.export), "--mm-data", str(task.data_json),
        "--device", task.device, "--rule", "exact", "--questions", str(task.questions), "--output", str(output),
        "--max-new-tokens", str(_MAX_NEW_TOKENS), "--batch-size", str(_BATCH_SIZE),
    ], task.directory / f"{name}.log")  # fmt: skip
    overall = json.loads((output / "scores.json").read_text(encoding="utf-8"))["overall"]
    return overall["score_percent"] / 100, overall["num_questions"]
