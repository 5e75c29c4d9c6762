"""The runs that are disturbed: their layouts, inputs and flags, and the comparison with an undisturbed one."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kills import marks
from benchmarks.kills.launch import Launch, Starter
from benchmarks.kills.marks import Mark
from tests.files import json_lines
from tests.tiny_inputs import flags_of, write_inputs

LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "PP 2": (2, 2, ()),
    "TP 2 x PP 2": (2, 4, ("--tensor-model-parallel-size", "2")),
    "DP 2": (1, 2, ("--use-distributed-optimizer",)),
}
"""Stages, ranks and flags."""
NUM_STEPS = 24
COMPARED = ("iteration", "loss", "grad_norm", "lr", "consumed_samples", "num_tokens", "validation_loss")
PHASES = (marks.START, marks.LOAD, marks.DATA, marks.STEP, marks.SAVE, marks.BACKGROUND, marks.VALIDATION, marks.EXPORT)


class Runs:
    """Runs of one layout with the same settings, each in a folder of its own."""

    def __init__(
        self, inputs: Path, layout: str, starter: Starter, limit: int, num_workers: int = 0, flags: Sequence[str] = (),
        num_steps: int = NUM_STEPS,
    ) -> None:  # fmt: skip
        """``limit``: seconds for each step and phase."""
        self.inputs, self.layout, self.num_steps = inputs, layout, num_steps
        self.limit = limit
        self._starter, self._num_workers, self._flags = starter, num_workers, flags
        self._whole = self._name("whole")

    def _name(self, name: str) -> str:
        return f"{self.layout}_{self.num_steps}_{name}".replace(" ", "")

    def folder(self, name: str) -> Path:
        return self.inputs / self._name(name)

    def launch(
        self, name: str, *more: str, num_ranks: int | None = None, launcher_words: Sequence[str] = ()
    ) -> Launch:
        """Start the command of the run ``name``, with background saves unless ``more`` says otherwise."""
        num_stages, usual_ranks, flags = LAYOUTS[self.layout]
        limits = [f"{phase}={self.limit}" for phase in ("check", "start", "load", "data", "save", "export", "between")]
        words = flags_of(
            self.inputs, self._name(name), num_stages, "--num-workers", str(self._num_workers), "--train-iters",
            str(self.num_steps), "--load", str(self.inputs / "hf"), "--deterministic-mode", "--save-interval", "2",
            "--keep-last-checkpoints", "2", "--export-hf", str(self.folder(name) / "hf"), "--eval-interval", "2",
            "--step-timeout", str(self.limit), "--distributed-timeout-minutes", "1", "--phase-timeouts", *limits,
            *flags, *self._flags, *more,
        )  # fmt: skip
        return Launch(self._starter, words, num_ranks or usual_ranks, self.folder(name), launcher_words)

    def undisturbed(self, num_ranks: int | None = None) -> list[Mark]:
        """Run it once without a signal; returns its marks."""
        launch = self.launch("whole", "--async-save", num_ranks=num_ranks)
        ending = launch.end()
        if ending.status or ending.left:
            raise RuntimeError(f"the undisturbed run ended with {ending.status}:\n{ending.said[-5000:]}")
        return launch.marks.all

    def differences(self, name: str) -> list[str]:
        """Where a complete run differs from the undisturbed one: metrics, checkpoint and export."""
        ours, theirs = self.folder(name), self.inputs / self._whole
        rows = [self.rows(folder) for folder in (ours, theirs)]
        found = [] if rows[0] == rows[1] and len(rows[0]) >= self.num_steps else [f"{name}: other metrics"]
        for folder in (f"save/iter_{self.num_steps:07d}", "hf"):
            names = {path.name for path in (*(theirs / folder).iterdir(), *(ours / folder).iterdir())}
            found += [f"{name}: another {folder}/{file}" for file in sorted(names) if file.endswith(".safetensors")
                      and (ours / folder / file).read_bytes() != (theirs / folder / file).read_bytes()]
        return found

    @staticmethod
    def rows(folder: Path) -> list[list]:
        """What a run has recorded of its steps and validations."""
        return [[row.get(key) for key in COMPARED] for row in json_lines(folder / "logs" / "metrics.jsonl")
                if row["kind"] in ("step", "validation")]

    def delete(self, name: str) -> None:
        """Delete a run that has been compared."""
        shutil.rmtree(self.folder(name))

    def delete_export(self, name: str) -> None:
        """Delete what a launch has exported, so that the next exports again."""
        shutil.rmtree(self.folder(name) / "hf", ignore_errors=True)

    def saved(self, name: str) -> int:
        """The iteration of the latest checkpoint; 0 if there is none."""
        latest = self.folder(name) / "save" / "latest_checkpointed_iteration.txt"
        return int(latest.read_text()) if latest.exists() else 0


def write_all(folder: Path) -> Path:
    """The inputs of all runs: those of ``tests.tiny_inputs``, with samples for validation."""
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(folder)
    data = json.loads((folder / "data.json").read_text())
    records = json.loads((folder / "samples.json").read_text())
    (folder / "validation.json").write_text(json.dumps(records[:4]))
    data["dataset_param"]["basic_parameters"]["val_dataset"] = str(folder / "validation.json")
    (folder / "data.json").write_text(json.dumps(data))
    return folder


def clock() -> str:
    return time.strftime("%H:%M:%S")
