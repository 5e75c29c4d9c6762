"""What makes CUDA-shaped code run elsewhere: the replaced names that a platform declares.  The only file that patches.

megatron-core is written for CUDA.  On NPU ``torch_npu``'s own ``transfer_to_npu`` redirects it and the table of
``npu.py`` adds what that leaves out; on CPU the table of ``cpu.py`` does all.  ``ADAM_SHIMS`` are part of every table.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shim:
    """One replaced name.  ``target`` is "module:attribute"; a test checks that every target exists."""

    target: str
    replacement: object
    reason: str


ADAM_SHIMS: tuple[Shim, ...] = (
    Shim("megatron.core.optimizer:Adam", torch.optim.AdamW,
         "megatron takes TransformerEngine's or apex's Adam where it can be imported; neither clips and guards in its "
         "kernel, and Ascend's apex has no kernel behind it and raises"),
    Shim("megatron.core.optimizer:USING_PYTORCH_OPTIMIZER", True, "goes with the line above"),
    Shim("megatron.core.optimizer.distrib_optimizer:HAVE_APEX_OR_TE", False, "goes with the lines above"),
)
"""Torch's fused AdamW on every machine, whatever is installed beside it: the same arithmetic and the same states."""


def apply_shims(shims: Sequence[Shim]) -> None:
    """Patch what megatron needs, in this order; before megatron is imported."""
    _import_megatron()
    for shim in shims:
        module_name, attribute = shim.target.split(":")
        owner: object = importlib.import_module(module_name)
        *parents, name = attribute.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        assert hasattr(owner, name), f"shim target {shim.target} does not exist"
        setattr(owner, name, shim.replacement)


def _import_megatron() -> None:
    """Without torch.compile, with which megatron decorates functions that our kernels replace.

    It would build code for every new shape.  megatron's own switch is too late for what the import of the package
    decorates, and torch.compile alone loads 2.4 s of compiler.
    """
    torch_compile = torch.compile
    torch.compile = lambda function: function
    try:
        importlib.import_module("megatron.core.jit").disable_jit_fuser()
    finally:
        torch.compile = torch_compile
