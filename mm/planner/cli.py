"""``mm-plan``: how long the steps of a run take on a device, and with which layout or lists they are shorter.

    mm-plan --device NAME FLAGS
    mm-plan lists -- FLAGS
    mm-plan calibrate --output calibration.json --num-processes 2 -- FLAGS
    mm-plan predict --calibration calibration.json -- FLAGS
    mm-plan compare RUN_DIR --calibration calibration.json -- FLAGS

FLAGS are those of ``python -m mm.train``.  The commands are in ``mm.planner.commands``, which loads torch.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from mm.config.command_line import CommandLine, Commands
from mm.config.flags import TRAIN
from mm.config.schema import STRICT, Count, Group, Positional
from mm.ending import run_command

_ACCEPT = "use a calibration that was measured on another device, with other versions, or in another precision"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LayoutFlags:
    """``mm-plan`` without a command."""

    device: Annotated[str | None, Group("Without a command")] = Field(
        None, description="a device whose published figures are used, such as A100 (docs/planning.md)")
    calibration: Path | None = Field(None, description=(
        "a file that mm-plan calibrate has written, instead of published figures; only layouts whose blocks were "
        "measured are considered"))
    accept_calibration: bool = Field(False, description=_ACCEPT)
    memory_gib: Count | None = Field(
        None, description="GiB of memory that a rank may use; absent = 92% of the device's")
    node_size: Count | None = Field(None, description="devices in a node; absent = as in the maker's usual server")
    network_gbit: Count | None = Field(None, description=(
        "network bandwidth per device to other nodes, in Gbit/s; absent = the device's usual network adapter"))
    lengths: str | None = Field(None, description=(
        "instead of the run's own data: llava, documents, videos, text, or a mix such as llava=3,text=1"))
    fix: str = Field("", description=(
        "values to keep, such as TP=2,PP=4, or several for one name, such as MBS=1/2; names: TP, CP, PP, VPP, MBS, "
        "SAMPLER, ENCODER, RECOMPUTE, EB"))
    top: Count = Field(5, description="layouts to show")
    html: Path | None = Field(None, description=(
        "also write the report to this HTML file, with the lengths of the samples and the timeline of a step"))
    write: Path | None = Field(None, description=(
        "directory for the best layout: model.json, data.json, and layout.sh with the variables of the scripts"))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CalibrateFlags:
    """``mm-plan calibrate``."""

    output: Path = Field(description="the file to write")
    num_processes: Count = Field(1, description=(
        "devices, or on a CPU processes that compute at the same time; a tensor-parallel size needs as many"))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PredictFlags:
    """``mm-plan predict``."""

    calibration: Path = Field(description="the file that mm-plan calibrate has written")
    accept_calibration: bool = Field(False, description=_ACCEPT)
    timeline: Path | None = Field(None, description=(
        "directory for the timeline of one step too, as an SVG file and a trace: iteration 1, or that of "
        "--profile-pipeline"))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CompareFlags(PredictFlags):
    """``mm-plan compare``."""

    folder: Annotated[Path, Positional("RUN_DIR")] = Field(description="the --log-dir of the run")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ListsFlags:
    """``mm-plan lists``."""

    calibration: Path | None = Field(None, description=(
        "a file that mm-plan calibrate has written; absent = every FLOP takes the same time"))
    accept_calibration: bool = Field(False, description=_ACCEPT)
    memory_gib: Count | None = Field(None, description=(
        "GiB of memory that a rank may need; lists that need more are not proposed; absent = no limit"))


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
    from mm.progress import loading

    place = list(words).index("--") if "--" in words else len(words)
    line, own = COMMANDS.find(words[:place])
    training = list(words[place + 1 :])
    if line is LAYOUTS:
        own, more = LAYOUTS.own_of(own)
        training = [*more, *training]
    flags = line.read(line.split(own))
    with loading():
        from mm.planner import commands

    commands.run(flags, training)
    return 0


if __name__ == "__main__":
    sys.exit(main())
