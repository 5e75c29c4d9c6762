"""The program, top to bottom: flags and JSON -> config -> device -> mesh -> stage -> optimizer -> loop -> export.

Run by ``torchrun ... -m mm.train FLAGS``; with ``--dry-run`` or ``--check`` it needs neither launcher nor device.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from mm.config.notes import notes_at_start, sorted_notes
from mm.config.run import Run, load_run
from mm.ending import is_first_rank, refused, status_of
from mm.errors import UserError, refuse
from mm.training.claim import Claim, claim_problems


def main(argv: Sequence[str] | None = None) -> int:
    """Run and return the exit status: 0, or 2 after reporting every mistake that the user can mend."""
    try:
        run, claim = prepare(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        return refused(error)
    if run.args.dry_run:
        from mm.plan.stages import stage_report  # loads torch, which a mistake in the settings should not wait for

        print(stage_report(run))
        return 0
    if run.args.check:
        print("Nothing that can be checked beforehand stops this run.")
        return 0
    return status_of(lambda: train(run, claim))


def prepare(argv: Sequence[str]) -> tuple[Run, Claim]:
    """Read and check everything that needs no device; raises UserError with all that is wrong.

    In a run only the first rank looks at the files, and makes the index of the samples, which the ranks that read them
    open later.  A node that does not see it makes its own.  The first rank claims the directories that the run writes.
    """
    run = load_run(argv)
    is_rehearsal = run.args.dry_run or run.args.check
    if not (is_rehearsal or is_first_rank()):
        return run, Claim()
    from mm.training import preflight  # imports transformers, which the other ranks may not need
    from mm.weights.trained import freeze_notes

    found: list[str] = []
    written = {flag: path for flag, path in (("--save", run.args.save), ("--log-dir", run.args.log_dir))
               if path is not None}
    refuse(preflight.file_problems(run, found) + preflight.sample_problems(run, found)
           + preflight.question_problems(run, found) + claim_problems(written))
    if run.args.dry_run:  # whose report ends with the notes
        return replace(run, notes=(*run.notes, *found)), Claim()
    notes = (*run.notes, *freeze_notes(run.model), *found)
    for note in sorted_notes(notes) if run.args.check else notes_at_start(notes):
        print(f"note: {note}", flush=True)
    return run, Claim() if is_rehearsal else Claim.take(written, lambda text: print(text, flush=True))


def train(run: Run, claim: Claim) -> int:
    """Train as ``run`` says, on this process's device, as one rank of the launcher's world; returns the status, 0.

    Gives the directories of ``claim`` back however the run ends.
    """
    with claim:
        from mm.device.device import Device

        device = Device.pick(run.args.device, run.args.deterministic_mode)
        # megatron looks at the device while it is imported, so everything built on it comes after the line above
        from mm.parallel import mesh as parallel
        from mm.parallel.watchdog import Watchdog
        from mm.training.run import Trainer

        mesh = parallel.start(device, run.model, run.tp_size, run.args.distributed_timeout_minutes, run.cp_size,
                              run.is_ring, run.args.vision_feature_cache is not None)
        with Watchdog(mesh, run.args.step_timeout, claim.release) as watchdog:
            trainer = Trainer(run, device, mesh, watchdog, claim)
            trainer.run_steps()
            trainer.export()
            trainer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
