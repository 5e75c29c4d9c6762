"""Saves a training checkpoint in three parts: all ranks begin it, each writes its files, all ranks commit it.

Only the first and last part communicate, so the files may be written while training continues (``background.py``).
``mm.formats.training`` defines the files.
"""

import dataclasses
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from mm.errors import UserError
from mm.formats import training_writer as files
from mm.formats.pipelined_write import Host, Values
from mm.formats.training import CheckpointManifest, CheckpointTensor
from mm.parallel.agreement import by_rank, gather, on_first, together
from mm.parallel.mesh import Mesh
from mm.training.checkpoint import TrainingProgress
from mm.training.disks import Disks
from mm.training.optimizer_state import OwnedState, is_split, owned_states, scaler_state, wait_for_states
from mm.training.step import Setup
from mm.weights.memory import MemoryLayout
from mm.weights.table import Weight, stored_name
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
    _disks: Disks

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
        disks: Disks | None = None,
    ) -> Self:
        """Begin the checkpoint of ``progress.iteration``, together with all ranks.

        ``run_facts`` is for people and must be JSON-serializable.  ``base``: see ``CheckpointManifest``.  ``disks``:
        those of ``directory``; by default all ranks see the same.  Raises UserError on every rank if a disk has too
        little room.
        """
        directory, mesh = Path(directory), setup.mesh
        setup.finish_gathering()
        wait_for_states(setup.optimizer)
        owned = owned_states(setup.optimizer, setup.models) if save_optim else []
        disks = disks or Disks.one(mesh)
        tensors = _planned(setup, owned, _values(setup, disks), save_rng, disks)
        of_disks = torch.zeros(mesh.world_size, dtype=torch.int64)  # bytes
        of_disks[disks.own] = sum(tensor.stored.num_bytes for tensor, _ in tensors)
        dist.all_reduce(of_disks, group=mesh.control_group)
        token = on_first(mesh, lambda: secrets.token_hex(4))  # if two disks are one after all, the second begin fails
        begun = together(mesh, lambda: files.begin(
            directory, progress.iteration, int(of_disks[disks.own]), token) if disks.is_first else Path())
        temporary = by_rank(mesh, begun)[disks.own]
        facts = _own_optimizer_facts(setup, owned) if save_optim else None
        return cls(temporary, tensors, _begun_manifest(progress, setup, run_facts, base), facts, disks)

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
        return self.commit(setup.mesh, lambda: self.write(self.tensors, setup.stage.device.runtime), retention)

    def commit(
        self, mesh: Mesh, written: Callable[[], list[CheckpointTensor]], retention: files.Retention = files.ALL_KEPT
    ) -> Path:
        """Make the checkpoint the newest, together with all ranks, and return its directory.

        ``written`` returns what ``write`` did, or raises its error.  The checkpoint appears complete or not at all,
        even if it replaces one of the same iteration; until then the older ones are unchanged.  Then those that
        ``retention`` does not keep are deleted; a failure to do so is only a warning.  Raises UserError on every rank
        if any rank could not write.
        """
        disks = self._disks
        try:
            gathered = gather(mesh, (together(mesh, written), self._optimizer_facts))
            sent = on_first(mesh, lambda: self._completed(gathered) if disks.are_several else None)
            is_other = disks.is_first and mesh.rank != 0
            together(mesh, lambda: files.commit(self.temporary, sent) if sent and is_other else None)
            # last, because rank 0's disk says what the next run continues from
            final = on_first(mesh, lambda: files.commit(self.temporary, sent or self._completed(gathered)))
        except UserError:
            if disks.is_first:
                shutil.rmtree(self.temporary, ignore_errors=True)
            raise
        if disks.is_first:
            for problem in files.purge(final.parent, self.manifest.iteration, retention, self.manifest.run_id):
                warnings.warn(problem, stacklevel=2)
        return final

    def _completed(
        self, gathered: Sequence[tuple[list[CheckpointTensor], OptimizerFacts | None]]
    ) -> CheckpointManifest:
        """The manifest with what all ranks have written; raises UserError if two disks hold different replicas."""
        found: dict[tuple[str, str], CheckpointTensor] = {}
        for piece in (piece for pieces, _ in gathered for piece in pieces):
            if found.setdefault((piece.stored.file, piece.stored.name), piece) != piece:
                raise UserError(
                    f"replicas hold different values of {piece.name} ({piece.kind}), so the disks would hold different "
                    f"{piece.stored.file}; nothing is saved. Resume from the last checkpoint, with "
                    f"--check-weights-interval 1 to find the rank and the step")
        disks = self._disks
        return dataclasses.replace(
            self.manifest,
            optimizer=_shared_optimizer_facts([facts for _, facts in gathered if facts is not None]),
            pieces=tuple(found.values()),
            disks=None if not disks.are_several else [
                {"host": disks.hosts[disk], "ranks": disks.ranks_on(disk), "files": sorted(
                    {piece.stored.file for rank in disks.ranks_on(disk) for piece in gathered[rank][0]})}
                for disk in sorted(set(disks.of_ranks))],
        )


