"""The bytes that the optimizer keeps for each trained weight, and for which weights in host memory."""

from collections.abc import Sequence

from mm.config.flags import Arguments
from mm.plan.layer_memory import FP32, WIDTHS

KEPT_COPY_BYTES = {"fp32": FP32, "remainder": 2, "none": 0}
"""Bytes kept beside a trained weight in 16 bits, by ``Arguments.kept_copy``."""


def state_widths(args: Arguments) -> tuple[int, int]:
    """Bytes per trained parameter of what is kept beside the weight, and of both moments."""
    copy_width = KEPT_COPY_BYTES[args.kept_copy] if args.precision != "fp32" else 0
    return copy_width, WIDTHS[args.exp_avg_dtype] + WIDTHS[args.exp_avg_sq_dtype]


def on_host(share: float) -> str:
    """What the user calls ``Arguments.host_share``."""
    return f"{100 * share:.3g}% of the optimizer states in host memory"


def offloaded(sizes: Sequence[int], share: float) -> list[int]:
    """Indices, in order, of the weights whose states are in host memory, by the weights' numbers of elements.

    Together they have at most ``share`` of all elements, and less only by fewer than the smallest other one has: the
    largest are taken first, and each that still fits.
    """
    left = round(share * sum(sizes))
    chosen: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        if sizes[index] <= left:
            chosen.append(index)
            left -= sizes[index]
    return sorted(chosen)
