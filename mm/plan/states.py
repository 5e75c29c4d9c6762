"""The bytes that the optimizer keeps for each trained weight, and the weights whose states are in host memory."""

from collections.abc import Sequence

from mm.config.flags import Arguments
from mm.plan.layer_memory import FP32, WIDTHS

KEPT_COPY_BYTES = {"fp32": FP32, "remainder": 2, "none": 0}
"""Bytes kept beside a trained weight in 16 bits, by ``Arguments.kept_copy``."""


def state_widths(args: Arguments) -> tuple[int, int]:
    """Bytes per trained parameter: those kept beside the weight, and those of both moments."""
    copy_width = KEPT_COPY_BYTES[args.kept_copy] if args.precision != "fp32" else 0
    return copy_width, WIDTHS[args.exp_avg_dtype] + WIDTHS[args.exp_avg_sq_dtype]


def on_host(share: float) -> str:
    """``Arguments.host_share`` in words."""
    return f"{100 * share:.3g}% of the optimizer states in host memory"


def offloaded(sizes: Sequence[int], share: float) -> list[int]:
    """Indices, in order, of the weights whose states are in host memory, given the ``sizes`` of all in elements.

    The largest are taken first, each if it still fits into ``share`` of all elements.  What remains of that share is
    smaller than any weight that was left out.
    """
    left = round(share * sum(sizes))
    chosen: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        if sizes[index] <= left:
            chosen.append(index)
            left -= sizes[index]
    return sorted(chosen)
