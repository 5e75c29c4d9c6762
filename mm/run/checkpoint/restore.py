"""What a training checkpoint restores: weights, optimizer, random states, and progress.

All ranks load together; an error on one raises the same UserError on all.  ``mm.checkpoint`` defines the files,
``optimizer.py`` accesses the optimizer's internals, and ``save.py`` saves.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mm.checkpoint.manifest import validated
from mm.checkpoint.source import Source
from mm.checkpoint.training_manifest import CheckpointManifest, TrainingDirectory
from mm.console import Progress
from mm.data.index.dataset import TrainedOn
from mm.errors import UserError
from mm.model.load import fill, read_once
from mm.parallel.agreement import together
from mm.parallel.mesh import Mesh
from mm.run.optim.optimizer import MOMENTS, OwnedState, is_split, owned_states, restore_scaler, take_weights
from mm.run.progress import BestSoFar, RecentSteps, TrainingProgress
from mm.run.step import Setup
from mm.weights.fuse import local_shape
from mm.weights.shard import MemoryLayout, readers
from mm.weights.table import Weight
from mm.weights.trained import saved_among


def load(
    source: Source, setup: Setup, *, load_optim: bool = True, load_rng: bool = True, finetune: bool = False
) -> TrainingProgress:
    """Restore ``source``, a training checkpoint of this or any other layout; and return where training continues.

    Every rank must have opened the same checkpoint, and checked that it is of this model.  Under the same layout
    training continues bit for bit.  ``finetune`` takes the weights only and starts at step 0.  Random states are
    restored under the same layout only.  Raises UserError on every rank when something in it is missing or damaged, or
    it has no optimizer state for a parameter that is now trained.  The frozen base model of adapters must already be
    loaded.
    """
    mesh, stage, stored = setup.mesh, setup.stage, source.directory
    assert isinstance(stored, TrainingDirectory), "nothing else holds the state of a training"
    # a run in fp32 continues from the fp32 copies of a bf16 run
    from_master = [weight for weight in stage.weights if stored.has(weight, "master")
                   and stage.get_parameter(weight.name).dtype == torch.float32]
    held = saved_among(stage.weights, stored.manifest.model)
    fill(stage, [weight for weight in held if weight not in from_master], source, mesh)

    def read_master(weight: Weight) -> Tensor:
        size = math.prod(local_shape(weight, mesh.tp_size))
        return stored.read_state(weight, "master", mesh.tp_size, mesh.tp_rank, 0, size)

    read_once(stage, from_master, read_master, mesh)

    def restore() -> tuple[Sequence[tuple[OwnedState, int]], tuple[str, ...]]:
        take_weights(setup.optimizer)  # saved copies replace them
        shared = _load_optimizer(stored, source, setup) if load_optim and not finetune else ()
        notes = _load_random(stored, setup) if load_rng and not finetune else ()
        return shared, (*(_copy_notes(stored, setup) if load_optim and not finetune else ()), *notes)

    shared, more_notes = together(mesh, restore)
    _broadcast(shared, mesh, setup.stage.device.torch_device)
    if is_split(setup.optimizer):  # a rank may round its part of a weight differently from the saving run
        setup.gather_weights()
    manifest = stored.manifest
    return TrainingProgress(0, 0, notes=more_notes) if finetune else stated_progress(manifest, stored.path, more_notes)


def stated_progress(manifest: CheckpointManifest, folder: Path, notes: tuple[str, ...] = ()) -> TrainingProgress:
    """The progress of the training that saved the checkpoint in ``folder``; raises UserError for what no run writes."""
    data = TrainedOn.from_json(manifest.data, folder) if manifest.data is not None else None
    best = validated(BestSoFar, manifest.best or {}, folder, "best")
    recent = validated(RecentSteps, manifest.recent or {}, folder, "recent")
    return TrainingProgress(manifest.iteration, manifest.consumed_samples, data, notes, best, manifest.run_id,
                            given_start=manifest.given_start, recent=recent)


def _is_same_layout(stored: TrainingDirectory, mesh: Mesh) -> bool:
    manifest = stored.manifest
    return (manifest.world_size, manifest.tp_size, manifest.pp_size) == (mesh.world_size, mesh.tp_size, mesh.pp_size)


def _load_optimizer(stored: TrainingDirectory, source: Source, setup: Setup) -> Sequence[tuple[OwnedState, int]]:
    """Restore this rank's optimizer state.  If replicas hold the same state, each reads a share of it.  The result
    lists all states with the replica that read each; the others have allocated memory, which ``_broadcast`` fills."""
    facts = stored.manifest.optimizer
    if facts is None:
        raise UserError(
            f"{stored.path} was saved without optimizer state (--no-save-optim); add --no-load-optim to continue with "
            f"new optimizer state, or --finetune to start at step 0 from its weights.")
    by_name = {weight.name: weight for weight in setup.stage.weights}
    owned, step = owned_states(setup.optimizer, setup.models), facts["step"]
    untrained = [state.name for state in owned if step and not stored.has(by_name[state.name], MOMENTS[0])]
    if untrained:
        more = f" and {len(untrained) - 1} others" if len(untrained) > 1 else ""
        raise UserError(
            f"{stored.path} has no optimizer state of {untrained[0]}{more}, which was frozen when it was saved and is "
            f"trained now; freeze the same weights as before, add --no-load-optim to continue with new optimizer "
            f"state, or --finetune to start at step 0 from the weights.")
    copies = setup.mesh.groups.dp_cp
    is_shared = not is_split(setup.optimizer) and copies.size() > 1
    chosen = readers([state.main.nbytes for state in owned], copies.size() if is_shared else 1)
    shown = Progress("loading optimizer states", len(owned), "tensors", is_shown=setup.mesh.rank == 0)
    for state, reader in shown.each(zip(owned, chosen, strict=True)):
        if is_shared and reader != copies.rank():
            if step:
                state.restore_moments(step, None)
            continue
        weight, place = by_name[state.name], (setup.mesh.tp_size, setup.mesh.tp_rank)
        memory = MemoryLayout.of(weight, setup.mesh.tp_size)
        start, stop = memory.real_range(state.start, state.stop)
        if state.is_copy and state.has_fp32:
            values = (stored.read_state(weight, "master", *place, start, stop) if stored.has(weight, "master") else
                      source.read(weight, *place, torch.float32).reshape(-1)[start:stop])
            state.restore_master(memory.pad(values, state.start, state.stop))
        if step:
            state.restore_moments(step, {
                moment: memory.pad(stored.read_state(weight, moment, *place, start, stop), state.start, state.stop)
                for moment in MOMENTS})
    if facts["grad_scaler"] is not None:
        restore_scaler(setup.optimizer, facts["grad_scaler"])
    return list(zip(owned, chosen, strict=True)) if is_shared else ()


def _broadcast(shared: Sequence[tuple[OwnedState, int]], mesh: Mesh, device: torch.device) -> None:
    """Broadcast each optimizer state from the replica that read it, after all have finished reading."""
    group = mesh.groups.dp_cp
    shown = Progress("sending optimizer states to the other replicas", len(shared), "tensors",
                     is_shown=mesh.rank == 0)
    for state, reader in shown.each(shared):
        for tensor in state.restored():
            sent = tensor.to(device)  # it may be in host memory
            dist.broadcast(sent, dist.get_global_rank(group, reader), group)
            if sent is not tensor:
                tensor.copy_(sent)


def _copy_notes(stored: TrainingDirectory, setup: Setup) -> Iterator[str]:
    """A note if the checkpoint holds more of the weights than this run keeps."""
    by_name = {weight.name: weight for weight in setup.stage.weights}
    if any(stored.has_fp32(by_name[state.name]) and not state.has_fp32
           for state in owned_states(setup.optimizer, setup.models)):
        yield (f"{stored.path} holds weights in fp32, of which --main-params-dtype bf16 keeps 16 bits; to keep all, "
               f"resume with --store-param-remainders instead")


def _load_random(stored: TrainingDirectory, setup: Setup) -> tuple[str, ...]:
    """Restore random states; return notes for the user."""
    mesh, device = setup.mesh, setup.stage.device
    if not _is_same_layout(stored, mesh):
        return ("the checkpoint was saved under another layout, so random states are not restored",)
    names = device.random_states().keys()
    found = {name: state for name in names if (state := stored.read_random(f"{name}.{mesh.rank}")) is not None}
    if found.keys() != names:
        return (f"{stored.path} holds no random states for this device, so none are restored",)
    device.set_random_states(found)
    return ()
