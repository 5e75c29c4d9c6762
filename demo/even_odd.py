"""The demo's second task: adapters (LoRA) beside the exported model learn to say whether a digit is even or odd.

Without them the export names the digit, as it was taught.  ``mm.evaluate`` asks the same held-out questions before and
after; the training goes through the shell script.  Knows their flags and files, and nothing else of the trainer.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from demo import digits
from demo.stages import Clock, DemoError, run_python, run_script

QUESTION = "<image>Is this digit even or odd?"
MAXIMUM_ACCURACY_BEFORE = 0.5
"""Of somebody who guesses: adapters that teach what is known already show nothing."""
LEARNING_RATE = 5e-3
LORA = ("--lora-target-modules", "all-linear", "--lora-r", "8", "--lora-alpha", "16")
_MAX_NEW_TOKENS = 8
_BATCH_SIZE = 60


@dataclass(frozen=True)
class EvenOdd:
    """Where the files of this part lie."""

    directory: Path
    """Its own."""
    model_json: Path
    """Of two pipeline stages."""
    export: Path
    """The model that adapters are trained beside."""
    train_json: Path
    questions: Path
    """Held-out digits; both lie beside the pictures."""

    @property
    def data_json(self) -> Path:
        return self.directory / "data.json"

    @property
    def adapter(self) -> Path:
        """In PEFT's layout."""
        return self.directory / "adapter"


@dataclass(frozen=True)
class Learnt:
    """Which part of the held-out answers is right."""

    before: float
    after: float
    """With the adapters."""
    num_questions: int

    def check(self, minimum: float) -> None:
        """DemoError unless the adapters have taught something, and at least ``minimum`` of the answers are right."""
        if self.before > MAXIMUM_ACCURACY_BEFORE or self.after < minimum:
            raise DemoError(
                f"{self.told()} At most {MAXIMUM_ACCURACY_BEFORE:.0%} without adapters and at least {minimum:.0%} with "
                f"them are due")

    def told(self) -> str:
        """In one line."""
        return (f"Even or odd? Of {self.num_questions} held-out answers {self.before:.1%} are right without adapters, "
                f"{self.after:.1%} with them.")


def prepare(
    dataset: digits.DigitsDataset, data_json: Path, model_json: Path, export: Path, directory: Path
) -> EvenOdd:
    """Write the questions, and a data JSON that is otherwise like ``data_json``."""
    directory.mkdir()
    names = (dataset.directory / f"even_odd_{part}.json" for part in ("train", "held_out"))
    task = EvenOdd(directory, model_json, export, *names)
    task.train_json.write_text(json.dumps(_samples(dataset.train), indent=1) + "\n", encoding="utf-8")
    task.questions.write_text(json.dumps(_samples(dataset.held_out), indent=1) + "\n", encoding="utf-8")
    data = json.loads(data_json.read_text(encoding="utf-8"))
    data["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = str(export)
    data["dataset_param"]["basic_parameters"]["dataset"] = str(task.train_json)
    task.data_json.write_text(json.dumps(data, indent=4) + "\n", encoding="utf-8")
    return task


def _samples(path: Path) -> list[dict]:
    """The samples of ``path`` that show one digit, with the other question."""
    asked = []
    for sample in json.loads(path.read_text(encoding="utf-8")):
        question, digit = (message["content"] for message in sample["messages"])
        if question == digits.QUESTION:
            answer = "odd" if int(digit) % 2 else "even"
            asked.append(digits.sample(QUESTION, answer, images=sample["images"]))
    return asked


def learn(task: EvenOdd, num_steps: int, clock: Clock) -> Learnt:
    """Score the export, train adapters beside it, and score both together."""
    clock.stage("scoring the export with mm.evaluate: is a held-out digit even or odd?")
    before, num_questions = _accuracy(task, "before", load=task.export)
    print(f"    {before:.1%} of {num_questions} answers are right")
    clock.stage(f"training adapters (LoRA) beside the export on two pipeline stages, steps 1 to {num_steps}")
    _train(task, num_steps)
    clock.stage("scoring the export with its adapters")
    after, _ = _accuracy(task, "after", load=task.adapter)
    print(f"    {after:.1%} of {num_questions} answers are right")
    return Learnt(before, after, num_questions)


def _train(task: EvenOdd, num_steps: int) -> None:
    variables = {
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
    """What part of the questions ``load``, the export or adapters beside it, answers right, and their number."""
    output = task.directory / name
    run_python("mm.evaluate", [
        "--load", str(load), "--model-name-or-path", str(task.export), "--mm-data", str(task.data_json),
        "--device", "cpu", "--rule", "exact", "--questions", str(task.questions), "--output", str(output),
        "--max-new-tokens", str(_MAX_NEW_TOKENS), "--batch-size", str(_BATCH_SIZE),
    ], task.directory / f"{name}.log")  # fmt: skip
    overall = json.loads((output / "scores.json").read_text(encoding="utf-8"))["overall"]
    return overall["score_percent"] / 100, overall["num_questions"]