def _begun_manifest(
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


def _values(setup: Setup, disks: Disks) -> Mapping[str, Values]:
    """The values of the weights that a rank at this position writes, by name.

    If ranks keep shards of weights, they gather them unit by unit, all together, and those that write keep copies in
    host memory.
    """
    mesh, stage = setup.mesh, setup.stage
    if not stage.shards_weights:
        return {name: Values(parameter) for name, parameter in stage.named_parameters()}
    some = list(_stored(setup, disks.are_several).values())
    parameters = {weight.name: stage.get_parameter(weight.name) for weight in some}
    copies = together(mesh, lambda: _host_memory(parameters) if disks.is_writer(mesh) else {})
    for weight, values in stage.whole_weights(some):
        if weight.name in copies:
            copies[weight.name].copy_(values)
    return {name: Values(copy, is_copy=True) for name, copy in copies.items()}


def _host_memory(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    try:
        return {name: torch.empty(one.shape, dtype=one.dtype) for name, one in parameters.items()}
    except RuntimeError as error:
        num_bytes = sum(one.numel() * one.element_size() for one in parameters.values())
        raise UserError(f"a save of weights in shards needs host memory for all weights that this rank writes, and "
                        f"{num_bytes:,} bytes of it cannot be allocated ({error}); give the ranks of this node more "
                        f"memory, or use --data-parallel-sharding-strategy optim_grads") from error


def _planned(
    setup: Setup, owned: Sequence[OwnedState], values: Mapping[str, Values], save_rng: bool, disks: Disks
) -> ToWrite:
    """What this rank writes, file by file.

    Everything is written once: by one replica, one copy of a tied embedding, and one TP rank for replicated weights.
    With several disks, each holds all that its ranks hold; a file of a certain name has the same content on all.
    """
    mesh, planned = setup.mesh, list[tuple[CheckpointTensor, Values]]()
    if disks.is_writer(mesh):
        planned += planned_weights(setup, values, disks.are_several)
    if disks.is_writer(mesh) or is_split(setup.optimizer):
        planned += planned_states(setup, owned, disks.are_several)
    if save_rng:
        file = f"random_{mesh.rank:05d}.safetensors"
        for name, state in setup.stage.device.random_states().items():
            piece = CheckpointTensor.of(state.dtype, state.shape, file, f"{name}.{mesh.rank}", "random")
            planned.append((piece, Values(state)))
    return planned


def planned_weights(setup: Setup, values: Mapping[str, Values], with_copies: bool = False) -> ToWrite:
    """The weights that this rank's position on the axes writes, ``with_copies`` of those that another position writes;
    ``values`` by name."""
    file = weights_file(setup)
    planned: list[tuple[CheckpointTensor, Values]] = []
    for name, weight in _stored(setup, with_copies).items():
        parameter, memory = setup.stage.get_parameter(name), MemoryLayout.of(weight, setup.mesh.tp_size)
        piece = CheckpointTensor.of(parameter.dtype, memory.file_shape, file, stored_name(weight), "weight",
                                    _tp_rank(weight, setup.mesh))
        planned.append((piece, replace(values[name], memory=memory)))
    return planned


def planned_states(setup: Setup, owned: Sequence[OwnedState], with_copies: bool = False) -> ToWrite:
    """The same for the optimizer states ``owned`` by this rank."""
    mesh, weights, file = setup.mesh, _stored(setup, with_copies), states_file(setup)
    planned: list[tuple[CheckpointTensor, Values]] = []
    for state in (state for state in owned if state.name in weights):
        weight = weights[state.name]
        memory = MemoryLayout.of(weight, mesh.tp_size)
        start, stop = memory.real_range(state.start, state.stop)
        if start == stop:
            continue  # only padding
        for kind, tensor in state.tensors().items():
            piece = CheckpointTensor.of(
                tensor.dtype, (stop - start,), file, stored_name(weight), kind, _tp_rank(weight, mesh), start)
            planned.append((piece, Values(tensor, memory, state.start)))
    return planned


def weights_file(setup: Setup) -> str:
    """Where this rank's weights belong; the same for all ranks that hold the same ones."""
    return f"weights_{_position(setup.mesh)}.safetensors"


def states_file(setup: Setup) -> str:
    """Where this rank's optimizer states belong; the same for all ranks that hold the same ones."""
    number = setup.mesh.copy_rank if is_split(setup.optimizer) else 0
    return f"optimizer_{_position(setup.mesh)}_dp{number:02d}.safetensors"


def _position(mesh: Mesh) -> str:
    return f"tp{mesh.tp_rank:02d}_pp{mesh.pp_rank:02d}"


def _stored(setup: Setup, with_copies: bool) -> dict[str, Weight]:
    """By name, the weights that this rank's position writes, ``with_copies`` of those that another position writes.

    The frozen base model of adapters is not written.
    """
    mesh, saved = setup.mesh, {weight.name for weight in saved_weights(setup.stage.model)}
    return {weight.name: weight for weight in setup.stage.weights
            if (stored_name(weight) in saved if with_copies else
                weight.name in saved and (weight.is_cut or mesh.tp_rank == 0))}


def _tp_rank(weight: Weight, mesh: Mesh) -> int:
    return weight.shards(mesh.tp_size, mesh.tp_rank)[1]


def _own_optimizer_facts(setup: Setup, owned: Sequence[OwnedState]) -> OptimizerFacts:
    """This rank's optimizer facts for the manifest."""
    return owned[0].step if owned else None, scaler_state(setup.optimizer)


def _shared_optimizer_facts(of_ranks: Sequence[OptimizerFacts]) -> dict[str, Any] | None:
    """The manifest's optimizer facts, from those of every rank that saves optimizer state; None if none does."""
    if not of_ranks:
        return None
    steps = {step for step, _ in of_ranks if step is not None}
    assert len(steps) <= 1, f"ranks made different numbers of updates: {steps}"
    scalers = [scaler for _, scaler in of_ranks if scaler is not None]
    return {"step": max(steps, default=0), "grad_scaler": scalers[0] if scalers else None}
