"""The flags of ``mm-plan``; without torch, for its help."""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from mm.config.parse import STRICT, Count, Group, Positional

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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CompareFlags(PredictFlags):
    """``mm-plan compare``."""

    folder: Annotated[Path, Positional("RUN_DIR")] = Field(description="the --log-dir of the run")
    timeline: Path | None = Field(None, description=(
        "directory for both timelines of each step too, as an SVG file and a trace"))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ListsFlags:
    """``mm-plan lists``."""

    calibration: Path | None = Field(None, description=(
        "a file that mm-plan calibrate has written; absent = every FLOP takes the same time"))
    accept_calibration: bool = Field(False, description=_ACCEPT)
    memory_gib: Count | None = Field(None, description=(
        "GiB of memory that a rank may need; lists that need more are not proposed; absent = no limit"))
