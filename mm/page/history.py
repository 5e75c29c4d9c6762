"""What ``metrics.jsonl`` says, folded row by row into a bounded amount of memory."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from pydantic_core import from_json

from mm.errors import UserError
from mm.files import complete
from mm.page.curve import Curve

ALWAYS_FINITE = ("lr", "step_seconds", "tokens_per_second_per_device", "max_memory_bytes")
"""Fields of a step that have a curve."""
MAY_BE_LOST = ("loss", "grad_norm")
"""Fields of a step that have a curve, and are null where they are not finite."""
MAX_LISTED = 50
"""Most rows of a table, the latest ones."""
_NUM_RECENT = 100
"""Steps in the medians of the present speed."""
_MAX_MARKS = 120

MetricsRow = Mapping[str, Any]


class History:
    """The curves of a run, and its latest validations, scores and spikes."""

    def __init__(self) -> None:
        self.curves = {name: Curve() for name in (*MAY_BE_LOST, *ALWAYS_FINITE)}
        self.validation_losses, self.scores, self.spike_steps = Curve(_MAX_MARKS), Curve(_MAX_MARKS), Curve(_MAX_MARKS)
        self.num_validations = self.num_scores = self.num_spikes = self.num_unchanged = self.num_steps = 0
        self.validations: deque[MetricsRow] = deque(maxlen=MAX_LISTED)
        self.score_rows: deque[MetricsRow] = deque(maxlen=MAX_LISTED)
        self.spikes: deque[MetricsRow] = deque(maxlen=MAX_LISTED)
        self.recent: deque[MetricsRow] = deque(maxlen=_NUM_RECENT)
        """The latest steps."""
        self.compared: MetricsRow | None = None
        """The latest step whose ranks were compared."""
        self.stage_memory_bytes: list[int] = []
        """Highest peak memory of the ranks of each stage, since the number of stages last changed; empty if it was not
        recorded."""
        self.seconds = 0.0
        """Total time of the steps."""
        self.num_tokens = 0

    @classmethod
    def read(cls, path: Path) -> "History":
        """Read ``metrics.jsonl``; an incomplete last line is ignored.  Raises UserError naming a damaged line."""
        found = cls()
        with path.open("rb") as stream:
            found.fold_lines(stream, str(path))
        return found

    def fold_lines(self, lines: Iterable[bytes], name: str) -> None:
        """Fold the complete ones of ``lines``, which are those of the file ``name``."""
        for number, line in enumerate(complete(lines), start=1):
            try:
                row = from_json(line)
                self.fold(row)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise UserError(f"{name}:{number}: is not a row of a run's metrics ({type(error).__name__}: {error}); "
                                f"if the file is damaged, remove that line, and make the page again") from error

    def fold(self, row: MetricsRow) -> None:
        """Fold one row; a row of an unknown kind is ignored."""
        match row["kind"]:
            case "step":
                self._fold_step(row)
            case "validation":
                self.num_validations += 1
                self.validation_losses.add(_step(row), _number(row["validation_loss"]))
                self.validations.append(row)
            case "score":
                self.num_scores += 1
                self.scores.add(_step(row), _number(row["validation_score_percent"]))
                self.score_rows.append(row)
            case "spike":
                self.num_spikes += 1
                self.spike_steps.add(_step(row), 1.0)
                self.spikes.append({**row, "samples": row["samples"][:MAX_LISTED], "num_samples": len(row["samples"])})
            case _:
                pass

    def _fold_step(self, row: MetricsRow) -> None:
        step = _step(row)
        for name in MAY_BE_LOST:
            self.curves[name].add(step, _number(row[name]))
        for name in ALWAYS_FINITE:
            self.curves[name].add(step, float(row[name]))
        self.num_steps += 1
        self.num_unchanged += not row["updated"]
        self.seconds += float(row["step_seconds"])
        self.num_tokens += int(row["num_tokens"])
        self.recent.append(row)
        if found := row.get("stage_memory_bytes"):
            known = self.stage_memory_bytes  # a run that was resumed may have another number of stages
            known = known if len(known) == len(found) else [0] * len(found)
            self.stage_memory_bytes = [max(pair) for pair in zip(known, found, strict=True)]
        if row.get("slowest_ranks"):
            self.compared = row

    @property
    def last(self) -> MetricsRow | None:
        """The last step."""
        return self.recent[-1] if self.recent else None

    def recent_median(self, name: str) -> float | None:
        """Median of a field over the latest steps that have it."""
        found = [row[name] for row in self.recent if row.get(name) is not None]
        return median(found) if found else None

    @property
    def peak_memory_bytes(self) -> float | None:
        """Highest peak memory of the rank that writes."""
        bins = self.curves["max_memory_bytes"].finite()
        return max(one.most for one in bins) if bins else None


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _step(row: MetricsRow) -> int:
    step = row["iteration"]
    if not isinstance(step, int):
        raise TypeError(f"iteration is {step!r}")
    return step
