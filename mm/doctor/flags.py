"""The flags of ``mm-doctor``."""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from mm.config.args import DeviceName
from mm.config.command_line import CommandLine
from mm.config.parse import APPENDS, STRICT, Count, Group, NaturalNumber, Positive


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DoctorFlags:
    """``mm-doctor``."""

    device: Annotated[DeviceName, Group("What is examined")] = Field("auto", description="what to examine")
    directory: Annotated[tuple[Path, ...], APPENDS] = Field((), title="one or more directories", description=(
        "where data is read or checkpoints are written; absent = here"))
    report: Path | None = Field(None, description="also write everything to this file, for an issue")

    no_trial: Annotated[bool, Group("The trial: ranks that compute and talk to each other")] = Field(
        False, description="start no ranks, for example while devices are busy")
    num_processes: Count | None = Field(
        None, description="ranks of the trial on this machine; absent = one for each device, 2 on the CPU")
    trial_seconds: Positive = Field(
        300.0, description="how long the trial may take, with the wait for other nodes")

    nnodes: Annotated[Count, Group("Several nodes: the same command on each of them, as for torchrun")] = Field(
        1, description="how many")
    node_rank: NaturalNumber = Field(0, description="the number of this node, from 0")
    master_addr: str = Field("localhost", description="name or address of node 0")
    master_port: Count = Field(6000, description="a free port of node 0")


DOCTOR = CommandLine("mm-doctor", "Print what a run would find on this machine, and how to mend it.", DoctorFlags)
