"""``mm-plan``: how long the steps of a run take on a device, and with which layout or lists they are shorter.

    mm-plan --device NAME FLAGS
    mm-plan lists -- FLAGS
    mm-plan calibrate --output calibration.json --num-processes 2 -- FLAGS
    mm-plan predict --calibration calibration.json -- FLAGS
    mm-plan compare RUN_DIR --calibration calibration.json -- FLAGS

FLAGS are those of ``python -m mm.train``.  The commands are in ``mm.plan.commands``, which loads torch.
"""

import sys
from collections.abc import Sequence
from typing import Any

from mm.config.args import TRAIN
from mm.config.command_line import CommandLine, Commands
from mm.plan.flags import CalibrateFlags, CompareFlags, LayoutFlags, ListsFlags, PredictFlags
from mm.process import run_command


def _line(name: str, description: str, cls: type, usage: str = "[flags] -- FLAGS") -> CommandLine[Any]:
    return CommandLine(name, description, cls, usage, tail=TRAIN)


LAYOUTS = _line("mm-plan", "Find the fastest layout of a run.", LayoutFlags, "--device NAME FLAGS")
COMMANDS = Commands(
    "mm-plan", "Without a command: find the fastest layout of a run on a device, or on what --calibration has "
    "measured, and with --write DIR write it (docs/planning.md).  FLAGS are those of python -m mm.train.", {
        "calibrate": _line(
            "mm-plan calibrate", "Measure this device with the layers of a model: each kind of layer at several sizes, "
            "updates, messages and collectives.  FLAGS are those of the run that will be predicted: its model, "
            "precision, moments, --seq-length, --micro-batch-size and tensor-parallel size.", CalibrateFlags),
        "predict": _line(
            "mm-plan predict", "Predict the step time of a run, what the stages do meanwhile, and how sure that is.  "
            "FLAGS are those of the run; --world-size says how many ranks it has.  Nothing is started.", PredictFlags),
        "compare": _line(
            "mm-plan compare", "Compare the steps that --profile-pipeline has measured with their prediction.  FLAGS "
            "are those of the run.", CompareFlags, "RUN_DIR [flags] -- FLAGS"),
        "lists": _line(
            "mm-plan lists", "Judge the pipeline_num_layers of the run's model JSON on its own data, and search for "
            "better lists with as many stages and chunks.  Losses and gradients do not depend on them.  FLAGS are "
            "those of the run.", ListsFlags)}, LAYOUTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.  Returns the exit status: 0, 2 for errors that the user can fix, or 130 after Ctrl-C."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv), lambda: "nothing was written")


def _run(words: Sequence[str]) -> int:
    from mm.console import loading

    place = list(words).index("--") if "--" in words else len(words)
    line, own = COMMANDS.find(words[:place])
    training = list(words[place + 1 :])
    if line is LAYOUTS:
        own, more = LAYOUTS.own_of(own)
        training = [*more, *training]
    flags = line.read(line.split(own))
    with loading():
        from mm.plan import commands

    commands.run(flags, training)
    return 0


if __name__ == "__main__":
    sys.exit(main())
