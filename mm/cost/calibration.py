"""How long the parts of a step take on a device: the content of a calibration file, in which predictions look laws up.

``mm.plan.measure`` measures one; ``mm.cost.by_device`` computes one from published figures.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from pydantic import TypeAdapter, ValidationError

from mm.config.strict_json import read_json
from mm.cost.linear_costs import Law
from mm.errors import UserError
from mm.files import write_whole

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
    """Processes that measured at the same time: on a CPU they share caches and memory bandwidth."""
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
