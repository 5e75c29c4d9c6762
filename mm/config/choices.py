"""What the flags of several programs have in common."""

from typing import Literal

DeviceName = Literal["auto", "npu", "cuda", "cpu"]


class HasPrecision:
    """Flags with a precision; neither of the two is fp32."""

    bf16: bool
    fp16: bool

    @property
    def precision(self) -> str:
        """"fp32", "bf16" or "fp16"."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"
