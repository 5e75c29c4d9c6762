"""A dying checkpoint: what the surviving ranks of a run save together before all ranks end.

The hub asks which ranks still hold the state after the latest update, decides who writes which file, and commits what
they have written.  Knows neither weights nor files: ``mm.training.dying`` does that for its rank, as a ``Survivor``.
"""

import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mm.errors import UserError
from mm.parallel.lines import Lines
from mm.parallel.ranks import ranks_text


@dataclass(frozen=True)
class Holdings:
    """The files of a checkpoint that one rank can write.  Ranks that hold the same state name its files alike."""

    weights: tuple[str, ...]
    states: tuple[str, ...]
    """Files of optimizer state."""


class Survivor(Protocol):
    """One rank's part of a dying checkpoint.  The last three are called on rank 0 only."""

    @property
    def holdings(self) -> Holdings:
        """What this rank can write; the same during the whole run."""
        ...

    def hold(self) -> int | None:
        """The iteration whose state this rank holds; from now on the state does not change.

        None if an update is under way, there was none yet, or a regular checkpoint of it exists.
        """
        ...

    def write(self, folder: str, files: Sequence[str]) -> list[Any]:
        """Write these files and return what ``commit`` must know about them, as JSON values.

        Raises UserError if a file cannot be written, or the state has changed meanwhile.
        """
        ...

    def create(self) -> str:
        """Create the directory that all survivors write to, and return it."""
        ...

    def commit(self, folder: str, written: Sequence[Any], has_states: bool) -> str:
        """Complete the checkpoint and return its directory.  ``written``: what the writers returned."""
        ...

    def abandon(self, folder: str) -> None:
        """Delete an incomplete checkpoint."""
        ...


@dataclass(frozen=True)
class RescuePlan:
    """Who writes what."""

    iteration: int
    files: Mapping[int, tuple[str, ...]]
    """The files of each rank that writes."""
    lost_states: tuple[int, ...]
    """Ranks whose optimizer state no survivor holds.  If there are any, no optimizer state is written."""


def plan_rescue(holdings: Mapping[int, Holdings], held: Mapping[int, int]) -> RescuePlan | tuple[int, ...]:
    """Choose the writer of each file.

    ``holdings``: what each rank can write.  ``held``: the iteration that each survivor holds.  The checkpoint is that
    of rank 0's iteration, because rank 0 completes it.  If the survivors do not hold the whole model at that iteration,
    returns the ranks whose weights are missing.
    """
    iteration = held.get(0)
    ranks = [rank for rank in sorted(held) if held[rank] == iteration]
    weights = _writers((rank, holdings[rank].weights) for rank in ranks)
    states = _writers((rank, holdings[rank].states) for rank in ranks)
    lost = tuple(rank for rank in sorted(holdings) if not weights.keys() >= set(holdings[rank].weights))
    if iteration is None or lost:
        return lost
    lost_states = tuple(rank for rank in sorted(holdings) if not states.keys() >= set(holdings[rank].states))
    writers = weights if lost_states else weights | states
    files = {rank: tuple(file for file, writer in writers.items() if writer == rank)
             for rank in sorted(set(writers.values()))}
    return RescuePlan(iteration, files, lost_states)


def _writers(files_of: Iterable[tuple[int, Sequence[str]]]) -> dict[str, int]:
    """For each file the first rank that holds it."""
    found: dict[str, int] = {}
    for rank, files in files_of:
        for file in files:
            found.setdefault(file, rank)
    return found


def rescue(plan: RescuePlan, survivor: Survivor, lines: Lines, ranks: Sequence[int], seconds: float) -> str:
    """Carry out ``plan`` from rank 0, whose part is ``survivor``; return what to report.

    ``ranks``: all survivors, which stay until they are ordered to end.  ``seconds``: time limit for writing.  Raises
    nothing, because the ranks must end whatever happens here.
    """
    folder = None
    try:
        folder = survivor.create()
        for rank in ranks:
            lines.send(rank, "saves", folder, plan.files.get(rank, ()), seconds)
        written = _collect(lines, set(plan.files), time.monotonic() + seconds)
        found = survivor.commit(folder, written, not plan.lost_states)
        lost = plan.lost_states and (f", without optimizer state, because nobody else holds that of "
                                     f"{ranks_text(plan.lost_states)}")
        return f"note: the surviving ranks saved iteration {plan.iteration}: {found}{lost or ''}"
    except (UserError, OSError) as error:
        reason = str(error)
    except Exception:
        reason = traceback.format_exc()
    if folder is not None:
        try:
            survivor.abandon(folder)
        except OSError as error:
            reason += f"\n{folder} is left over, because it cannot be deleted: {error}"
    return f"note: the surviving ranks could not save iteration {plan.iteration}: {reason}"


def _collect(lines: Lines, waiting: set[int], until: float) -> list[Any]:
    """Everything that the writers returned.  Raises UserError if one cannot write, dies, or is late."""
    found: list[Any] = []
    while waiting:
        if (left := until - time.monotonic()) <= 0:
            raise UserError(f"{ranks_text(sorted(waiting))} did not write in time; --phase-timeouts dying=SECONDS sets "
                            f"this limit")
        for rank, words in lines.receive(left):
            match words:
                case ["saved", None, list(written)] if rank in waiting:
                    found += written
                    waiting.discard(rank)
                case ["saved", str(problem), _] if rank in waiting:
                    raise UserError(problem)
                case None if rank in waiting:
                    raise UserError(f"rank {rank} died while it wrote its files")
    return found
