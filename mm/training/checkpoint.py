"""Where weights come from and where training state goes: random, Hugging Face, and training checkpoints.

Every rank calls these functions together; a mistake or failed write on one is the same UserError on all.  The
files are those of ``checkpoint.formats``, the optimizer's insides those of ``optimizer_state.py``.
"""

import dataclasses
import hashlib
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from checkpoint.formats import training as files
from checkpoint.formats.hf import HFDirectory
from checkpoint.formats.mindspeed_reader import MMReader
from checkpoint.formats.training import Manifest, Piece, find_checkpoint, find_load_kind, remove
from checkpoint.formats.training_reader import CheckpointReader, check_model, export_hf, stored_name
from mm.config.model import ModelConfig
from mm.device.device import random_states, set_random_states
from mm.errors import UserError
from mm.parallel.agreement import gather, on_first, together
from mm.parallel.mesh import Mesh
from mm.training.optimizer_state import MOMENTS, OwnedState, is_split, owned_states, restore_scaler, scaler_state
from mm.weights.table import Weight, shard

__all__ = [
    "Progress", "export_hf", "find_checkpoint", "find_load_kind", "initialize", "load", "load_hf", "load_mm", "remove",
    "save",
]  # fmt: skip

Result = TypeVar("Result")


@dataclass(frozen=True)
class Progress:
    """How far training has come.  The learning rate and the order of the data are functions of it."""

    iteration: int
    consumed_samples: int
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """What ``load`` has to tell the user."""


# Weights to start from


