"""Words that flags take, for programs that must start in a Python without any package."""

from typing import Literal

DeviceName = Literal["auto", "npu", "cuda", "cpu"]
