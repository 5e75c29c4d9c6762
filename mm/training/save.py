"""Saves a training checkpoint in three parts: all ranks begin it, each writes its files, all ranks commit it.

Only the first and last part communicate, so the files may be written while training continues (``background.py``).
``mm.formats.training`` defines the files.
"""

import dataclasses
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from mm.errors import UserError
from mm.formats import training as files
from mm.formats.blocks import Host, Values
from mm.formats.training import CheckpointManifest, CheckpointTensor
from mm.parallel.agreement import gather, on_first, together
from mm.parallel.mesh import Mesh
from mm.training.checkpoint import TrainingProgress
from mm.training.optimizer_state import OwnedState, is_split, owned_states, scaler_state
from mm.training.step import Setup
from mm.weights.memory import MemoryLayout
from mm.weights.trained import saved_weights

ToWrite = Sequence[tuple[CheckpointTensor, Values]]
"""Tensors of this rank and their values, those of one file in a row."""
OptimizerFacts = tuple[int | None, dict[str, float] | None]
"""A rank's number of updates and loss scale; None where it trains nothing, and without loss scaling."""


@dataclass(frozen=True)
class BegunSave:
    """A checkpoint that has a temporary directory, and will appear when it is committed."""

    temporary: Path
    tensors: ToWrite
    """The live tensors; padding is removed while they are written."""
    manifest: CheckpointManifest
    """Without its tensors and the facts of the optimizer, which are gathered by ``commit``."""
    _optimizer_facts: OptimizerFacts | None
    """None if no optimizer state is saved."""

    @classmethod
    def begin(
        cls,
        directory: str | Path,
        progress: TrainingProgress,
        setup: Setup,
        run_facts: Mapping[str, Any],
        *,
        save_optim: bool = True,
        save_rng: bool = True,
        base: Mapping[str, Any] | None = None,
    ) -> Self:
        """Begin the checkpoint of ``progress.iteration``, together with all ranks.

        ``run_facts`` is for people and must be JSON-serializable.  ``base``: see ``CheckpointManifest``.  Raises
        UserError on every rank if the disk has too little room.
        """
        directory, mesh = Path(directory), setup.mesh
        setup.finish_gathering()
        owned = owned_states(setup.optimizer, setup.models) if save_optim else []
        tensors = _planned(setup, owned, save_rng)
        num_bytes = torch.tensor(sum(tensor.stored.num_bytes for tensor, _ in tensors))
        dist.all_reduce(num_bytes, group=mesh.control_group)
        temporary = on_first(mesh, lambda: files.begin(directory, progress.iteration, int(num_bytes)))
        facts = own_optimizer_facts(setup, owned) if save_optim else None
        return cls(temporary, tensors, begun_manifest(progress, setup, run_facts, base), facts)

    def write(self, tensors: ToWrite, host: Host) -> list[CheckpointTensor]:
        """Write this rank's files, in any thread, and return their tensors with checksums.

        ``tensors``: those of this save, or copies of them.  Raises UserError if a file cannot be written.
        """
        return [
            written for file, of_file in groupby(tensors, lambda one: one[0].stored.file)
            for written in files.write_pieces(self.temporary, file, list(of_file), host)
        ]

    def finish(self, setup: Setup, retention: files.Retention = files.ALL_KEPT) -> Path:
        """Write and commit it while training waits, together with all ranks; results and errors as in ``commit``."""
        return self.commit(setup.mesh, lambda: self.write(self.tensors, setup.stage.device), retention)

    def commit(
        self, mesh: Mesh, written: Callable[[], list[CheckpointTensor]], retention: files.Retention = files.ALL_KEPT
    ) -> Path:
        """Make the checkpoint the newest, together with all ranks, and return its directory.

        ``written`` returns what ``write`` did, or raises its error.  The checkpoint appears complete or not at all,
        even if it replaces one of the same iteration; until then the older ones are unchanged.  Then those that
        ``keeps`` does not keep are deleted; a failure to do so is only a warning.  Raises UserError on every rank if
        any rank could not write.
        """
        try:
            gathered = gather(mesh, (together(mesh, written), self._optimizer_facts))
            manifest = dataclasses.replace(
                self.manifest,
                optimizer=shared_optimizer_facts([facts for _, facts in gathered if facts is not None]),
                pieces=tuple(tensor for tensors, _ in gathered for tensor in tensors),
            )
            final = on_first(mesh, lambda: files.commit(self.temporary, manifest))
        except UserError:
            if mesh.rank == 0:
                shutil.rmtree(self.temporary, ignore_errors=True)
            raise
        if mesh.rank == 0:
            for problem in files.purge(final.parent, manifest.iteration, retention, manifest.run_id):
                warnings.warn(problem, stacklevel=2)
        return final


