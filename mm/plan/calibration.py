"""What was measured on a device: the laws of blocks, messages, collectives and the update, and the file they are in.

``mm.planner.measure`` measures and writes it; predictions look laws up here.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from pydantic import TypeAdapter, ValidationError

from mm.config.read import read_json
from mm.errors import UserError
from mm.files import write_whole
from mm.plan.laws import Law

FORMAT = 2


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
    versions: Mapping[str, str]
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    kept_copy: str = "fp32"
    host_share: float = 0.0
    """Share of the optimizer states in host memory."""


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
class DeviceSpeeds:
    """What one device reaches outside of a model; what the layers reach of it shows where time goes."""

    product_flops: float
    """FLOP/s of a large matrix product."""
    copy_bytes: float
    """Bytes per second read and written by a copy in its memory."""
    host_bytes: float
    """Bytes per second copied from pinned memory of the host."""


@dataclass(frozen=True)
class Calibration:
    """The content of a calibration file.  All times are in seconds."""

    machine: Machine
    date: str
    blocks: tuple[MeasuredBlock, ...]
    chunk_pass: float
    """The host's time for each pass of a chunk besides its blocks."""
    pipeline_pass: float | None
    """The same in a pipeline, with its schedule and messages; None if one process measured alone."""
    step: Law
    """The rest of a step, by the trained parameters of one rank: gradient norm, update, and the host's work."""
    message: Law | None
    """From one stage to the next, by bytes; None if one process measured alone."""
    all_reduce: Mapping[int, Law]
    """Number of ranks -> law by bytes; empty if one process measured alone."""
    speeds: DeviceSpeeds | None = None
    """None if nothing was measured."""
    network: Network | None = None
    """None: all ranks are on one node, or connected like those that measured."""
    assumed_error: float | None = None
    """Relative error of times that were computed rather than measured."""
    assumed_host_bytes: float | None = None
    """Bytes per second to and from host memory, if ``speeds`` were not measured."""

    @property
    def error(self) -> float:
        """The usual relative error of a block: the median."""
        return median(one.error for one in self.blocks) if self.assumed_error is None else self.assumed_error

    @property
    def host_bytes(self) -> float | None:
        """Bytes per second to or from host memory; None if unknown, as on no device."""
        return self.assumed_host_bytes if self.speeds is None else self.speeds.host_bytes

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
    if found != FORMAT:
        raise UserError(f"{path}: the format is {found!r}; expected {FORMAT}, as `mm-plan calibrate --output {path}` "
                        f"writes it")
    try:
        return TypeAdapter(Calibration).validate_python(root)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {where}: {first['msg']}; write the file again with `mm-plan calibrate --output "
                        f"{path}`") from error
