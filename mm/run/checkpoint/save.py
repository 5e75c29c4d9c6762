"""Saves training checkpoints and exports the model.

A save has three parts: all ranks begin it, each writes its files, all ranks commit it.  Only the first and last part
communicate, so with ``--async-save`` a thread writes the files while training continues.
``mm.checkpoint.training_manifest`` defines the files.
"""

import secrets
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from mm.checkpoint import convert
from mm.checkpoint import training_files as files
from mm.checkpoint.adapters import base_to_name, export_peft, merge, open_base, open_saved
from mm.checkpoint.pipelined_write import ON_HOST, Host, HostCopies, Values
from mm.checkpoint.training_files import ALL_KEPT, Retention
from mm.checkpoint.training_manifest import CheckpointManifest, CheckpointTensor
from mm.config.run import Run, resolved
from mm.console import ongoing
from mm.device.device import Device
from mm.errors import AgreedError, UserError, collected
from mm.lock import Claim
from mm.parallel.activity import Work
from mm.parallel.agreement import by_rank, gather, on_first, together
from mm.parallel.health.watchdog import Phase
from mm.parallel.mesh import Mesh
from mm.run.checkpoint.disks import Disks
from mm.run.checkpoint.weight_check import WeightCheck
from mm.run.optim.optimizer import OwnedState, is_split, owned_states, scaler_state, wait_for_states
from mm.run.progress import Say, TrainingProgress
from mm.run.sources import BEST, qkv_order
from mm.run.step import Setup
from mm.weights.shard import MemoryLayout
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
        cls, directory: str | Path, progress: TrainingProgress, setup: Setup, run_facts: Mapping[str, Any], *,
        save_optim: bool = True, save_rng: bool = True, disks: Disks | None = None,
    ) -> Self:  # fmt: skip
        """Begin the checkpoint of ``progress.iteration``, together with all ranks.

        ``run_facts`` is for people and must be JSON-serializable.  ``disks``: those of ``directory``; by default all
        ranks see the same.  Raises UserError on every rank if a disk has too little room.
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
        facts = (owned[0].step if owned else None, scaler_state(setup.optimizer)) if save_optim else None
        return cls(temporary, tensors, _begun_manifest(progress, setup, run_facts), facts, disks)

    def write(self, tensors: ToWrite, host: Host) -> list[CheckpointTensor]:
        """Write this rank's files, in any thread, and return their tensors with checksums.  ``tensors``: those of this
        save, or copies of them.  Raises UserError if a file cannot be written."""
        return [
            written for file, of_file in groupby(tensors, lambda one: one[0].stored.file)
            for written in files.write_pieces(self.temporary, file, list(of_file), host)
        ]

    def finish(self, setup: Setup, retention: Retention = ALL_KEPT) -> Path:
        """Write and commit it while training waits, together with all ranks; results and errors as in ``commit``."""
        return self.commit(setup.mesh, lambda: self.write(self.tensors, setup.stage.device.runtime), retention)

    def commit(
        self, mesh: Mesh, written: Callable[[], list[CheckpointTensor]], retention: Retention = ALL_KEPT
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
            if disks.are_several:  # before rank 0's, which says what the next run continues from
                manifest = on_first(mesh, lambda: self._completed(gathered))
                together(mesh, lambda: files.commit(self.temporary, manifest) if disks.is_first and mesh.rank else None)
            final = on_first(mesh, lambda: files.commit(self.temporary, self._completed(gathered)))
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
        return replace(
            self.manifest,
            optimizer=_shared_optimizer_facts([facts for _, facts in gathered if facts is not None]),
            pieces=tuple(found.values()),
            disks=None if not disks.are_several else [
                {"host": disks.hosts[disk], "ranks": disks.ranks_on(disk), "files": sorted(
                    {piece.stored.file for rank in disks.ranks_on(disk) for piece in gathered[rank][0]})}
                for disk in sorted(set(disks.of_ranks))],
        )


def _begun_manifest(
    progress: TrainingProgress, setup: Setup, run_facts: Mapping[str, Any]
) -> CheckpointManifest:
    """The manifest of ``progress``, without its tensors and the facts of the optimizer."""
    mesh = setup.mesh
    return CheckpointManifest(
        iteration=progress.iteration, consumed_samples=progress.consumed_samples, world_size=mesh.world_size,
        tp_size=mesh.tp_size, pp_size=mesh.pp_size, model=setup.stage.model, optimizer=None, facts=run_facts,
        data=progress.data and progress.data.to_json(), pieces=(), base=progress.base, best=asdict(progress.best),
        run_id=progress.run_id, schedule=progress.schedule and progress.schedule.to_json(),
        given_start=progress.given_start, recent=asdict(progress.recent))


def _values(setup: Setup, disks: Disks) -> Mapping[str, Values]:
    """The values of the weights that a rank at this position writes, by name.  If ranks keep shards of weights, they
    gather them unit by unit, all together, and those that write keep copies in host memory."""
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
    weights, position = _stored(setup, disks.are_several), f"tp{mesh.tp_rank:02d}_pp{mesh.pp_rank:02d}"
    memories = {name: MemoryLayout.of(weight, mesh.tp_size) for name, weight in weights.items()}
    tp_ranks = {name: weight.shards(mesh.tp_size, mesh.tp_rank)[1] for name, weight in weights.items()}
    for name, weight in weights.items() if disks.is_writer(mesh) else ():
        piece = CheckpointTensor.of(
            setup.stage.get_parameter(name).dtype, memories[name].file_shape, f"weights_{position}.safetensors",
            stored_name(weight), "weight", tp_ranks[name])
        planned.append((piece, replace(values[name], memory=memories[name])))
    has_own_states = is_split(setup.optimizer)
    file = f"optimizer_{position}_dp{mesh.copy_rank if has_own_states else 0:02d}.safetensors"
    for state in owned if has_own_states or disks.is_writer(mesh) else ():
        if state.name not in weights:
            continue
        start, stop = memories[state.name].real_range(state.start, state.stop)
        for kind, tensor in state.tensors().items() if start < stop else ():  # else only padding
            piece = CheckpointTensor.of(tensor.dtype, (stop - start,), file, stored_name(weights[state.name]), kind,
                                        tp_ranks[state.name], start)
            planned.append((piece, Values(tensor, memories[state.name], state.start)))
    for name, state in setup.stage.device.random_states().items() if save_rng else ():
        piece = CheckpointTensor.of(state.dtype, state.shape, f"random_{mesh.rank:05d}.safetensors",
                                    f"{name}.{mesh.rank}", "random")
        planned.append((piece, Values(state)))
    return planned


def _stored(setup: Setup, with_copies: bool) -> dict[str, Weight]:
    """By name, the weights that this rank's position writes, ``with_copies`` of those that another position writes.
    The frozen base model of adapters is not written."""
    mesh, saved = setup.mesh, {weight.name for weight in saved_weights(setup.stage.model)}
    return {weight.name: weight for weight in setup.stage.weights
            if (stored_name(weight) in saved if with_copies else
                weight.name in saved and (weight.is_cut or mesh.tp_rank == 0))}


def _shared_optimizer_facts(of_ranks: Sequence[OptimizerFacts]) -> dict[str, Any] | None:
    """The manifest's optimizer facts, from those of every rank that saves optimizer state; None if none does."""
    if not of_ranks:
        return None
    steps = {step for step, _ in of_ranks if step is not None}
    assert len(steps) <= 1, f"ranks made different numbers of updates: {steps}"
    scalers = [scaler for _, scaler in of_ranks if scaler is not None]
    return {"step": max(steps, default=0), "grad_scaler": scalers[0] if scalers else None}


