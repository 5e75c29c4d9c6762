"""The program, top to bottom: flags and JSON -> config -> device -> mesh -> stage -> optimizer -> loop -> export.

Run by ``torchrun ... -m mm.train FLAGS``; with ``--dry-run`` it needs neither launcher nor device.
"""

import os
import sys
from collections.abc import Sequence

from mm.errors import UserError
from mm.report import stage_report
from mm.run_config import RunConfig, load_run


def main(argv: Sequence[str] | None = None) -> int:
    """Run and return the exit status: 0, or 2 after telling every mistake that the user can mend."""
    is_first_rank = os.environ.get("RANK", "0") == "0"
    try:
        run = load_run(sys.argv[1:] if argv is None else argv)
        if run.args.dry_run:
            print(stage_report(run))
            return 0
        if is_first_rank:
            for note in run.notes:
                print(f"note: {note}", flush=True)
        train(run)
    except UserError as error:
        rank = "" if is_first_rank else f"[rank {os.environ['RANK']}] "
        for problem in error.problems:
            print(f"{rank}error: {problem}", file=sys.stderr, flush=True)
        return 2
    return 0


def train(run: RunConfig) -> None:
    """Train as ``run`` says, on this process's device, as one rank of the launcher's world."""
    from mm.device import Device

    device = Device.pick(run.args.device)
    # megatron looks at the device while it is imported, so everything built on it comes after the line above
    from mm.trainer import Trainer

    trainer = Trainer(run, device)
    try:
        trainer.run_steps()
        trainer.export()
    finally:
        trainer.close()


if __name__ == "__main__":
    sys.exit(main())
