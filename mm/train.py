"""The program, top to bottom: flags and JSON -> config -> device -> mesh -> stage -> optimizer -> loop -> export.

Run by ``torchrun ... -m mm.train FLAGS``; with ``--dry-run`` or ``--check`` it needs neither launcher nor device.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mm.config.run import Run, load_run
from mm.errors import AgreedError, ReportedError, UserError, refuse

_LAUNCHER_SECONDS = 60.0
"""How long a rank at most waits for the launcher to end it.  torchrun needs about a second after a rank has exited."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run and return the exit status: 0, or 2 after reporting every mistake that the user can mend."""
    try:
        run = prepare(sys.argv[1:] if argv is None else argv)
    except UserError as error:  # every rank of a node finds it; the first one reports it at once
        if os.environ.get("LOCAL_RANK", "0") != "0":
            _wait_for_the_launcher()
        return _report(error)
    if run.args.dry_run:
        from mm.plan.stages import stage_report  # loads torch, which a mistake in the settings should not wait for

        print(stage_report(run))
        return 0
    if run.args.check:
        print("Everything that can be checked beforehand is in order.")
        return 0
    try:
        train(run)
    except AgreedError as error:  # every rank raises it; rank 0 reports it
        if os.environ.get("RANK", "0") != "0":
            _wait_for_the_launcher()
            return 2
        return _report(error)
    except UserError as error:
        return _report(error)
    except ReportedError as error:
        _tell_the_launcher([str(error)])
        sys.stdout.flush()
        os._exit(1)  # at a usual end, process groups that other threads still hold would abort this process
    return 0


def prepare(argv: Sequence[str]) -> Run:
    """Read and check everything that needs no device; raises UserError with all that is wrong.

    In a run only the first rank looks at the files, and makes the index of the samples, which the ranks that read them
    open later.  A node that does not see it makes its own.
    """
    run = load_run(argv)
    is_rehearsal = run.args.dry_run or run.args.check
    if not is_rehearsal and os.environ.get("RANK", "0") != "0":
        return run
    from mm.training import preflight  # imports transformers, which the other ranks may not need
    from mm.weights.trained import freeze_notes

    found: list[str] = []
    refuse(preflight.file_problems(run) + preflight.sample_problems(run, found))
    notes = (*run.notes, *freeze_notes(run.model), *found)
    for note in () if run.args.dry_run else notes:  # a dry run reports its own
        print(f"note: {note}", flush=True)
    return run


def _wait_for_the_launcher() -> None:
    """Leave the report to another rank, whose exit makes the launcher end this process in its sleep.

    The limit is for a mistake that only this rank has found.
    """
    time.sleep(_LAUNCHER_SECONDS)


def _report(error: UserError) -> int:
    rank = os.environ.get("RANK", "0")
    start = "error: " if rank == "0" else f"[rank {rank}] error: "
    sys.stderr.write("".join(f"{start}{problem}\n" for problem in error.problems))  # one write: ranks share the screen
    sys.stderr.flush()
    _tell_the_launcher(error.problems)
    return 2


def _tell_the_launcher(problems: Sequence[str]) -> None:
    """Give torchrun what it shows as the root cause, in its own format, in place of a hint how to get a traceback.

    torchrun itself ends with 1 and a traceback of its own whenever a rank ends with another status than 0.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    others = f" ({len(problems) - 1} more stand above)" if len(problems) > 1 else ""
    message = {"message": f"{problems[0]}{others}", "extraInfo": {"timestamp": str(int(time.time()))}}
    Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")


def train(run: Run) -> None:
    """Train as ``run`` says, on this process's device, as one rank of the launcher's world."""
    from mm.device.device import Device

    device = Device.pick(run.args.device, run.args.deterministic_mode)
    # megatron looks at the device while it is imported, so everything built on it comes after the line above
    from mm.parallel import mesh as parallel
    from mm.parallel.watchdog import Watchdog
    from mm.training.run import Trainer

    mesh = parallel.start(device, run.model, run.tp_size, run.args.distributed_timeout_minutes, run.cp_size,
                          run.is_ring, run.args.vision_feature_cache is not None)
    with Watchdog(mesh, run.args.step_timeout) as watchdog:
        trainer = Trainer(run, device, mesh, watchdog)
        trainer.run_steps()
        trainer.export()
        trainer.close()


if __name__ == "__main__":
    sys.exit(main())