@dataclass(frozen=True)
class _Pending:
    """A save that a thread writes."""

    begun: BegunSave
    """Without its tensors, which frees those that are copies already."""
    retention: Retention
    copies: ToWrite
    """In host memory."""
    written: Future[list[CheckpointTensor]] = field(default_factory=Future)


class BackgroundSaves:
    """The saves that threads write while training continues (``--async-save``): all of one iteration, so one copy in
    memory is enough.  The threads do not communicate: each step's update tells all ranks whether any is still writing.
    """

    def __init__(self, device: Device) -> None:
        self._copies = HostCopies(device.runtime)
        self._pending: list[_Pending] = []

    @property
    def iteration(self) -> int | None:
        """The iteration being saved; None if no save is pending.  The same on all ranks."""
        return self._pending[0].begun.manifest.iteration if self._pending else None

    @property
    def is_writing(self) -> bool:
        """Whether this rank has files to write."""
        return any(not one.written.done() for one in self._pending)

    @property
    def copy_bytes(self) -> int:
        """Host memory that the copies take on this rank."""
        return self._copies.num_bytes

    def begin(self, begun: BegunSave, retention: Retention, mesh: Mesh) -> None:
        """Copy the tensors and start writing.  Pending saves must be of the same iteration; they share their copy.
        Raises UserError on every rank if one has too little memory."""
        assert self.iteration in (None, begun.manifest.iteration), "the earlier save must be committed first"
        before = list(self._pending)
        copies = [values for _, values in before[0].copies] if before else together(
            mesh, lambda: self._copies.take([values for _, values in begun.tensors]))
        tensors = [(tensor, values) for (tensor, _), values in zip(begun.tensors, copies, strict=True)]
        pending = _Pending(replace(begun, tensors=()), retention, tensors)
        self._pending.append(pending)

        def write() -> None:
            for one in before:
                one.written.exception()  # waits, so that they do not compete for the disk
            try:
                pending.written.set_result(pending.begun.write(pending.copies, ON_HOST))
            except BaseException as error:  # raised on all ranks by the commit
                pending.written.set_exception(error)

        threading.Thread(target=write, name="save", daemon=True).start()

    def commit(self, mesh: Mesh, saved: Callable[[Path], object] = lambda _: None) -> None:
        """Commit what is pending, together with all ranks, and tell ``saved``; waits until they are written.  Raises
        AgreedError, after all have been tried, if one rank could not write one of them."""
        pending, self._pending = self._pending, []
        problems: list[str] = []
        for one in pending:
            with collected(problems):
                saved(one.begun.commit(mesh, one.written.result, one.retention))
        if problems:
            raise AgreedError(problems)


