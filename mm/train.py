"""The program, top to bottom: flags and JSON -> config -> device -> mesh -> stage -> optimizer -> loop -> export.

Run by ``torchrun ... -m mm.train FLAGS``; with ``--dry-run`` or ``--check`` it needs no launcher, and no device but one
that ``--check`` is given by name.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mm.config.args import TRAIN
from mm.config.run import Run, load_run, shared_settings
from mm.console import loading, ongoing
from mm.environment import Launched, software
from mm.errors import collected, notes_at_start, printable, refuse, sorted_notes
from mm.lock import Claim
from mm.process import (
    StopSignals,
    end_stopped,
    end_with_launcher,
    is_first_rank,
    print_notes,
    run_command,
    status_of,
)
from mm.recipe import is_recipe, run_recipe

if TYPE_CHECKING:
    from mm.run.sources import Checked


def main(argv: Sequence[str] | None = None) -> int:
    """Run and return the exit status: 0, 2 after reporting every mistake of the user, or 128 plus a signal's number."""
    words, signals = sys.argv[1:] if argv is None else argv, StopSignals()
    return run_command(lambda: _run(words, signals), lambda: _kept(words), is_rank=True, signals=signals)


def _kept(words: Sequence[str]) -> str:
    """What remains after a signal that ended the run at once, for its message.

    Imports nothing: no part of torch can be imported after its import was interrupted.
    """
    given = TRAIN.split(words)
    if "--dry-run" in given.given or "--check" in given.given:
        return "any finished sample index is kept"
    if (save := given.last("--save")) is None:
        return "nothing is kept, because there is no --save"
    checkpoints: Any = sys.modules.get("mm.checkpoint.directories")
    if checkpoints is None:
        return f"training had not begun; {save} is as it was"
    with collected([]):
        folder, _ = checkpoints.find_checkpoint(save)
        return f"{folder} is the latest checkpoint; continue from it with --load {save}"
    return f"{save} has no checkpoint yet"


def _run(words: Sequence[str], signals: StopSignals) -> int:
    end_with_launcher()
    if is_recipe(words):
        flags = run_recipe(words)
        if flags is None:
            return 0
        words = flags
    run = load_run(words)
    if run.args.dry_run or run.args.check:
        run = check_files(run, Claim()).run
    if run.args.dry_run:
        from mm.plan.dry_run import stage_report

        print(printable(stage_report(run)))
        return 0
    if run.args.check:
        print("The check has found nothing that would stop this run.")
        return 0
    return status_of(lambda: train(run, signals))


def check_files(run: Run, claim: Claim) -> "Checked":
    """Decide what the run starts from, check everything that needs no device, and print the notes.

    Raises UserError with all problems.  With ``--check``, a device that is given by name must be there.  Adds the
    directories that the run writes to ``claim``, except in a rehearsal.  It builds the index of the samples, which
    other ranks that read data open later; a node that cannot see it builds its own.
    """
    with loading():
        from mm.device.device import absent_device
        from mm.run.preflight import check
        from mm.run.sources import with_start
        from mm.weights.trained import freeze_notes

    is_rehearsal = run.args.dry_run or run.args.check
    written = {flag: path for flag, path in (("--save", run.args.save), ("--log-dir", run.args.log_dir))
               if path is not None}
    checked = check(with_start(run))
    refuse([*checked.problems, *(absent_device(run.args.device) if run.args.check else ())])
    run = checked.run
    if run.args.dry_run:  # whose report ends with the notes
        checked.run = replace(run, notes=(*run.notes, *checked.notes))
        return checked
    notes = (*run.notes, *freeze_notes(run.model), *checked.notes)
    print_notes(sorted_notes(notes) if run.args.check else notes_at_start(notes))
    if run.args.log_style == "short":
        from mm.run.summary import summary

        print("\n".join(map(printable, summary(checked))), flush=True)
    if not is_rehearsal:
        claim.add(written, lambda text: print(text, flush=True))
    return checked


def train(run: Run, signals: StopSignals) -> int:
    """Train on this process's device, as one rank of the launcher's world; returns the exit status.

    One rank of each node checks the node.  Only rank 0 checks the files, and decides; the others follow it, or end
    with it if it finds a problem.  However the run ends, the directories that were claimed are released.
    """
    with loading(is_first_rank()):
        from mm.parallel.health.rendezvous import Rendezvous
        from mm.parallel.health.watchdog import Watchdog
        from mm.run.resources import Node, node_problems

    if Launched.here().local_rank == 0:
        notes: list[str] = []
        refuse(node_problems(run, Node.here(), notes))
        print_notes(notes)
    args, minutes = run.args, run.args.distributed_timeout_minutes
    facts = {**software(), **shared_settings(run)}
    with Claim() as claim, Watchdog(
            Rendezvous.of_launcher(minutes), args.step_timeout, args.phase_seconds, facts) as watchdog:
        watchdog.at_end = claim.release  # the run may end while it is being locked
        with watchdog.phase("check"):
            checked = check_files(run, claim) if is_first_rank() else None
        with watchdog.phase("start"), loading(is_first_rank(), "starting the device"):
            from mm.device.device import Device, peak_notes

            device = Device.pick(args.device, args.deterministic_mode)
            if is_first_rank():
                print_notes((*device.notes, *peak_notes(device.platform, device.name)), sys.stderr)
            # megatron looks at the device while it is imported, so everything built on it comes after this
            from mm.parallel import mesh as parallel
            from mm.run.loop import Trainer

        with ongoing("waiting for the other ranks", is_first_rank()):
            store = watchdog.meet()
        with watchdog.phase("start"), ongoing("connecting the ranks", is_first_rank()):
            mesh = parallel.start(device, run.model, run.tp_size, minutes, run.cp_size, run.is_ring,
                                  args.vision_feature_cache is not None, store)
        watchdog.place(mesh)
        with watchdog.phase("load"):
            trainer = Trainer(run, checked, device, mesh, watchdog, claim, signals)
            del checked  # frees the headers of the weights; the trainer keeps the samples and questions
        trainer.run_steps()
        trainer.export()
        trainer.close()
    return 0 if trainer.stop is None else end_stopped(f"stopped by {trainer.stop.cause}", trainer.stop.status)


if __name__ == "__main__":
    sys.exit(main())
