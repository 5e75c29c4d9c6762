"""Saves and restores training: weights, optimizer, random states, and how far it has come.

Every rank calls these functions together; a mistake or failed write on one is the same UserError on all.  The
files are those of ``checkpoint.formats``, the optimizer's insides those of ``optimizer_state.py``.
"""

import dataclasses
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from checkpoint.formats import training as files
from checkpoint.formats.source import Source, open_training
from checkpoint.formats.training import Manifest, Piece
from checkpoint.formats.training_reader import TrainingDirectory
from mm.config.model import ModelConfig
from mm.device.device import random_states, set_random_states
from mm.errors import UserError
from mm.model.load import fill, set_weight
from mm.model.stage import Stage
from mm.parallel.agreement import gather, on_first, together
from mm.parallel.mesh import Mesh
from mm.training.optimizer_state import MOMENTS, OwnedState, is_split, owned_states, restore_scaler, scaler_state
from mm.weights.table import Weight, stored_name


@dataclass(frozen=True)
class Progress:
    """How far training has come.  The learning rate and the order of the data are functions of it."""

    iteration: int
    consumed_samples: int
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """What ``load`` reports to the user."""


# Saving


def save(
    directory: str | Path,
    progress: Progress,
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    weights: Sequence[Weight],
    mesh: Mesh,
    run_facts: Mapping[str, Any],
    *,
    save_optim: bool = True,
    save_rng: bool = True,
    keep_last: int | None = None,
) -> Path:
    """Write the checkpoint of ``progress.iteration`` and make it the newest; returns its directory.

    It appears complete or not at all, also when it replaces one of the same iteration; until then the older ones
    stay as they are.  ``run_facts`` is kept for people and must be JSON-ready.  With ``keep_last``, older
    checkpoints beyond that many are deleted; failing to is only a warning.

    Raises:
        UserError: on every rank when any rank cannot write.
    """
    directory = Path(directory)
    if model.ddp_config.overlap_param_gather:
        model.start_param_sync(force_sync=True)  # other ranks' last updates may not have arrived yet
    owned = owned_states(optimizer, model) if save_optim else []
    planned = _weight_files(model.module, weights, mesh)
    if mesh.dp_rank == 0 or is_split(optimizer):
        planned |= _optimizer_files(owned, weights, mesh)
    if save_rng:
        planned |= _random_files(mesh)
    counters = (owned[0].step if owned else None, scaler_state(optimizer)) if save_optim else None
    num_bytes = torch.tensor(sum(piece.stored.num_bytes for pieces in planned.values() for piece, _ in pieces))
    dist.all_reduce(num_bytes, group=mesh.control_group)
    temporary = on_first(mesh, lambda: files.begin(directory, progress.iteration, int(num_bytes)))
    try:
        written = together(mesh, lambda: [
            piece for file, pieces in planned.items() for piece in files.write_pieces(temporary, file, pieces)
        ])
        final = _commit(mesh, temporary, progress, _model(model), written, counters, run_facts)
    except UserError:
        if mesh.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if keep_last is not None and mesh.rank == 0:
        try:
            files.purge(directory, progress.iteration, keep_last)
        except OSError as error:
            warnings.warn(f"an old checkpoint in {directory} could not be deleted: {error}", stacklevel=2)
    return final


Planned = dict[str, list[tuple[Piece, Tensor]]]
"""What one rank writes, by file name; the tensors are the live ones."""


def _weight_files(stage: nn.Module, weights: Sequence[Weight], mesh: Mesh) -> Planned:
    """Every weight once: no second replica, and no second copy of a tied embedding or of what all TP ranks hold."""
    file = f"weights_tp{mesh.tp_rank:02d}_pp{mesh.pp_rank:02d}.safetensors"
    pieces: list[tuple[Piece, Tensor]] = [
        (Piece.of(parameter, file, weight.name, "weight", mesh.tp_rank), parameter)
        for weight in weights
        if _stores(weight, mesh)
        for parameter in [stage.get_parameter(weight.name)]
    ]
    return {file: pieces} if pieces and mesh.dp_rank == 0 else {}


def _optimizer_files(owned: Sequence[OwnedState], weights: Sequence[Weight], mesh: Mesh) -> Planned:
    file = f"optimizer_tp{mesh.tp_rank:02d}_pp{mesh.pp_rank:02d}_dp{mesh.dp_rank:02d}.safetensors"
    stored = {weight.name for weight in weights if _stores(weight, mesh)}
    pieces = [
        (Piece.of(tensor, file, state.name, part, mesh.tp_rank, state.start), tensor)
        for state in owned
        if state.name in stored
        for part, tensor in state.tensors().items()
    ]
    return {file: pieces} if pieces else {}


def _stores(weight: Weight, mesh: Mesh) -> bool:
    return stored_name(weight) == weight.name and (weight.tp_dim is not None or mesh.tp_rank == 0)


def _random_files(mesh: Mesh) -> Planned:
    file = f"random_{mesh.rank:05d}.safetensors"
    states = random_states()
    return {file: [(Piece.of(state, file, f"{name}.{mesh.rank}", "random"), state) for name, state in states.items()]}


