"""Reads a calibration, and checks that it fits a run: the same device, versions and precision."""

import sys
from collections.abc import Iterator
from pathlib import Path

from mm.config.command_line import flag_name
from mm.config.run import Run
from mm.device.platforms import usable_platform
from mm.ending import print_notes
from mm.errors import UserError
from mm.plan.calibration import Calibration, read_calibration
from mm.plan.states import on_host
from mm.version import CODE, software

COPIES = {"fp32": "fp32 copies of 16-bit weights", "remainder": "--store-param-remainders",
           "none": "--main-params-dtype bf16"}
"""What the user calls the values of ``Arguments.kept_copy``."""


def calibration_for(path: Path, run: Run, accepts: bool) -> Calibration:
    """The calibration in ``path``.  Raises UserError if it does not fit the run; with ``accepts``, prints notes
    instead."""
    found = read_calibration(path)
    differences = list(_differences(found, run))
    if differences and not accepts:
        raise UserError([f"{path}: {one}; measure again with `mm-plan calibrate --output {path}`, or add "
                         f"--accept-calibration if the run will be like the calibration" for one in differences])
    now, then = software()[CODE], found.machine.versions.get(CODE)
    notes = [] if then in (None, now) else [f"the calibration was measured with {CODE} {then}, but here it is {now}"]
    print_notes([*differences, *notes], sys.stderr)
    return found


def _differences(calibration: Calibration, run: Run) -> Iterator[str]:
    """How the device, precision, optimizer or versions of the calibration differ from those of the run."""
    machine, device = calibration.machine, usable_platform(run.args.device).runtime(0).name
    if machine.device != device:
        yield f"was measured on {machine.device}, but this device is {device}"
    if machine.precision != run.args.precision:
        yield f"was measured in {machine.precision}, but the run is in {run.args.precision}"
    for flag in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        was, now = getattr(machine, flag), getattr(run.args, flag)
        if was != now:
            yield f"was measured with {flag_name(flag)} {was}, but the run has {now}"
    if machine.kept_copy != run.args.kept_copy:
        yield f"was measured with {COPIES[machine.kept_copy]}, but the run has {COPIES[run.args.kept_copy]}"
    if machine.host_share != run.args.host_share:
        yield f"was measured with {on_host(machine.host_share)}, but the run has {on_host(run.args.host_share)}"
    here = software()
    for name, was in machine.versions.items():
        if name != CODE and here.get(name) != was:
            yield f"was measured with {name} {was}, but here it is {here.get(name, 'absent')}"