def initialize(stage: nn.Module, weights: Sequence[Weight], mesh: Mesh, seed: int, std: float) -> None:
    """Random weights: norms 1, biases 0, everything else normal with standard deviation ``std``.

    Each whole tensor has its own generator, seeded by ``seed`` and its name, and is cut afterwards: every layout
    starts from the same model.
    """
    for weight in weights:
        if weight.name.endswith("norm.weight"):
            whole = torch.ones(weight.shape)
        elif weight.name.endswith(".bias"):
            whole = torch.zeros(weight.shape)
        else:
            digest = hashlib.sha256(f"{seed} {stored_name(weight)}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            whole = torch.empty(weight.shape).normal_(std=std, generator=generator)
        _fill(stage, weight, shard(weight, whole, mesh.tp_size, mesh.tp_rank))


def load_hf(stage: nn.Module, weights: Sequence[Weight], mesh: Mesh, hf_dir: str | Path, dtype: torch.dtype) -> None:
    """Weights from a Hugging Face directory; each rank reads only what it holds.

    Raises:
        UserError: the directory lacks a weight of the model, holds one that is none of it, or is of another model.
    """

    def read() -> None:
        directory = HFDirectory.open(hf_dir)
        directory.check(stage.model)
        for weight in weights:
            _fill(stage, weight, directory.load_weight(weight, mesh.tp_size, mesh.tp_rank, dtype=dtype))

    together(mesh, read)


def load_mm(
    stage: nn.Module, weights: Sequence[Weight], mesh: Mesh, mm_dir: str | Path, dtype: torch.dtype, finetune: bool
) -> None:
    """Weights from a directory in MindSpeed-MM's layout, cut for this or any other layout.

    Raises:
        UserError: on every rank, when ``MMReader.open`` refuses the directory or a tensor is damaged.
    """
    reader = together(mesh, lambda: MMReader.open(mm_dir, stage.model, finetune))
    on_first(mesh, reader.check_unread)

    def read() -> None:
        for weight in weights:
            _fill(stage, weight, reader.read(weight, mesh.tp_size, mesh.tp_rank, dtype))

    together(mesh, read)


def _fill(stage: nn.Module, weight: Weight, tensor: Tensor) -> None:
    parameter = stage.get_parameter(weight.name)
    with torch.no_grad():
        parameter.copy_(tensor.reshape(parameter.shape))


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
    num_bytes = torch.tensor(sum(piece.num_bytes for pieces in planned.values() for piece, _ in pieces))
    dist.all_reduce(num_bytes, group=mesh.control_group)
    temporary = on_first(mesh, lambda: files.begin(directory, progress.iteration, int(num_bytes)))
    try:
        written = together(mesh, lambda: [
            piece for file, pieces in planned.items() for piece in files.write_pieces(temporary, file, pieces)
        ])
        final = _commit(mesh, temporary, progress, model.module.model, written, counters, run_facts)
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
    """Every weight once: no second replica, no second copy of a tied embedding or of what TP ranks hold alike."""
    file = f"weights_tp{mesh.tp_rank:02d}_pp{mesh.pp_rank:02d}.safetensors"
    pieces = [
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
            model=dataclasses.asdict(model),
            optimizer=None if counters is None else _optimizer_facts([counters for _, counters in gathered]),
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

    def restore() -> tuple[CheckpointReader, tuple[str, ...]]:
        reader = CheckpointReader(folder)
        check_model(reader, model.module.model)
        _load_weights(reader, model.module, weights, mesh)
        if optimizer is not None:
            optimizer.reload_model_params()  # fp32 copies follow the weights, until their own values replace them
            if load_optim and not finetune:
                _load_optimizer(reader, optimizer, model, weights, mesh)
        return reader, _load_random(reader, mesh) if load_rng and not finetune else ()

    reader, more_notes = together(mesh, restore)
    stored = reader.manifest
    progress = (0, 0) if finetune else (stored.iteration, stored.consumed_samples)
    return Progress(*progress, (*notes, *more_notes))


def _load_weights(reader: CheckpointReader, stage: nn.Module, weights: Sequence[Weight], mesh: Mesh) -> None:
    for weight in weights:
        wants_fp32 = stage.get_parameter(weight.name).dtype == torch.float32
        part = "master" if wants_fp32 and reader.has(weight, "master") else "weight"
        _fill(stage, weight, reader.read(weight, part, mesh.tp_size, mesh.tp_rank))


def _load_optimizer(
    reader: CheckpointReader,
    optimizer: MegatronOptimizer,
    model: DistributedDataParallel,
    weights: Sequence[Weight],
    mesh: Mesh,
) -> None:
    stored = reader.manifest.optimizer
    if stored is None:
        raise UserError(
            f"{reader.folder} was saved without optimizer state (--no-save-optim); add --no-load-optim to go on with "
            f"new optimizer state, or --finetune to start at step 0 from its weights."
        )
    by_name = {weight.name: weight for weight in weights}
    owned, step = owned_states(optimizer, model), stored["step"]
    untrained = [state.name for state in owned if step and not reader.has(by_name[state.name], MOMENTS[0])]
    if untrained:
        more = f" and {len(untrained) - 1} others" if len(untrained) > 1 else ""
        raise UserError(
            f"{reader.folder} has no optimizer state of {untrained[0]}{more}, frozen then and trained now; freeze the "
            f"same parts as then, add --no-load-optim to go on with new optimizer state, or --finetune to start at "
            f"step 0 from the weights."
        )
    for state in owned:
        weight, place = by_name[state.name], (mesh.tp_size, mesh.tp_rank, state.start, state.stop)
        if state.is_copy:
            part = "master" if reader.has(weight, "master") else "weight"
            state.restore_master(reader.read(weight, part, *place))
        if step:
            state.restore_moments(step, {moment: reader.read(weight, moment, *place) for moment in MOMENTS})
    if stored["grad_scaler"] is not None:
        restore_scaler(optimizer, stored["grad_scaler"])


def _load_random(reader: CheckpointReader, mesh: Mesh) -> tuple[str, ...]:
    """Returns notes for the user."""
    if reader.manifest.layout != (mesh.world_size, mesh.tp_size, mesh.pp_size):
        return ("the checkpoint was saved under another layout, so random states are not restored",)
    found = {name: reader.read_random(f"{name}.{mesh.rank}") for name in random_states()}
    if any(state is None for state in found.values()):
        return (f"{reader.folder} holds no random states for this device, so none are restored",)
    set_random_states(found)
    return ()
