"""Reads a calibration, and checks that it fits a run: the same device, versions, precision and optimizer states."""

import sys
from collections.abc import Iterator
from pathlib import Path

from mm.config.args import Arguments
from mm.config.run import Run
from mm.cost.calibration import Calibration, read_calibration
from mm.device.platforms import usable_platform
from mm.environment import CODE, software
from mm.errors import UserError
from mm.process import print_notes


def settings_of(args: Arguments) -> dict[str, str]:
    """What must be as it was during the calibration, besides the device and the precision."""
    return {**software(), "--exp-avg-dtype": args.exp_avg_dtype, "--exp-avg-sq-dtype": args.exp_avg_sq_dtype,
            "copies of 16-bit weights:": args.kept_copy, "optimizer states in host memory:": f"{args.host_share:.3g}"}


def calibration_for(path: Path, run: Run, accepts: bool) -> Calibration:
    """The calibration in ``path``.  Raises UserError if it does not fit the run; with ``accepts``, prints notes
    instead."""
    found = read_calibration(path)
    differences, now = list(_differences(found, run)), software()[CODE]
    if differences and not accepts:
        raise UserError([f"{path}: was measured {one}; measure again with `mm-plan calibrate --output {path}`, or add "
                         f"--accept-calibration if the run will be like the calibration" for one in differences])
    notes = [f"the calibration was measured {one}" for one in differences]
    if (then := found.machine.settings.get(CODE, now)) != now:
        notes.append(f"the calibration was measured with {CODE} {then}, but here it is {now}")
    print_notes(notes, sys.stderr)
    return found


def _differences(calibration: Calibration, run: Run) -> Iterator[str]:
    machine, device = calibration.machine, usable_platform(run.args.device).runtime(0).name
    if machine.device != device:
        yield f"on {machine.device}, but this device is {device}"
    if machine.precision != run.args.precision:
        yield f"in {machine.precision}, but the run is in {run.args.precision}"
    here = settings_of(run.args)
    for name, was in machine.settings.items():
        if name != CODE and here.get(name) != was:
            yield f"with {name} {was}, but here it is {here.get(name, 'absent')}"
