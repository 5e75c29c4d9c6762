"""Saves a run's checkpoints when due, and exports its model at the end."""

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any

from mm.config.run import Run, resolved
from mm.conversion import convert
from mm.conversion.adapters import base_to_name, export_peft, merge, open_base, open_saved
from mm.errors import AgreedError
from mm.formats.training_writer import TEMPORARY_PREFIX, Retention
from mm.lock import Claim
from mm.parallel.activity import Work
from mm.parallel.agreement import on_first, together
from mm.parallel.watchdog import Phase
from mm.progress import ongoing
from mm.training.background import BackgroundSaves
from mm.training.checkpoint import TrainingProgress
from mm.training.disks import Disks
from mm.training.reporter import Say
from mm.training.save import BegunSave
from mm.training.saves import BEST
from mm.training.sources import qkv_order
from mm.training.step import Setup


class Saver:
    """Saves and exports; tracks which checkpoint holds the current weights."""

    def __init__(
        self, run: Run, setup: Setup, claim: Claim, say: Say, checkpoint: Path | None, base: Mapping[str, Any] | None,
        phase: Phase, disks: Disks | None = None,
    ) -> None:  # fmt: skip
        """Arguments:

        - ``claim``: this rank's locks on the directories that the run writes
        - ``checkpoint``: the training checkpoint with the weights that the run starts from, in its dtype, or None
        - ``base``: the base model of adapters, as in ``CheckpointManifest``
        - ``phase``: guards each save and the export
        - ``disks``: those of ``--save``; by default all ranks see the same
        """
        self._disks = disks or Disks.one(setup.mesh)
        self._phase = phase
        self._run, self._setup, self._claim, self._say, self._base = run, setup, claim, say, base
        self._checkpoint = checkpoint
        self._usual_seconds: dict[str, float] = {}
        """For each kind of work in a save, what it took the last time."""
        self._background = BackgroundSaves(setup.stage.device) if run.args.async_save else None
        self.is_written = False
        """Whether all ranks have written what they save in the background, so that ``commit`` does not wait."""

    def is_due(self, iteration: int, is_last: bool) -> bool:
        """Whether to save a checkpoint after this step; ``is_last``: it is the last step of this launch."""
        args = self._run.args
        return args.save is not None and (
            is_last or (args.save_interval is not None and iteration % args.save_interval == 0))

    def is_best(self, progress: TrainingProgress) -> bool:
        """Whether the validation after this step had the lowest loss so far, and ``--save-best`` is given."""
        return self._run.args.save_best and progress.best.iteration == progress.iteration

    def save(self, progress: TrainingProgress, is_last: bool) -> None:
        """Save everything that training needs to continue; in the background unless nothing follows."""
        args = self._run.args
        assert args.save is not None, "a save is due only with --save"
        retention = Retention(args.keep_last_checkpoints, args.save_retain_interval)
        self._save_in(args.save, progress, retention, waits=is_last)

    def save_best(self, progress: TrainingProgress) -> None:
        """Save to the directory of the best checkpoint, and delete the previous best."""
        assert self._run.args.save is not None, "checked with the settings"
        self._save_in(str(Path(self._run.args.save) / BEST), progress, Retention(1))

    @property
    def is_writing(self) -> bool:
        """Whether this rank writes in the background."""
        return self._background is not None and self._background.is_writing

    def decide(self, num_writing: float) -> None:
        """Set ``is_written`` from the number of ranks that write, as all ranks know it from the latest step."""
        self.is_written = self._background is not None and self._background.iteration is not None and not num_writing

    def commit(self) -> None:
        """Make the checkpoints that were written in the background the newest, together with all ranks.

        Waits for those that are still being written.  Raises UserError on every rank if one could not write.
        """
        if self._background is not None and self._background.iteration is not None:
            self.is_written = False
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

    def weights_change(self) -> None:
        """Record that a step begins: no checkpoint holds the current weights any more."""
        self._checkpoint = None

    def export(self, progress: TrainingProgress, has_ended: bool) -> None:
        """Write the model in Hugging Face format if requested and the run is finished.

        For adapters: a PEFT directory, the merged model, or both.
        """
        args = self._run.args
        targets = {flag: path for flag, path in (("--export-hf", args.export_hf),
                                                 ("--export-merged-hf", args.export_merged_hf)) if path is not None}
        if not targets:
            return
        if not has_ended:
            for flag, path in targets.items():
                self._say(f"note: nothing was exported to {path}: the run is at iteration {progress.iteration} of "
                          f"{args.train_iters}; resume it with the same {flag}")
            return
        temporary = self._temporary(next(iter(targets.values())))

        def write(source: Path) -> None:
            for flag, path in targets.items():
                self._export(source, path, flag == "--export-merged-hf")

        try:
            source = self._checkpoint or self._save_weights(temporary, progress)
            self._say(f"exporting {source} to {' and '.join(targets.values())}")
            with self._phase("export"):
                on_first(self._setup.mesh, lambda: write(source))
        finally:
            if self._disks.is_first:
                rmtree(temporary, ignore_errors=True)

    def _temporary(self, target: str) -> Path:
        """A directory for an export to ``target`` that no other run has, on the disk that ``find_disks`` has found."""
        token = on_first(self._setup.mesh, lambda: secrets.token_hex(8))
        if self._run.args.save is not None:
            return Path(self._run.args.save) / f"{TEMPORARY_PREFIX}{token}"
        return Path(target).with_name(f".{Path(target).name}.weights-{token}")

    @contextmanager
    def _saving(self, doing: str, iteration: int) -> Iterator[None]:
        """Guard a part of a save, and show what it is ``doing``; the run must still own its directories."""
        began, what = time.monotonic(), f"{doing} the checkpoint of iteration {iteration}"
        with (self._phase("save"), self._setup.stage.journal.during(Work.SAVE),
              ongoing(what, self._setup.mesh.rank == 0, self._usual_seconds.get(doing))):
            together(self._setup.mesh, self._claim.check)
            yield
        self._usual_seconds[doing] = time.monotonic() - began

    def _save_in(
        self, directory: str, progress: TrainingProgress, retention: Retention, waits: bool = False
    ) -> None:
        background = self._background
        if background is None or waits:
            self.commit()
            self._save(directory, progress, retention)
            return
        if background.iteration not in (None, progress.iteration):
            if background.is_writing:
                self._say(f"note: training waits until the checkpoint of iteration {background.iteration} is written: "
                          f"--save-interval is shorter than writing takes")
            self.commit()
        with self._saving("copying to host memory", progress.iteration):
            background.begin(self._begin(directory, progress), retention, self._setup.mesh)

    def _save(self, directory: str, progress: TrainingProgress, retention: Retention) -> None:
        """Save while training waits."""
        with self._saving("writing", progress.iteration):
            self._checkpoint = self._begin(directory, progress).finish(self._setup, retention)
        self._say(f"saved {self._checkpoint}")

    def _save_weights(self, directory: Path, progress: TrainingProgress) -> Path:
        """Save the weights alone, for an export."""
        with self._saving("writing for the export", progress.iteration):
            saved = self._begin(directory, progress, weights_only=True).finish(self._setup)
        self._say(f"saved {saved}")
        return saved

    def _begin(self, directory: str | Path, progress: TrainingProgress, *, weights_only: bool = False) -> BegunSave:
        args = self._run.args
        return BegunSave.begin(
            directory,
            progress,
            self._setup,
            resolved(self._run),
            save_optim=not (args.no_save_optim or weights_only),
            save_rng=not (args.no_save_rng or weights_only),
            base=self._base,
            disks=self._disks,
        )

    def _export(self, source: Path, target: str, is_merged: bool) -> None:
        run = self._run
        hf_dir = run.data.model_name_or_path
        if not run.model.lora.is_on:
            convert.mm_to_hf(source, hf_dir, target).run(convert.Options())
            return
        adapters = open_saved(source)
        if not is_merged:
            export_peft(adapters, target, base_to_name(self._base, hf_dir, run.model)).run(convert.Options())
            return
        assert self._base is not None, "checked before the run: there is a base model to merge with"
        base = open_base(self._base["path"], run.model, qkv_order(run))
        merge(adapters, base, hf_dir, target).run(convert.Options())
