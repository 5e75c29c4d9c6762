"""A run as its ``--log-dir`` describes it: settings, metrics, bad samples, answers, timelines and checkpoints."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
from pydantic_core import from_json

from mm.checkpoint.directories import ITERATION_NAME
from mm.data.loader.quarantine import LEDGER
from mm.data.sample import BadSample
from mm.errors import UserError
from mm.files import (
    ANSWERS_FOLDER,
    FACTS_FILE,
    MAX_THUMBNAILS,
    METRICS_FILE,
    PREDICTIONS_FILE,
    THUMBNAILS_FOLDER,
    complete,
    json_object,
)

CURVES = ("loss", "lr", "grad_norm", "step_seconds", "tokens_per_second_per_device", "max_memory_bytes")
"""Fields of a step that have a curve."""
_NUM_RECENT = 100
"""Steps in the medians of the present speed."""
_MAX_ANSWERS = 24

Row = Mapping[str, Any]


class Metrics:
    """The rows of ``metrics.jsonl``, of which only the numbers of ``CURVES`` are kept for all steps."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Row]] = {"validation": [], "score": [], "spike": []}
        self._steps: list[tuple[float, ...]] = []
        self.recent: deque[Row] = deque(maxlen=_NUM_RECENT)
        """The latest steps."""
        self.compared: Row | None = None
        """The latest step whose ranks were compared."""
        self.stage_memory_bytes: list[int] = []
        """Peak memory of each stage so far."""
        self.num_tokens = self.num_unchanged = 0

    @classmethod
    def read(cls, path: Path) -> "Metrics":
        """Read a file; an incomplete last line is ignored.  Raises UserError naming a damaged line."""
        found = cls()
        with path.open("rb") as stream:
            for number, line in enumerate(complete(stream), start=1):
                try:
                    found._add(from_json(line))
                except (ValueError, TypeError, KeyError) as error:
                    raise UserError(f"{path}:{number}: is not a row of a run's metrics ({type(error).__name__}: "
                                    f"{error}); remove that line, and make the page again") from error
        return found

    def _add(self, row: Row) -> None:
        if row["kind"] == "step":
            self._steps.append(tuple(
                float(np.nan if row[name] is None else row[name]) for name in ("iteration", *CURVES)))
            self.recent.append(row)
            self.num_tokens += row["num_tokens"]
            self.num_unchanged += not row["updated"]
            self.stage_memory_bytes = row.get("stage_memory_bytes") or self.stage_memory_bytes
            self.compared = row if row.get("slowest_ranks") else self.compared
        elif row["kind"] in self._rows:
            self._rows[row["kind"]].append(row)

    def rows(self, kind: Literal["validation", "score", "spike"]) -> list[Row]:
        """All rows of a kind."""
        return self._rows[kind]

    def column(self, name: str) -> np.ndarray:
        """``iteration`` or one of ``CURVES`` for all steps, float64; NaN where it is not finite."""
        place = ("iteration", *CURVES).index(name)
        return np.array([one[place] for one in self._steps], dtype=np.float64)

    @property
    def last(self) -> Row | None:
        """The last step."""
        return self.recent[-1] if self.recent else None

    def recent_median(self, name: str) -> float | None:
        """Median of a field over the latest steps that have it."""
        found = [row[name] for row in self.recent if row.get(name) is not None]
        return median(found) if found else None


@dataclass(frozen=True)
class RunRecord:
    """Everything that a page shows."""

    facts: Row
    """``run.json``."""
    metrics: Metrics
    bad_samples: tuple[BadSample, ...]
    answered_at: int
    """The iteration of the answers."""
    answers: tuple[tuple[list[bytes], Row], ...]
    """The latest ones, the worst first: small images of the question as JPEG, and the line of ``predictions.jsonl``."""
    timeline: Path | None
    """The picture of the latest measured step."""
    last_written: datetime
    """When the newest row was written."""


def read_run(folder: Path) -> RunRecord:
    """Read the ``--log-dir`` of a run.  Raises UserError if there are no metrics, or a file is damaged."""
    metrics, facts_file = folder / METRICS_FILE, folder / FACTS_FILE
    if not metrics.is_file() or not facts_file.is_file():
        raise UserError(f"{folder}: has no {METRICS_FILE} and {FACTS_FILE}; give the --log-dir of a run that has begun "
                        f"(the default is logs, where mm-train was started)")
    (facts,) = _objects(facts_file, [facts_file.read_bytes()])
    ledger = folder / LEDGER
    bad = [BadSample(**row) for row in _lines(ledger)] if ledger.is_file() else []
    sets = {int(match[1]): one for one in (folder / ANSWERS_FOLDER).glob(f"iter_*/{PREDICTIONS_FILE}")
            if (match := ITERATION_NAME.fullmatch(one.parent.name))}
    answered_at = max(sets, default=0)
    timelines = sorted(folder.glob("pipeline_step_*.svg"), key=lambda one: (len(one.name), one.name))
    return RunRecord(
        facts, Metrics.read(metrics), tuple(bad), answered_at,
        tuple(_answers(sets[answered_at], folder / ANSWERS_FOLDER)) if sets else (),
        timelines[-1] if timelines else None, datetime.fromtimestamp(metrics.stat().st_mtime))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as stream:
        yield from _objects(path, complete(stream))


def _objects(path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        try:
            yield json_object(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: is damaged ({error}); remove the file, and make the page again"
                            ) from error


def _answers(path: Path, folder: Path) -> Iterator[tuple[list[bytes], Row]]:
    for number, row in sorted(enumerate(_lines(path)), key=lambda one: one[1]["score"])[:_MAX_ANSWERS]:
        images = (thumbnail_path(folder, number, image) for image in range(MAX_THUMBNAILS))
        yield [one.read_bytes() for one in images if one.is_file()], row


def thumbnail_path(folder: Path, number: int, image: int) -> Path:
    """The small copy of an image of question ``number``, in the ``ANSWERS_FOLDER`` of a run."""
    return folder / THUMBNAILS_FOLDER / f"{number}_{image}.jpg"
