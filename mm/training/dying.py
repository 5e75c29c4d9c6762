"""Saves what this rank holds when the run dies: its part of a dying checkpoint (``mm.parallel.rescue``).

The state that counts is the one after the latest update.  The main thread may be stuck in a collective, or far ahead of
a device that is stuck, so another thread writes, and three things keep the state whole:

1. The main thread says when it begins to change the state (``changing``) and when it has changed it (``holds``).  Once
   the run is dying, it can no longer begin.
2. On an accelerator, work is queued ahead.  A mark in the device's stream shows whether the device itself has begun the
   change.  It is read before and after the copies.
3. The copies are made on a side stream, behind a mark set after the latest update: they do not wait for stuck work.
"""

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from threading import Condition, Event
from typing import Any

from mm.errors import UserError
from mm.formats import checkpoints
from mm.formats import training_writer as writer
from mm.formats.training import CheckpointTensor
from mm.lock import Claim
from mm.parallel.activity import Activity, Work
from mm.parallel.rescue import Holdings
from mm.training.checkpoint import TrainingProgress
from mm.training.optimizer_state import arrival_of_states, owned_states
from mm.training.save import (
    ToWrite,
    begun_manifest,
    own_optimizer_facts,
    planned_states,
    planned_weights,
    shared_optimizer_facts,
    states_file,
    weights_file,
)
from mm.training.step import Setup

_UPDATE_SECONDS = 2.0
"""How long a dying rank waits for the end of its running update, which waits for no other rank."""


class DyingSave:
    """A ``Survivor``, and a listener: it learns from the journal when overlapped gathers of weights are complete."""

    def __init__(
        self, directory: str, setup: Setup, claim: Claim, run_facts: Mapping[str, Any],
        base: Mapping[str, Any] | None, *, saves_states: bool,
    ) -> None:  # fmt: skip
        """Arguments:

        - ``directory``: ``--save``
        - ``claim``: this rank's lock on it
        - ``run_facts``, ``base``: as in ``CheckpointManifest``
        - ``saves_states``: whether the run's checkpoints hold optimizer state
        """
        self._directory, self._setup, self._claim = Path(directory), setup, claim
        self._run_facts, self._base, self._saves_states = run_facts, base, saves_states
        self._side = setup.stage.device.side_queue()
        self._changed = Condition()
        self._wait_for_states: Callable[[], None] = lambda: None
        """Waits until the states of the latest update have arrived in host memory, if they are kept there."""
        self._progress: TrainingProgress | None = None
        """After the latest update; None before the first of this process."""
        self._has_begun: Callable[[], bool] | None = None
        """Whether the device has begun the update that the main thread has queued; None if none is queued."""
        self._is_gathered, self._is_dying = True, False
        if _gathers_late(setup):
            setup.stage.journal.listeners.append(self)

    # In the main thread

    def changing(self) -> None:
        """Call right before an update is queued, or a part of it.  Blocks for ever once the run is dying."""
        with self._changed:
            if not self._is_dying:
                self._has_begun = self._has_begun or self._setup.stage.device.passing()
                return
        Event().wait()

    def holds(self, progress: TrainingProgress) -> None:
        """Call after each update, and when ``progress`` has changed without one."""
        with self._changed:
            if self._has_begun is not None:
                self._is_gathered = not _gathers_late(self._setup)
                self._side.mark()
                self._wait_for_states = arrival_of_states(self._setup.optimizer)
            self._progress, self._has_begun = progress, None
            self._changed.notify_all()

    def begin(self, activity: Activity) -> None:
        if activity.work is Work.BACKWARD and not self._is_gathered and _has_gathered(self._setup):
            self._side.mark()
            self._is_gathered = True

    def end(self, activity: Activity) -> None: ...

    # In the thread of the watchdog

    @property
    def holdings(self) -> Holdings:
        owned = owned_states(self._setup.optimizer, self._setup.models) if self._saves_states else ()
        weights = (weights_file(self._setup),) if planned_weights(self._setup) else ()
        return Holdings(weights, (states_file(self._setup),) if owned else ())

    def hold(self) -> int | None:
        with self._changed:
            self._is_dying = True
            if self._progress is None or not self._changed.wait_for(self._is_steady, _UPDATE_SECONDS):
                return None
            iteration = self._progress.iteration
        return None if checkpoints.is_complete(self._directory, iteration) else iteration

    def write(self, folder: str, files: Sequence[str]) -> list[Any]:
        device = self._setup.stage.device
        self._wait_for_states()
        with self._side.behind_mark():
            planned = [one for one in (*planned_weights(self._setup), *self._states()) if one[0].stored.file in files]
            written = [piece for file, pieces in groupby(planned, lambda one: one[0].stored.file)
                       for piece in writer.write_pieces(Path(folder), file, list(pieces), device)]
            facts = own_optimizer_facts(self._setup, owned_states(self._setup.optimizer, self._setup.models))
        if not self._is_steady():
            raise UserError(f"the weights of rank {self._setup.mesh.rank} changed while they were written")
        return [{"tensors": [piece.to_json() for piece in written], "optimizer": facts}]

    # In the thread of the hub, on rank 0

    def create(self) -> str:
        assert self._progress is not None, "rank 0 holds an iteration"
        self._claim.check()
        return str(writer.begin(self._directory, self._progress.iteration, num_bytes=0))

    def commit(self, folder: str, written: Sequence[Any], has_states: bool) -> str:
        assert self._progress is not None, "as above"
        facts = [tuple(one["optimizer"]) for one in written]
        manifest = dataclasses.replace(
            begun_manifest(self._progress, self._setup, self._run_facts, self._base),
            optimizer=shared_optimizer_facts(facts) if has_states and self._saves_states else None,
            pieces=tuple(CheckpointTensor.from_json(piece, Path(folder)) for one in written
                         for piece in one["tensors"]),
        )
        return str(writer.commit_dying(Path(folder), manifest))

    def abandon(self, folder: str) -> None:
        shutil.rmtree(folder)

    def _is_steady(self) -> bool:
        return self._is_gathered and (self._has_begun is None or not self._has_begun())

    def _states(self) -> ToWrite:
        if not self._saves_states:
            return ()
        return planned_states(self._setup, owned_states(self._setup.optimizer, self._setup.models))


def _gathers_late(setup: Setup) -> bool:
    """Whether weights that other ranks have updated arrive during the next forward pass."""
    return any(model.ddp_config.overlap_param_gather for model in setup.models)


def _has_gathered(setup: Setup) -> bool:
    """Whether all of them have arrived, or will have when the device has done what is queued."""
    return all(group.param_gather_dispatched and group.param_gather_handle is None
               for model in setup.models for group in model.bucket_groups)
