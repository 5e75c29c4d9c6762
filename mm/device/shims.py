"""Replaces names in torch and megatron as a platform declares, so that code for CUDA runs elsewhere.

This is the only file that patches.  megatron-core is written for CUDA; on NPUs ``torch_npu``'s ``transfer_to_npu``
redirects it, and the tables of ``npu.py`` and ``cpu.py`` do the rest.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mm.device.gloo import with_one_worker


@dataclass(frozen=True)
class Shim:
    """One replaced name.  ``target`` is "module:attribute"; a test checks that every target exists."""

    target: str
    replacement: object
    reason: str


COMMON_SHIMS: tuple[Shim, ...] = (
    Shim("megatron.core.optimizer:Adam", torch.optim.AdamW,
         "megatron takes TransformerEngine's or apex's Adam where it can be imported; neither clips and guards in its "
         "kernel, and Ascend's apex has no kernel behind it and raises"),
    Shim("megatron.core.optimizer:USING_PYTORCH_OPTIMIZER", True, "goes with the line above"),
    Shim("megatron.core.optimizer.distrib_optimizer:HAVE_APEX_OR_TE", False, "goes with the lines above"),
    Shim("torch.distributed:ProcessGroupGloo.__init__", with_one_worker, "two workers corrupt the heap: see gloo.py"),
)
"""torch's fused AdamW on every machine, whatever else is installed (the same arithmetic and states), and safe gloo."""


def apply_shims(shims: Sequence[Shim]) -> None:
    """Apply ``shims`` in order.  Call it before anything else imports megatron."""
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
    """Import megatron without torch.compile, with which it decorates functions that our kernels replace.

    torch.compile would build code for every new shape.  megatron's own switch comes too late for functions decorated at
    the package's import, and torch.compile alone takes 2.4 s to load its compiler.
    """
    torch_compile = torch.compile
    torch.compile = lambda function: function
    try:
        importlib.import_module("megatron.core.jit").disable_jit_fuser()
    finally:
        torch.compile = torch_compile