def _commit(
    mesh: Mesh,
    temporary: Path,
    progress: Progress,
    model: ModelConfig,
    written: list[Piece],
    counters: tuple[int | None, dict[str, float] | None] | None,
    run_facts: Mapping[str, Any],
) -> Path:
    """Bring together what all ranks wrote; rank 0 makes it the newest checkpoint.

    ``counters`` are this rank's number of updates (None where it trains nothing) and loss scale; None without
    optimizer state.
    """
    gathered = gather(mesh, (written, counters))

    def commit() -> Path:
        return files.commit(temporary, Manifest(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            world_size=mesh.world_size,
            tp_size=mesh.tp_size,
            pp_size=mesh.pp_size,
            model=model,
            optimizer=None if counters is None else _optimizer_facts([one for _, one in gathered if one is not None]),
            facts=run_facts,
            pieces=tuple(piece for pieces, _ in gathered for piece in pieces),
        ))

    return on_first(mesh, commit)


def _optimizer_facts(counters: list[tuple[int | None, dict[str, float] | None]]) -> dict[str, Any]:
    steps = {step for step, _ in counters if step is not None}
    assert len(steps) <= 1, f"ranks made different numbers of updates: {steps}"
    scalers = [scaler for _, scaler in counters if scaler is not None]
    return {"step": max(steps, default=0), "grad_scaler": scalers[0] if scalers else None}


# Loading


def load(
    directory: str | Path,
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer | None,
    weights: Sequence[Weight],
    mesh: Mesh,
    *,
    load_optim: bool = True,
    load_rng: bool = True,
    finetune: bool = False,
    iteration: int | None = None,
) -> Progress:
    """Restore a checkpoint that was saved under this or any other layout; returns where training goes on.

    Under the same layout training continues bit for bit.  ``finetune`` takes the weights only and starts at step 0.
    ``iteration`` chooses a checkpoint; None takes the newest.  Random states are restored under the same layout only.

    Raises:
        UserError: on every rank, when there is no such checkpoint, something in it is missing or damaged, it is of
            another model, or it has no optimizer state for a parameter that is now trained.
    """
    folder, notes = on_first(mesh, lambda: files.find_checkpoint(directory, iteration))

    def find() -> tuple[TrainingDirectory, Source]:
        stored = TrainingDirectory.open(folder)
        source = open_training(stored)
        source.check_model(_model(model))
        return stored, source

    stored, source = together(mesh, find)
    # a run in fp32 goes on from the fp32 copies of one in bf16
    from_master = [weight for weight in weights if stored.has(weight, "master")
                   and model.module.get_parameter(weight.name).dtype == torch.float32]
    fill(model.module, [weight for weight in weights if weight not in from_master], source, mesh)

    def restore() -> tuple[str, ...]:
        for weight in from_master:
            size = model.module.get_parameter(weight.name).numel()
            values = stored.read_state(weight, "master", mesh.tp_size, mesh.tp_rank, 0, size)
            set_weight(model.module, weight, values)
        if optimizer is not None:
            optimizer.reload_model_params()  # fp32 copies follow the weights, until their own values replace them
            if load_optim and not finetune:
                _load_optimizer(stored, source, optimizer, model, weights, mesh)
        return _load_random(stored, mesh) if load_rng and not finetune else ()

    more_notes = together(mesh, restore)
    progress = (0, 0) if finetune else (stored.manifest.iteration, stored.manifest.consumed_samples)
    return Progress(*progress, (*notes, *more_notes))


def _load_optimizer(
    stored: TrainingDirectory,
    source: Source,
    optimizer: MegatronOptimizer,
    model: DistributedDataParallel,
    weights: Sequence[Weight],
    mesh: Mesh,
) -> None:
    facts = stored.manifest.optimizer
    if facts is None:
        raise UserError(
            f"{stored.path} was saved without optimizer state (--no-save-optim); add --no-load-optim to go on with "
            f"new optimizer state, or --finetune to start at step 0 from its weights."
        )
    by_name = {weight.name: weight for weight in weights}
    owned, step = owned_states(optimizer, model), facts["step"]
    untrained = [state.name for state in owned if step and not stored.has(by_name[state.name], MOMENTS[0])]
    if untrained:
        more = f" and {len(untrained) - 1} others" if len(untrained) > 1 else ""
        raise UserError(
            f"{stored.path} has no optimizer state of {untrained[0]}{more}, frozen then and trained now; freeze the "
            f"same parts as then, add --no-load-optim to go on with new optimizer state, or --finetune to start at "
            f"step 0 from the weights."
        )
    for state in owned:
        weight, place = by_name[state.name], (mesh.tp_size, mesh.tp_rank)
        if state.is_copy and stored.has(weight, "master"):
            state.restore_master(stored.read_state(weight, "master", *place, state.start, state.stop))
        elif state.is_copy:
            state.restore_master(source.read(weight, *place, torch.float32).reshape(-1)[state.start : state.stop])
        if step:
            state.restore_moments(step, {
                moment: stored.read_state(weight, moment, *place, state.start, state.stop) for moment in MOMENTS
            })
    if facts["grad_scaler"] is not None:
        restore_scaler(optimizer, facts["grad_scaler"])


def _load_random(stored: TrainingDirectory, mesh: Mesh) -> tuple[str, ...]:
    """Returns notes for the user."""
    if stored.manifest.layout != (mesh.world_size, mesh.tp_size, mesh.pp_size):
        return ("the checkpoint was saved under another layout, so random states are not restored",)
    states = {name: stored.read_random(f"{name}.{mesh.rank}") for name in random_states()}
    found = {name: state for name, state in states.items() if state is not None}
    if len(found) < len(states):
        return (f"{stored.path} holds no random states for this device, so none are restored",)
    set_random_states(found)
    return ()


def _model(model: DistributedDataParallel) -> ModelConfig:
    return cast(Stage, model.module).model
