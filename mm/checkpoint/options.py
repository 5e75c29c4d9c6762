"""Options of every conversion; without torch, for the help of ``mm-convert``."""

from pydantic import Field
from pydantic.dataclasses import dataclass

from mm.config.schema import STRICT, NaturalNumber


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Options:
    """How a conversion runs."""

    dry_run: bool = Field(default=False, description="print the plan with sizes, and write nothing")
    overwrite: bool = Field(default=False, description="replace a target that is not empty")
    num_workers: NaturalNumber = Field(default=0, description="threads; 0 = one per core")
