"""A run as its ``--log-dir`` describes it: settings, metrics, bad samples, answers and timelines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mm.config.outputs import ANSWERS_FOLDER, FACTS_FILE, METRICS_FILE, PREDICTIONS_FILE, THUMBNAILS_FOLDER
from mm.data.feed.quarantine import LEDGER
from mm.data.record_name import BadSample
from mm.errors import UserError, printable
from mm.files import complete, json_object
from mm.formats.checkpoints import ITERATION_NAME, complete_iterations, iteration_name
from mm.page.history import MAX_LISTED, History

_MAX_SETS = 5
"""Most answers to one question, from different iterations."""
ASIDE = "metrics_*.jsonl"
"""Pattern of the metrics of earlier runs, which a new run has moved aside."""


@dataclass(frozen=True)
class Answered:
    """One question with its answers during the run."""

    number: int
    """Its place in the file of questions, counted from 0."""
    question: str
    right: Sequence[str]
    answers: Sequence[tuple[int, str, float]]
    """Iteration, text and score from 0 to 1, in ascending order."""
    thumbnails: Sequence[Path]


@dataclass(frozen=True)
class RunRecord:
    """Everything that a page shows."""

    name: str
    """What the page calls the run."""
    facts: Mapping[str, Any]
    """``run.json``; empty if it is missing."""
    history: History
    notes: tuple[str, ...]
    """What is missing."""
    bad_samples: tuple[BadSample, ...]
    num_bad_samples: int
    questions: tuple[Answered, ...]
    """Worst answers first."""
    timelines: tuple[Path, ...]
    """Pictures of measured steps, in their order, without those of predictions that ``mm-plan`` may have written."""
    checkpoints: tuple[tuple[int, datetime], ...]
    """Iterations of the complete checkpoints in ``--save``, and when they were written."""
    last_written: datetime | None
    """When the newest row was written; None if there is none."""

    def fact(self, *keys: str) -> Any:
        """A value of ``run.json``; None if an older version did not write it."""
        found: Any = self.facts
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found


def read_run(path: Path, name: str) -> RunRecord:
    """Read the ``--log-dir`` of a run, or the metrics of an earlier run in it.

    Raises UserError if there are no metrics, or a file is damaged.
    """
    metrics = path if path.is_file() else path / METRICS_FILE
    if not metrics.is_file():
        raise UserError(_missing(path))
    facts_file = metrics.parent / FACTS_FILE
    is_aside = metrics.name != METRICS_FILE
    facts: Mapping[str, Any] = {}
    notes: list[str] = []
    if is_aside:
        notes.append(f"{FACTS_FILE} beside {metrics.name} belongs to a later run, so no settings are shown.")
    elif facts_file.is_file():
        facts = _facts(facts_file)
    else:
        notes.append(f"{metrics.parent} has no {FACTS_FILE}, so no settings are shown.")
    return read_beside(metrics, name, facts, History.read(metrics), notes)


def run_names(paths: Sequence[Path]) -> list[str]:
    """The shortest names that tell the paths apart: without the folders that contain all of them, and without an ending
    that they share.  A single ``logs`` keeps the folder that it is in.
    """
    names = [path.absolute().parts for path in paths]
    length = 2 if len(paths) == 1 and names[0][-1] == "logs" else 1
    while length < max(map(len, names)) and len({one[-length:] for one in names}) < len(names):
        length += 1
    ends = [one[-length:] for one in names]
    while len({one[-1] for one in ends}) == 1 < len({one[:-1] for one in ends}) == len(ends) and all(
            one[:-1] not in ((), ("/",)) for one in ends):
        ends = [one[:-1] for one in ends]
    return [printable("/".join(one).lstrip("/")) for one in ends]


def read_beside(
    metrics: Path, name: str, facts: Mapping[str, Any], history: History, notes: Sequence[str] = ()
) -> RunRecord:
    """Read everything else of a run whose facts and metrics are known."""
    folder, is_aside = metrics.parent, metrics.name != METRICS_FILE
    aside = sorted(one.name for one in folder.glob(ASIDE)) if not is_aside else []
    earlier = [f"Metrics of earlier runs with this --log-dir: {', '.join(aside)}."] if aside else []
    num_bad, bad = (0, ()) if is_aside else _bad_samples(folder / LEDGER)
    save = facts.get("arguments", {}).get("save") if isinstance(facts.get("arguments"), Mapping) else None
    return RunRecord(
        name, facts, history, (*notes, *earlier), bad, num_bad,
        () if is_aside else _questions(folder / ANSWERS_FOLDER),
        () if is_aside else tuple(
            sorted(folder.glob("pipeline_step_*.svg"), key=lambda one: (len(one.name), one.name))),
        _checkpoints(save), datetime.fromtimestamp(metrics.stat().st_mtime) if metrics.stat().st_size else None)


def _missing(path: Path) -> str:
    """Why ``path`` is not a run."""
    inside = [METRICS_FILE, f"logs/{METRICS_FILE}", *(() if not path.is_dir() else (
        str(one.relative_to(path)) for one in sorted(path.glob(f"*/{METRICS_FILE}"))))]
    near = next((path / one for one in inside if (path / one).is_file()), None)
    what = f"has no {METRICS_FILE}" if path.is_dir() else "is not a directory"
    cure = f"give {near.parent}" if near is not None else (
        "give that of a run that has begun; by default it is logs in the directory where mm-train was started")
    return f"{path}: {what}; expected the --log-dir of a run: {cure}"


def _facts(path: Path) -> Mapping[str, Any]:
    try:
        return json_object(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: is damaged ({error}); move it away, and make the page again: it will show no "
                        f"settings") from error


def _bad_samples(ledger: Path) -> tuple[int, tuple[BadSample, ...]]:
    """The number of samples that were left out, and the first of them."""
    if not ledger.is_file():
        return 0, ()
    found: list[BadSample] = []
    number = 0
    with ledger.open("rb") as stream:
        for number, line in enumerate(complete(stream), start=1):
            if number <= MAX_LISTED:
                try:
                    found.append(BadSample(**json_object(line)))
                except (ValueError, TypeError) as error:
                    raise UserError(f"{ledger}:{number}: is not a bad sample ({error}); remove that line") from error
    return number, tuple(found)


def _questions(folder: Path) -> tuple[Answered, ...]:
    """The questions with their answers at up to ``_MAX_SETS`` iterations, among them the first and the last."""
    files = folder.glob(f"iter_*/{PREDICTIONS_FILE}")  # a user may have left other folders there, such as copies
    found = sorted((int(match[1]), one) for one in files if (match := ITERATION_NAME.fullmatch(one.parent.name)))
    chosen = found if len(found) <= _MAX_SETS else [
        found[number * (len(found) - 1) // (_MAX_SETS - 1)] for number in range(_MAX_SETS)]
    sets = {iteration: _predictions(one) for iteration, one in chosen}
    if not sets:
        return ()
    newest = sets[max(sets)]
    worst = sorted(range(len(newest)), key=lambda number: newest[number]["score"])[:MAX_LISTED]
    return tuple(_answered(folder, number, sets) for number in worst)


def _answered(folder: Path, number: int, sets: Mapping[int, Sequence[Mapping[str, Any]]]) -> Answered:
    newest = sets[max(sets)][number]
    answers = tuple((iteration, str(rows[number]["prediction"]), float(rows[number]["score"]))
                    for iteration, rows in sets.items()
                    if number < len(rows) and rows[number]["index"] == newest["index"])
    options = "".join(f"\n{letter}. {text}" for letter, text in newest.get("options", {}).items())
    return Answered(number, newest["question"] + options, newest["right"], answers, thumbnails_of(folder, number))


def _predictions(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with path.open("rb") as stream:
        for number, line in enumerate(complete(stream), start=1):
            try:
                row = json_object(line)
                missing = {"index", "question", "right", "prediction", "score"} - row.keys()
            except ValueError as error:
                raise UserError(f"{path}:{number}: is damaged ({error}); remove the folder {path.parent}") from error
            if missing:
                raise UserError(f"{path}:{number}: has no {sorted(missing)[0]!r}, so it is not an answer with its "
                                f"score; remove the folder {path.parent}")
            rows.append(row)
    return rows


def thumbnail_path(folder: Path, number: int, image: int) -> Path:
    """The small copy of an image of question ``number``, in the ``ANSWERS_FOLDER`` of a run."""
    return folder / THUMBNAILS_FOLDER / f"{number}_{image}.jpg"


def thumbnails_of(folder: Path, number: int) -> list[Path]:
    """All small copies of a question's images."""
    found: list[Path] = []
    while (path := thumbnail_path(folder, number, len(found))).is_file():
        found.append(path)
    return found


def _checkpoints(save: Any) -> tuple[tuple[int, datetime], ...]:
    if not isinstance(save, str) or not Path(save).is_dir():
        return ()
    folder = Path(save)
    return tuple((one, datetime.fromtimestamp((folder / iteration_name(one)).stat().st_mtime))
                 for one in complete_iterations(folder))
