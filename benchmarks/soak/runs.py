"""The runs of the soak: their inputs, some of which are damaged, their commands, and what complete runs must share."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.data.clips import even, write_clip
from tests.files import json_lines
from tests.tiny_inputs import flags_of, write_inputs

NUM_STEPS = 80
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "PP 2": (2, 2, ()),
    "DP 2": (1, 2, ("--use-distributed-optimizer",)),
    "TP 2": (1, 2, ("--tensor-model-parallel-size", "2")),
}
"""Stages, ranks and flags."""
CHANGING = "changing"
"""Every launch of such a run has the next layout."""
COMPARED = ("iteration", "loss", "grad_norm", "lr", "consumed_samples", "num_tokens", "num_images", "validation_loss")
ROUNDED = ("loss", "grad_norm", "validation_loss")
MAX_LOSS_ERROR = 1e-5
"""Allowed difference of losses under changing layouts, relative to the largest: layouts add in different orders."""
PHASES = ("check", "start", "load", "data", "save", "export", "between")
_LEFT = (".tmp-", ".old-", ".mm-convert", ".mm-train.lock")
"""Parts of names of files that a run may not leave."""


@dataclass(frozen=True)
class Run:
    """One training, in one or more launches of the same command."""

    inputs: Path
    disk: Path
    """Where it saves and exports."""
    name: str
    layout: str
    """One of ``LAYOUTS``, or ``CHANGING``."""
    limit: int
    """Seconds for each step and phase."""

    def layout_of(self, launch: int) -> str:
        return list(LAYOUTS)[launch % len(LAYOUTS)] if self.layout == CHANGING else self.layout

    @property
    def save(self) -> Path:
        return self.disk / self.name / "save"

    @property
    def logs(self) -> Path:
        return self.inputs / self.name / "logs"

    def words(self, launch: int, num_steps: int = NUM_STEPS, *more: str) -> list[str]:
        """The flags of mm.train."""
        num_stages, _, flags = LAYOUTS[self.layout_of(launch)]
        return flags_of(
            self.inputs, self.name, num_stages, "--num-workers", "1", "--train-iters", str(num_steps), "--load",
            str(self.inputs / "hf"), "--save", str(self.save), "--deterministic-mode", "--async-save",
            "--save-interval", "10", "--keep-last-checkpoints", "2", "--export-hf", str(self.save.with_name("hf")),
            "--eval-interval", "50", "--bad-sample", "skip", "--max-bad-fraction", "0.3", "--step-timeout",
            str(self.limit), "--distributed-timeout-minutes", "1", "--check-weights-interval", "50",
            "--phase-timeouts", *(f"{phase}={self.limit}" for phase in PHASES), *flags, *more,
        )  # fmt: skip

    def latest(self) -> int | None:
        """The iteration of the newest checkpoint."""
        path = self.save / "latest_checkpointed_iteration.txt"
        return int(path.read_text()) if path.exists() else None


def write_all_inputs(folder: Path) -> Path:
    """Those of the tiny model, with a video, samples for validation, a picture that cannot be decoded, and a record
    that cannot be used."""
    write_inputs(folder)
    write_clip(folder / "clip.mp4", even(75))
    records = json.loads((folder / "samples.json").read_text())
    whole = (folder / "1_0.png").read_bytes()
    (folder / "damaged.png").write_bytes(whole[: len(whole) // 2])  # its head is whole
    for place, question, key, file in ((4, "<image>What is it?", "images", "damaged.png"),
                                       (7, "<image>Where is it?", "images", "missing.png"),
                                       (12, "<video>What moves?", "videos", "clip.mp4")):  # fmt: skip
        records.insert(place, {"messages": [{"role": "user", "content": question},
                                            {"role": "assistant", "content": "A bar."}], key: [file]})  # fmt: skip
    (folder / "samples.json").write_text(json.dumps(records))
    data = json.loads((folder / "data.json").read_text())
    data["dataset_param"]["attr"]["videos"] = "videos"
    data["dataset_param"]["preprocess_parameters"] |= {"video_max_pixels": 96 * 96}
    data["dataset_param"]["basic_parameters"] |= {"val_rate": 0.1}
    (folder / "data.json").write_text(json.dumps(data))
    return folder


def differences(run: Run, whole: Run) -> list[str]:
    """Where two complete runs differ, and what the first one has left; ``whole`` was not disturbed."""
    found = []
    ours, theirs = _rows(run), _rows(whole)
    if run.layout == CHANGING:
        if (error := loss_error(run, whole)) > MAX_LOSS_ERROR:
            found.append(f"{run.name}: its losses differ by {error:.1e} from those of {whole.name}")
        ours, theirs = (_exact(rows) for rows in (ours, theirs))
    else:
        folders = [one.save / f"iter_{NUM_STEPS:07d}" for one in (run, whole)]
        for file in sorted(path.name for path in folders[1].glob("*.safetensors")):
            own = folders[0] / file
            if not own.exists() or own.read_bytes() != (folders[1] / file).read_bytes():
                found.append(f"{run.name}: another {file}")
    if ours != theirs or sum(row["kind"] == "step" for row in ours) != NUM_STEPS:
        found.append(f"{run.name}: other metrics")
    ledgers = [sorted(map(json.dumps, json_lines(one.logs / "quarantine.jsonl"))) for one in (run, whole)]
    if ledgers[0] != ledgers[1] or len(ledgers[0]) != 2:
        found.append(f"{run.name}: other samples are left out")
    if _tree(run) != _tree(whole):
        found.append(f"{run.name}: other files: {sorted(_tree(run) ^ _tree(whole))}")
    return found


def loss_error(run: Run, whole: Run) -> float:
    """The largest difference of two runs' losses, relative to the largest loss."""
    ours, theirs = ([row["loss"] for row in _rows(one) if row["kind"] == "step"] for one in (run, whole))
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True)) / max(theirs)


def left(run: Run) -> list[str]:
    """Files of a run that has ended that are no results."""
    folders = (run.save.parent, run.logs)
    return sorted(path.name for folder in folders for path in folder.rglob("*") if any(
        part in path.name for part in _LEFT))


def _rows(run: Run) -> list[dict[str, Any]]:
    return [{key: row[key] for key in ("kind", *COMPARED) if key in row} for row in
            json_lines(run.logs / "metrics.jsonl")]


def _exact(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in ROUNDED} for row in rows]


def _tree(run: Run) -> set[str]:
    """Names of what a run has written.

    Those of weights depend on the layout.  Those of checkpoints depend on where the run was stopped: the newest and
    their number count.
    """
    top = {f"{folder.name}/{path.name}" for folder in (run.save, run.logs) for path in folder.iterdir()}
    hf = run.save.with_name("hf")
    checkpoints = sorted(name for name in top if name.startswith("save/iter_"))
    top = (top - {*checkpoints}) | {f"{len(checkpoints)} checkpoints", *checkpoints[-1:]}
    names = top | {str(path.relative_to(hf.parent)) for path in hf.rglob("*")} | set(left(run))
    return {name for name in names if not name.startswith("logs/metrics_")}