def begun_manifest(
    progress: TrainingProgress, setup: Setup, run_facts: Mapping[str, Any], base: Mapping[str, Any] | None
) -> CheckpointManifest:
    """The manifest of ``progress``, without its tensors and the facts of the optimizer."""
    mesh = setup.mesh
    return CheckpointManifest(
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        world_size=mesh.world_size,
        tp_size=mesh.tp_size,
        pp_size=mesh.pp_size,
        model=setup.stage.model,
        optimizer=None,
        facts=run_facts,
        data=progress.data.to_json() if progress.data is not None else None,
        pieces=(),
        base=base,
        best=dataclasses.asdict(progress.best),
        run_id=progress.run_id,
        schedule=progress.schedule and progress.schedule.to_json(),
        given_start=progress.given_start,
        recent=dataclasses.asdict(progress.recent),
    )


def _planned(setup: Setup, owned: Sequence[OwnedState], save_rng: bool) -> ToWrite:
    """What this rank writes, file by file.

    Everything is written once: by one replica, one copy of a tied embedding, and one TP rank for replicated weights.
    """
    mesh, planned = setup.mesh, list[tuple[CheckpointTensor, Values]]()
    if mesh.copy_rank == 0:
        planned += planned_weights(setup)
    if mesh.copy_rank == 0 or is_split(setup.optimizer):
        planned += planned_states(setup, owned)
    if save_rng:
        file = f"random_{mesh.rank:05d}.safetensors"
        for name, state in setup.stage.device.random_states().items():
            piece = CheckpointTensor.of(state.dtype, state.shape, file, f"{name}.{mesh.rank}", "random")
            planned.append((piece, Values(state)))
    return planned


def planned_weights(setup: Setup) -> ToWrite:
    """The weights that this rank holds, as in the files of ranks that hold the same; those that no other rank of its
    tensor-parallel group writes."""
    file = weights_file(setup)
    planned: list[tuple[CheckpointTensor, Values]] = []
    for name, memory in _stored(setup).items():
        parameter = setup.stage.get_parameter(name)
        piece = CheckpointTensor.of(parameter.dtype, memory.file_shape, file, name, "weight", setup.mesh.tp_rank)
        planned.append((piece, Values(parameter, memory)))
    return planned


def planned_states(setup: Setup, owned: Sequence[OwnedState]) -> ToWrite:
    """The optimizer states ``owned`` by this rank, in a file that ranks with the same states have in common."""
    mesh, stored, file = setup.mesh, _stored(setup), states_file(setup)
    planned: list[tuple[CheckpointTensor, Values]] = []
    for state in (state for state in owned if state.name in stored):
        memory = stored[state.name]
        start, stop = memory.real_range(state.start, state.stop)
        if start == stop:
            continue  # only padding
        for kind, tensor in state.tensors().items():
            piece = CheckpointTensor.of(tensor.dtype, (stop - start,), file, state.name, kind, mesh.tp_rank, start)
            planned.append((piece, Values(tensor, memory, state.start)))
    return planned


def weights_file(setup: Setup) -> str:
    """Where this rank's weights belong; the same for all ranks that hold the same ones."""
    return f"weights_{_position(setup.mesh)}.safetensors"


def states_file(setup: Setup) -> str:
    """Where this rank's optimizer states belong; the same for all ranks that hold the same ones."""
    copy = setup.mesh.copy_rank if is_split(setup.optimizer) else 0
    return f"optimizer_{_position(setup.mesh)}_dp{copy:02d}.safetensors"


def _position(mesh: Mesh) -> str:
    return f"tp{mesh.tp_rank:02d}_pp{mesh.pp_rank:02d}"


def _stored(setup: Setup) -> dict[str, MemoryLayout]:
    """The weights that this rank's position writes, by name.  The frozen base model of adapters is not written."""
    mesh, saved = setup.mesh, {weight.name for weight in saved_weights(setup.stage.model)}
    return {weight.name: MemoryLayout.of(weight, mesh.tp_size) for weight in setup.stage.weights
            if weight.name in saved and (weight.tp_dim is not None or mesh.tp_rank == 0)}


def own_optimizer_facts(setup: Setup, owned: Sequence[OwnedState]) -> OptimizerFacts:
    return owned[0].step if owned else None, scaler_state(setup.optimizer)


def shared_optimizer_facts(of_ranks: Sequence[OptimizerFacts]) -> dict[str, Any] | None:
    """The manifest's optimizer facts, from those of every rank that saves optimizer state; None if none does."""
    if not of_ranks:
        return None
    steps = {step for step, _ in of_ranks if step is not None}
    assert len(steps) <= 1, f"ranks made different numbers of updates: {steps}"
    scalers = [scaler for _, scaler in of_ranks if scaler is not None]
    return {"step": max(steps, default=0), "grad_scaler": scalers[0] if scalers else None}
