"""The calibration file: laws of how long the parts of a step take on a device, linear in rows and pairs.

``mm.plan.measure`` measures one; ``mm.cost.by_device`` computes one from published figures.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np
from pydantic import TypeAdapter, ValidationError

from mm.config.args import Arguments
from mm.config.parse import read_json
from mm.config.run import Run
from mm.device.device import usable_platform
from mm.environment import CODE, software
from mm.errors import UserError
from mm.files import write_whole
from mm.process import print_notes


@dataclass(frozen=True)
class Law:
    """Seconds = fixed + per_row x rows + per_pair x pairs; 0 without rows.  No coefficient is negative."""

    fixed: float
    per_row: float
    per_pair: float = 0.0

    def seconds(self, rows: float, pairs: float = 0.0) -> float:
        return self.fixed + self.per_row * rows + self.per_pair * pairs if rows > 0 else 0.0

    def __add__(self, other: "Law") -> "Law":
        return Law(self.fixed + other.fixed, self.per_row + other.per_row, self.per_pair + other.per_pair)

    def __mul__(self, factor: float) -> "Law":
        return Law(self.fixed * factor, self.per_row * factor, self.per_pair * factor)


FREE = Law(0.0, 0.0)


@dataclass(frozen=True)
class Timed:
    """One measured time."""

    rows: float
    pairs: float
    seconds: float


def fitted(times: Sequence[Timed]) -> Law:
    """The law without a negative coefficient that has the least sum of squared relative errors, exactly."""
    terms = np.array([[1.0, one.rows, one.pairs] for one in times]) / np.array([[one.seconds] for one in times])
    best, least = np.zeros(3), np.inf
    for chosen in (list(some) for count in (1, 2, 3) for some in combinations(range(3), count)):
        if not terms[:, chosen].any(axis=0).all():
            continue  # nothing was measured with such a term
        scale = np.abs(terms[:, chosen]).max(axis=0)
        found = np.linalg.lstsq(terms[:, chosen] / scale, np.ones(len(times)), rcond=None)[0] / scale
        error = float(np.square(terms[:, chosen] @ found - 1).sum())
        if (found >= 0).all() and error < least - 1e-12:
            best, least = np.zeros(3), error
            best[chosen] = found
    return Law(*best.tolist())


FORMAT = 3


@dataclass(frozen=True)
class BlockKey:
    """What the time of a block depends on, besides its rows and pairs."""

    kind: str
    """As in ``mm.model.arithmetic.Block``."""
    matrices: tuple[tuple[int, int], ...]
    """Shapes of its matrices on one rank, in the order of the weight table."""
    tp_size: int
    sequence_parallel: bool
    backward: str
    """Name of its ``mm.model.flops.Backward``."""
    recompute: str
    """What is computed again in the backward pass: "", "layer", or names of modules."""


@dataclass(frozen=True)
class BlockLaws:
    """How long a block takes in each direction; with tensor parallelism, its collectives included."""

    forward: Law
    backward: Law


@dataclass(frozen=True)
class MeasuredBlock:
    """One entry of the file."""

    key: BlockKey
    laws: BlockLaws
    error: float
    """Relative: from the largest misfit of a law and the spread of repeated measurements; the larger direction."""


@dataclass(frozen=True)
class Machine:
    """Where and with what it was measured; a prediction for another machine or version says so."""

    device: str
    precision: str
    num_processes: int
    """Processes that measured at the same time."""
    settings: Mapping[str, str]
    """Versions, and what the optimizer keeps, in words by name."""


@dataclass(frozen=True)
class Network:
    """What connects the nodes of a run."""

    node_size: int
    """Devices in a node."""
    fixed: float
    """Seconds per message, whatever its size."""
    per_byte: float
    """Seconds per byte from or to one device."""


@dataclass(frozen=True)
class Calibration:
    """The content of a calibration file.  All times are in seconds."""

    machine: Machine
    date: str
    blocks: tuple[MeasuredBlock, ...]
    step: Law
    """The rest of a step, by the trained parameters of one rank: gradient norm, update, and the host's work."""
    message: Law | None
    """From one stage to the next, by bytes; None if one process measured alone."""
    all_reduce: Mapping[int, Law]
    """Number of ranks -> law by bytes; empty if one process measured alone."""
    host_bytes: float | None = None
    """Bytes per second to and from host memory; None: such copies take no time."""
    network: Network | None = None
    """None: all ranks are on one node, or connected like those that measured."""
    assumed_error: float | None = None
    """Relative error of times that were computed rather than measured."""

    @property
    def error(self) -> float:
        """The usual relative error of a block: the median."""
        return median(one.error for one in self.blocks) if self.assumed_error is None else self.assumed_error

    @cached_property
    def by_key(self) -> Mapping[BlockKey, MeasuredBlock]:
        return {one.key: one for one in self.blocks}

    def write(self, path: Path) -> None:
        content = {"format": FORMAT, **asdict(self)}
        write_whole(path, (json.dumps(content, indent=1) + "\n").encode())


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file; raises UserError for anything else."""
    root = read_json(path).root
    found = root.pop("format", None) if isinstance(root, dict) else None
    cure = f"write it again with `mm-plan calibrate --output {path}`"
    if found != FORMAT:
        raise UserError(f"{path}: the format is {found!r}; expected {FORMAT}; {cure}")
    try:
        return TypeAdapter(Calibration).validate_python(root)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; {cure}") from error


def settings_of(args: Arguments) -> dict[str, str]:
    """What must be as it was during the calibration, besides the device and the precision."""
    return {**software(), "--exp-avg-dtype": args.exp_avg_dtype, "--exp-avg-sq-dtype": args.exp_avg_sq_dtype,
            "copies of 16-bit weights:": args.kept_copy, "optimizer states in host memory:": f"{args.host_share:.3g}"}


def calibration_for(path: Path, run: Run, accepts: bool) -> Calibration:
    """The calibration in ``path``; differences from the run are refused, or with ``accepts`` noted."""
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