class Saver:
    """Saves a run's checkpoints when due, and exports its model at the end."""

    def __init__(
        self, run: Run, setup: Setup, claim: Claim, say: Say, phase: Phase, disks: Disks, iteration: int,
        checkpoint: Path | None,
    ) -> None:  # fmt: skip
        """Arguments:

        - ``claim``: this rank's locks on the directories that the run writes
        - ``phase``: guards each save and the export
        - ``checkpoint``: the training checkpoint that holds the weights at the present ``iteration``, or None
        """
        self._run, self._setup, self._claim, self._say = run, setup, claim, say
        self._phase, self._disks = phase, disks
        self._saved = iteration, checkpoint
        """The iteration of the latest save that training waited for, and its checkpoint."""
        self._background = BackgroundSaves(setup.stage.device) if run.args.async_save else None
        self._weights = WeightCheck(run.args.check_weights_interval, setup)

    @property
    def is_writing(self) -> bool:
        """Whether this rank writes in the background."""
        return self._background is not None and self._background.is_writing

    def finish(self, num_writing: float) -> None:
        """After each step: commit what was written, unless ``num_writing`` ranks still wrote during the step."""
        if not num_writing:
            self.commit()

    def after(self, progress: TrainingProgress, is_last: bool) -> None:
        """After each step: compare the ranks' weights and save, if due; ``is_last``: no step follows."""
        args, iteration = self._run.args, progress.iteration
        self._weights.after(iteration)
        if args.save is None:
            return
        if args.save_best and progress.best.iteration == iteration:
            self._save(str(Path(args.save) / BEST), progress, Retention(1))
        interval = args.save_interval
        if is_last or (interval is not None and iteration % interval == 0):
            self._save(args.save, progress, Retention(args.keep_last_checkpoints, args.save_retain_interval), is_last)

    def commit(self) -> None:
        """Wait for the background saves and make them the newest, together with all ranks.  Raises UserError on every
        rank if one could not write."""
        if self._background is not None and self._background.iteration is not None:
            with self._saving("finishing", self._background.iteration):
                self._background.commit(self._setup.mesh, lambda final: self._say(f"saved {final}"))

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Commit what is being written when the body ends, also if all ranks leave it with the same error."""
        try:
            yield
        except AgreedError:
            self.commit()
            raise
        self.commit()

    def export(self, progress: TrainingProgress, has_ended: bool) -> None:
        """Write the model in Hugging Face format if requested and the run is finished; adapters as a PEFT directory,
        merged, or both."""
        args = self._run.args
        targets = {flag: path for flag, path in (("--export-hf", args.export_hf),
                                                 ("--export-merged-hf", args.export_merged_hf)) if path is not None}
        if not has_ended:
            for flag, path in targets.items():
                self._say(f"note: nothing was exported to {path}: the run is at iteration {progress.iteration} of "
                          f"{args.train_iters}; resume it with the same {flag}")
        elif targets:
            self._export(progress, targets)

    def _export(self, progress: TrainingProgress, targets: Mapping[str, str]) -> None:
        temporary = self._temporary(next(iter(targets.values())))
        iteration, source = self._saved

        def write(source: Path) -> None:
            for flag, path in targets.items():
                self._convert(source, path, progress.base, flag == "--export-merged-hf")

        try:
            if source is None or iteration != progress.iteration:
                with self._saving("writing for the export", progress.iteration):
                    source = self._begin(temporary, progress, weights_only=True).finish(self._setup)
            self._say(f"exporting {source} to {' and '.join(targets.values())}")
            with self._phase("export"):
                on_first(self._setup.mesh, lambda: write(source))
        finally:
            if self._disks.is_first:
                shutil.rmtree(temporary, ignore_errors=True)

    def _temporary(self, target: str) -> Path:
        """A directory for an export to ``target`` that no other run has, on the disk that ``find_disks`` has found."""
        token = on_first(self._setup.mesh, lambda: secrets.token_hex(8))
        if self._run.args.save is not None:
            return Path(self._run.args.save) / f"{files.TEMPORARY_PREFIX}{token}"
        return Path(target).with_name(f".{Path(target).name}.weights-{token}")

    def _convert(self, source: Path, target: str, base: Mapping[str, Any] | None, is_merged: bool) -> None:
        run = self._run
        hf_dir = run.data.model_name_or_path
        if not run.model.lora.is_on:
            convert.mm_to_hf(source, hf_dir, target).run()
        elif is_merged:
            assert base is not None, "checked before the run: there is a base model to merge with"
            opened = open_base(base["path"], run.model, qkv_order(run))
            merge(open_saved(source), opened, hf_dir, target).run()
        else:
            name = base_to_name(base, hf_dir, run.model)
            export_peft(open_saved(source), target, name).run()

    @contextmanager
    def _saving(self, doing: str, iteration: int) -> Iterator[None]:
        """Guard a part of a save, and show what it is ``doing``; the run must still own its directories."""
        what = f"{doing} the checkpoint of iteration {iteration}"
        with (self._phase("save"), self._setup.stage.journal.during(Work.SAVE),
              ongoing(what, self._setup.mesh.rank == 0)):
            together(self._setup.mesh, self._claim.check)
            yield

    def _save(self, directory: str, progress: TrainingProgress, retention: Retention, waits: bool = False) -> None:
        """Save everything that training needs to continue; with ``--async-save`` in the background unless it ``waits``.
        """
        self._weights.check(progress.iteration)
        background, iteration = self._background, progress.iteration
        if background is None or waits:
            self.commit()
            with self._saving("writing", iteration):
                final = self._begin(directory, progress).finish(self._setup, retention)
            self._saved = iteration, final
            self._say(f"saved {final}")
            return
        if background.iteration not in (None, iteration):
            if background.is_writing:
                self._say(f"note: training waits until the checkpoint of iteration {background.iteration} is written: "
                          f"--save-interval is shorter than writing takes")
            self.commit()
        with self._saving("copying to host memory", iteration):
            background.begin(self._begin(directory, progress), retention, self._setup.mesh)

    def _begin(self, directory: str | Path, progress: TrainingProgress, *, weights_only: bool = False) -> BegunSave:
        args = self._run.args
        return BegunSave.begin(
            directory, progress, self._setup, resolved(self._run), save_optim=not (args.no_save_optim or weights_only),
            save_rng=not (args.no_save_rng or weights_only), disks=self._disks)
